"""Whole weights for the program itself, outside forward and backward: to be read, and edited.

[Note: Edits of gathered weights] What was edited is told on leaving: torch counts edits of a parameter and of its
`data`, and where main weights lie apart from the compute weights, this rank's own part shows others too (through numpy,
say): it is no longer what the main weights give when cast. If any rank saw an edit, all compare the bits of all weights
that were gathered; then each takes over the elements of its part that differ. Elements that nobody edited so keep the
bits that the compute dtype does not have.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from harness.fsdp.comm.mesh import Meshes
from harness.fsdp.guards.replicas import Replica, ReplicaDrift, check_equal
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.hooks import Hooks
from harness.fsdp.runtime.installation import WeightInstaller
from harness.fsdp.runtime.units import Unit, buckets_of, rest
from harness.fsdp.storage import edits
from harness.fsdp.storage.at_rest import sharded_of
from harness.fsdp.storage.param_group import ParamGroup

Wanted = nn.Module | nn.Parameter | str


class WholeWeights:
    """Unshards units for the program, and takes over its edits."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        gather: GatherPipeline,
        hooks: Hooks,
        weights: WeightInstaller,
        meshes: Meshes,
    ) -> None:
        self._module = weakref.ref(module)
        self.units = units
        self.gather = gather
        self.hooks = hooks
        self.weights = weights
        self.meshes = meshes

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    @contextmanager
    def unsharded(self, wanted: Wanted | Iterable[Wanted] | None = None) -> Iterator[None]:
        """See `harness.fsdp.module.FSDPModule.unsharded`."""
        units = self._units_of(wanted)
        self._refuse_inside("unsharded()")
        self.hooks.step.check_installed()
        self.hooks.of_forward.check_module()
        self.weights.adopt_edits()
        self.weights.bring_up_to_date()
        self.weights.wait()
        held = self.gather.hold(units)
        for bucket in buckets_of(held):
            bucket.views.forget_edits()  # those from before
        buckets = list(buckets_of(units))
        for unit in held:
            unit.is_held = True
        for bucket in buckets:
            bucket.receive()
            bucket.use()
            if (sharded := bucket.views.sharded()) is not None:
                sharded.count_edits()
        modules = self._modules()
        try:
            yield
            self._refuse_replaced(modules)
            edited = self._take_edits(buckets)
        finally:
            for unit in held:
                unit.is_held = False
            self.gather.let_go(held)
            rest(held)
        if edited:
            self.weights.install()

    def start(self) -> None:
        """Start gathers of the next forward. *Collective.* Raises as `settle`."""
        self._refuse_inside("start_param_sync()")
        self.hooks.step.check_installed()
        self.weights.wait()
        self.gather.pre_forward()
        rest(self.units)

    def settle(self) -> None:
        """Wait for gathers under way and reshard. *Collective.*

        Raises:
            RuntimeError: inside the model's forward or backward.
        """
        self._refuse_inside("synchronize_param_gather()")
        self.weights.wait()
        self.gather.settle()
        rest(self.units)

    def _units_of(self, wanted: Wanted | Iterable[Wanted] | None) -> list[Unit]:
        """Raises ValueError where a name is not the model's."""
        if wanted is None:
            return list(self.units)
        several = [wanted] if isinstance(wanted, nn.Module | nn.Parameter | str) else list(wanted)
        params = {id(param) for each in several for param in self._params_of(each)}
        owned = {id(param): unit for unit in self.units for bucket in unit.buckets for _, param in bucket.params}
        owned |= {id(param): unit for unit in self.units for bucket in unit.buckets for param in bucket.views.at_rest}
        if not params <= owned.keys():
            raise ValueError("unsharded() was given a parameter or a module that is not the sharded model's")
        found = {owned[each].name for each in params}
        return [unit for unit in self.units if unit.name in found]

    def _params_of(self, wanted: Wanted) -> list[nn.Parameter]:
        if isinstance(wanted, nn.Parameter):
            return [wanted]
        if isinstance(wanted, nn.Module):
            return list(wanted.parameters())
        found = [p for name, p in self.module.named_parameters(remove_duplicate=False) if _lies_in(name, wanted)]
        if not found:
            raise ValueError(f"unsharded({wanted!r}): no parameter, and no module with parameters, is called so")
        return found

    def _refuse_inside(self, call: str) -> None:
        self.hooks.recover()
        if self.hooks.is_inside:
            raise RuntimeError(f"{call} inside the model's forward or backward: weights that run are whole already")

    def _modules(self) -> list[tuple[str, int]]:
        modules = [(name, id(part)) for name, part in self.module.named_modules(remove_duplicate=False)]
        params = self.module.named_parameters(remove_duplicate=False)
        return modules + [(name, id(sharded_of(param))) for name, param in params]

    def _refuse_replaced(self, before: list[tuple[str, int]]) -> None:
        now = self._modules()
        if now != before:
            changed = next(iter(name for name, _ in sorted(set(before) ^ set(now)) if name), "the module")
            raise RuntimeError(
                f"{changed} was replaced, added or removed inside unsharded(): the sharded model keeps its own modules"
                " and parameters. Edit values in place; do what rebuilds modules (merge_and_unload, say) before"
                " sharding, or on a copy made of full_weights()"
            )

    def _take_edits(self, buckets: Sequence[ParamGroup]) -> bool:
        """Take over edits on every rank; True if there were any. *Collective.*

        Raises:
            ReplicaDrift: ranks edited differently; none is kept where weights are not resident.
        """
        differing = [edits.differing(bucket) for bucket in buckets]
        seen = any(bucket.views.edited() for bucket in buckets) or any(
            bool(places.any()) for each in differing for places in each
        )
        everyone = self.meshes.dense.everyone
        if not int(everyone.sum_scalars(_flag(seen, everyone.runtime.device), "edits of gathered weights")):
            return False
        try:
            self._compare(buckets)
        finally:
            for bucket in buckets:
                bucket.views.forget_edits()
        for bucket, places in zip(buckets, differing, strict=True):
            edits.take_over(bucket, places)
        return True

    def _compare(self, buckets: Sequence[ParamGroup]) -> None:
        for mesh in self.meshes:
            of_mesh = [bucket for bucket in buckets if bucket.mesh is mesh]
            views = [(bucket, named) for bucket in of_mesh for named in bucket.named_slices(bucket.compute)]
            replicas = [Replica(bucket.name, named[1], partial(list, [named])) for bucket, named in views]
            try:
                check_equal(replicas, mesh.everyone, "after an edit inside unsharded()")
            except ReplicaDrift as error:
                raise ReplicaDrift(f"{error}. All ranks must make the same edit inside unsharded()") from None


def _lies_in(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}.") or not wanted


def _flag(value: bool, device: torch.device) -> Tensor:
    return torch.tensor(int(value), dtype=torch.int64, device=device)
