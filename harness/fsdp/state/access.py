"""The state of a sharded model as its user sees it, whole, by name, or as this rank's own; and how it is taken back."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import _IncompatibleKeys

from harness.fp8.linear import Fp8Linear
from harness.fsdp.comm.crossed import Everyone
from harness.fsdp.ragged import RaggedTensor
from harness.fsdp.state import flat
from harness.fsdp.state.named import WEIGHTS, ShardedState, check_fit
from harness.fsdp.state.of_parameters import add_optimizers, load_local_state, local_state
from harness.fsdp.storage.at_rest import sharded_of
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.dtensors import DTensorFactory, refuse_split_experts
from harness.fsdp.storage.whereabouts import check_names

FP8 = "fp8/"
"""Prefix of what delayed scaling knows."""


class Weights(Protocol):
    """What brings main weights into the compute weights."""

    def wait(self, *, writes: bool = False) -> None:
        """Wait until other ranks have taken this rank's weights, so that these may change; edits of the program count
        from now on. writes: main weights are written next."""

    def refuse_held(self) -> None:
        """Raise RuntimeError where weights are held whole, which a load would not reach."""

    def adopt_edits(self) -> None:
        """Let main weights know edits of unsharded ones; RuntimeError where they cannot."""

    def bring_up_to_date(self) -> None:
        """Make main weights that were written count now, if any were. *Collective*."""

    def install(self) -> None:
        """Make main weights that were written count in the very next forward. *Collective.*"""


class StepGradients(Protocol):
    """What finishes or forgets a step's gradients."""

    def finish(self) -> None:
        """Wait for the step's reductions and scale the gradients, once. *Collective.*"""

    def collect(self) -> None:
        """Let main gradients be what parameters have as `.grad`, zeros for None."""

    def forget(self, *, set_to_none: bool = True) -> None:
        """Forget all gradients of the step."""


class StateAccess:
    """Hands out the state of one sharded model and takes it back.

    Args:
        module: whose names are the state's.
        buckets: all of the model's.
        weights: waited for before weights are handed out or written, told when they were written.
        gradients: finished before they are handed out, forgotten when a state was taken back whole.
        everyone: all ranks, the first of which has the buffers that count.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        weights: Weights,
        gradients: StepGradients,
        everyone: Everyone,
    ) -> None:
        self.module = module
        self.buckets = buckets
        self.weights = weights
        self.gradients = gradients
        self.everyone = everyone
        self._shards = DTensorFactory(buckets)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Main weights by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        self.settle()
        return self._in_model_order(flat.full_weights(self.buckets), self.buckets)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Finished gradients by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        self.gradients.finish()
        self.gradients.collect()
        check_names(self.module)
        trainable = [bucket for bucket in self.buckets if bucket.trainable]
        return self._in_model_order(flat.full_gradients(self.buckets), trainable)

    def local_gradients(self) -> dict[str, Tensor]:
        """This rank's rows of every finished gradient, by parameter name; not copied."""
        self.gradients.finish()
        self.gradients.collect()
        return dict(flat.local_gradients([bucket for bucket in self.buckets if bucket.trainable]))

    def settle(self) -> None:
        """Let weights, and their names, be what they are everywhere.

        Raises:
            RuntimeError: the module's parameters have other names by now; or unsharded ones were edited.
        """
        self.weights.adopt_edits()
        self.weights.wait(writes=True)  # by whoever is given them
        check_names(self.module)

    def _in_model_order(
        self, named: Iterator[tuple[str, Tensor]], buckets: Sequence[Bucket]
    ) -> Iterator[tuple[str, Tensor]]:
        """Hold back only what comes before its turn, so that little more than a bucket is in memory."""
        present = {name for bucket in buckets for name, _ in bucket.params}
        order = [name for name, _ in self.module.named_parameters() if name in present]
        early: dict[str, Tensor] = {}
        place = 0
        for name, value in named:
            early[name] = value
            while place < len(order) and order[place] in early:
                yield order[place], early.pop(order[place])
                place += 1

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
        """What the module's own `state_dict` gives: main weights as DTensors over the engine's own memory, and saved
        buffers as they are on the first rank. *Collective* where there are buffers.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
            RuntimeError: on all ranks: a buffer has another shape or dtype on one of them.
        """
        self.settle()
        refuse_split_experts(self.buckets)
        to: dict[str, Any] = {"destination": destination, "prefix": prefix} if destination is not None or prefix else {}
        found: dict[str, Any] = self.module.state_dict(keep_vars=True, **to)
        buffers = {id(each) for each in self.module.buffers()}
        self._refuse_uneven([(name, each) for name, each in found.items() if id(each) in buffers])
        of_rank_0: dict[int, Tensor] = {}
        for name, entry in found.items():
            if id(entry) in buffers:
                if id(entry) not in of_rank_0:
                    of_rank_0[id(entry)] = self.everyone.from_first(entry, f"saved {name}").clone()
                found[name] = of_rank_0[id(entry)]
            elif isinstance(entry, Tensor):
                found[name] = sharded_of(entry).detach()
        return found

    def _refuse_uneven(self, buffers: Sequence[tuple[str, Tensor]]) -> None:
        """Raise RuntimeError where ranks have buffers of other kinds, of which no rank could take the first one's.
        *Collective* where there are any."""
        kinds = [f"{name} {each.dtype} {each.layout} {list(each.shape)}" for name, each in buffers]
        if not kinds or self.everyone.size == 1:
            return
        together, counts = self._everyones([_hash("\t".join(kinds)), len(kinds)]).unbind(1)
        if bool((together == together[0]).all()):
            return
        told = f"there are {counts.tolist()} on the ranks"
        if bool((counts == counts[0]).all()):
            hashes = self._everyones([_hash(kind) for kind in kinds])
            place = int((hashes != hashes[0]).any(0).nonzero()[0])
            told = f"{kinds[place]} on rank {self.everyone.rank} is another one elsewhere"
        raise RuntimeError(
            f"ranks have other buffers, and what is saved of buffers is the first rank's: {told}. Give each the same"
            " shape and dtype on all ranks, or leave it out of what is saved: register_buffer(..., persistent=False)"
        )

    def _everyones(self, numbers: Sequence[int]) -> Tensor:
        """What each rank says: int64, shape [ranks, numbers]. *Collective.*"""
        table = torch.zeros(self.everyone.size, len(numbers), dtype=torch.int64, device=self.everyone.runtime.device)
        table[self.everyone.rank] = torch.tensor(numbers, dtype=torch.int64)
        return self.everyone.sum_scalars(table, "kinds of buffers")

    def load_state_dict(self, given: Mapping[str, Any], *, strict: bool) -> _IncompatibleKeys:
        """Take weights and buffers by the names of `state_dict`, by the module's own `load_state_dict`; returns names
        that one side lacks. Gradients wait for their step, as in torch. *Collective.*

        Raises:
            StateMismatch: with `strict` a name is missing or unexpected; or a shape differs. Nothing was loaded.
            RuntimeError: the same, found by a module that loads in a way of its own.
        """
        self.weights.refuse_held()
        self.settle()
        unsharded = [bucket for bucket in self.buckets if bucket.views.shows_unsharded]
        for bucket in self.buckets:
            bucket.rest()
        try:
            return self._load(given, strict=strict)
        finally:
            for bucket in unsharded:
                bucket.use()

    def _load(self, given: Mapping[str, Any], *, strict: bool) -> _IncompatibleKeys:
        """As `load_state_dict`, into the sharded parameters."""
        own = self.module.state_dict(keep_vars=True)
        if not any(_loads_otherwise(part) for part in self.module.modules()):
            _check(own, given, strict=strict)
        told = {id(own[name]): value for name, value in given.items() if name in own}
        tied = {name: told[id(entry)] for name, entry in own.items() if name not in given and id(entry) in told}
        found: _IncompatibleKeys = self.module.load_state_dict(
            {name: _as_target(value, own.get(name)) for name, value in {**given, **tied}.items()},
            **({} if strict else {"strict": False}),
        )
        return found

    def sharded_state(self, stepped: Sequence[torch.optim.Optimizer]) -> ShardedState:
        """Weights, and the state of optimizers over them, by the module's own names, over the engine's own memory."""
        self.settle()
        found = ShardedState({WEIGHTS + name: shard for name, shard in self._shards.weights(self.buckets).items()})
        add_optimizers(found, self.buckets, stepped)
        found.tensors |= self._fp8_state()
        return found

    def _fp8_state(self) -> dict[str, Tensor]:
        """State of delayed scaling, the same on all ranks between steps; in place. *Collective* after a step."""
        if Fp8Linear.delayed_state(self.module):
            self.weights.bring_up_to_date()
        return {FP8 + name: buffer for name, buffer in Fp8Linear.delayed_state(self.module).items()}

    def adopt_state(self, state: ShardedState) -> None:
        """Make what was written into `sharded_state` count from now on, and forget gradients. *Collective.*"""
        state.adopt()
        self._written()

    def local_state(self, stepped: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
        """This rank's flat weights and optimizer state, for resuming on the same layout.

        Raises:
            RuntimeError: there is no optimizer.
        """
        self.weights.adopt_edits()
        self.weights.wait()
        return local_state(self.buckets, _some(stepped)) | self._fp8_state()

    def load_local_state(self, values: Mapping[str, Tensor], stepped: Sequence[torch.optim.Optimizer]) -> None:
        """Take `local_state` back, and forget gradients. *Collective.*

        Raises:
            ValueError: it does not fit; nothing was loaded.
            RuntimeError: there is no optimizer.
        """
        self.weights.wait(writes=True)
        scales = self._fp8_state()
        check_fit(
            [(name, buffer, values[name]) for name, buffer in scales.items() if name in values],
            [name for name in scales if name not in values],
            [name for name in values if name.startswith(FP8) and name not in scales],
        )
        rest = {name: value for name, value in values.items() if not name.startswith(FP8)}
        load_local_state(self.buckets, _some(stepped), rest)
        for name, buffer in scales.items():
            buffer.copy_(values[name])
        self._written()

    def _written(self) -> None:
        self.weights.install()
        self.gradients.forget()


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def _some(stepped: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
    if not stepped:
        raise RuntimeError("no optimizer is attached; call fully_shard_optimizer(model, optimizer) first")
    return stepped


def _loads_otherwise(part: nn.Module) -> bool:
    """The program's own code decides which names and shapes are right."""
    loads: Any = type(part)._load_from_state_dict
    whole = type(part).load_state_dict is not nn.Module.load_state_dict
    return whole or not loads.__module__.startswith("torch.nn.") or bool(part._load_state_dict_pre_hooks)


COUNT = "num_batches_tracked"
"""What torch's batch norms did not save once, and do without."""


def _check(own: Mapping[str, Any], given: Mapping[str, Any], *, strict: bool) -> None:
    """Raise StateMismatch where a state does not fit; of a tensor with several names one is enough."""
    told = {id(own[name]) for name in given if name in own}
    missing = [name for name, entry in own.items() if id(entry) not in told and not name.endswith(COUNT)]
    unexpected = [name for name in given if name not in own]
    pairs = [(n, own[n], value) for n, value in given.items() if isinstance(own.get(n), Tensor)]
    check_fit(pairs, missing if strict else [], unexpected if strict else [])


def _as_target(value: Any, target: Any) -> Any:
    """A value as torch copies it into a target: cut as a DTensor of torch's own placements is, or whole.

    *Collective* where it is a DTensor.
    """
    target = sharded_of(target) if isinstance(target, Tensor) else target
    if isinstance(target, RaggedTensor) or not (isinstance(target, DTensor) or isinstance(value, DTensor)):
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(target, DTensor):
        return whole
    mesh = target.device_mesh
    return distribute_tensor(whole.to(mesh.device_type), mesh, target.placements, src_data_rank=None)
