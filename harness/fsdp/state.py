"""The state of a sharded model as its user sees it, whole or by name; and how it is taken back.

Keys are `weights/<parameter>` (main weights; compute weights of frozen parameters) and `optimizer/<parameter>/<entry>`.
All share the engine's memory: what is written into them counts from the next forward or update on. Tensors with the
parameter's shape are DTensors, plain ones where nothing cuts them. Counters such as `step` are plain tensors of shape
[], one a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp.storage.at_rest import sharded_of
from harness.fsdp.storage.dtensors import as_target, refuse_split_experts
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import HOME, check_names

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
Opt = torch.optim.Optimizer


def optimizer_entries(buckets: Sequence[ParamGroup], optimizers: Sequence[Opt]) -> dict[str, Tensor]:
    """State of sharded parameters by `optimizer/<parameter>/<entry>`, not copied. Raises NotImplementedError: an
    optimizer keeps something else than tensors."""
    owner = {id(param): each for each in optimizers for group in each.param_groups for param in group["params"]}
    pairs = [pair for each in buckets for pair in zip(each.layout.slots, each.views.at_rest, strict=True)]
    found = {}
    for slot, param in (pair for pair in pairs if id(pair[1]) in owner):
        held = owner[id(param)].state.get(param) or {}
        for entry, value in held.items():
            if isinstance(value, Tensor):
                found[f"{OPTIMIZER}{slot.spec.name}/{entry}"] = value.detach()
            elif value is not None:
                raise NotImplementedError(
                    f"{type(owner[id(param)]).__name__} keeps {entry} of {slot.spec.name} as a {type(value).__name__}:"
                    " state by name has tensors alone. Keep a tensor of shape [], or use optimizer.state_dict()"
                )
    return found


class StateAccess:
    """weights, gradients: the model's `runtime.weights.Weights` and `runtime.gradient_sync.GradientSync`."""

    def __init__(self, module: nn.Module, weights: Any, gradients: Any) -> None:
        # the module's class before it was sharded, whose `state_dict` and `load_state_dict` are the program's
        self._own: type[nn.Module] = type(module)
        self.weights, self.gradients = weights, gradients
        self.buckets: Sequence[ParamGroup] = weights.buckets

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        self.settle()
        return self._unsharded(self.buckets, lambda bucket: bucket.main_shards, "weights")

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        trained = self._with_gradients()
        check_names(self.weights.module)
        return self._unsharded(trained, lambda bucket: bucket.grad_shards, "gradients")

    def local_gradients(self) -> dict[str, Tensor]:
        rows = (each for bucket in self._with_gradients() for each in bucket.cuts.own_rows(bucket.grad_shards))
        return {name: row.detach() for name, row in rows}

    def _with_gradients(self) -> list[ParamGroup]:
        self.gradients.finish()
        self.gradients.collect()
        return [bucket for bucket in self.buckets if bucket.trainable]

    def settle(self) -> None:
        """Raises RuntimeError: parameters have other names by now; or unsharded ones were edited."""
        self.weights.refuse_edits()
        self.weights.before_edit()  # by whoever is given them
        check_names(self.weights.module)

    def _unsharded(
        self, buckets: Sequence[ParamGroup], shards_of: Callable[[ParamGroup], list[Tensor]], what: str
    ) -> Iterator[tuple[str, Tensor]]:
        present = {name for bucket in buckets for name, _ in bucket.params}
        homes = (getattr(param, HOME)[0] for _, param in self.weights.module.named_parameters())
        order = [name for name in homes if name in present]
        early: dict[str, Tensor] = {}
        for bucket in buckets:
            group = None if bucket.tp is None else bucket.tp.group
            slices = bucket.named_slices(bucket.gather_whole(shards_of(bucket), what))
            for slot, (name, view) in zip(bucket.layout.slots, slices, strict=True):
                early[name] = bucket.tp_shard_of(slot).join(view.detach(), group).to("cpu", copy=True)
                while order and order[0] in early:
                    yield order[0], early.pop(order.pop(0))

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
        """The module's own, with DTensors over the engine's memory. *Collective*: buffers have one shape on all
        ranks."""
        self.settle()
        refuse_split_experts(self.buckets)
        to: dict[str, Any] = {"destination": destination, "prefix": prefix} if destination is not None or prefix else {}
        found: dict[str, Any] = self._own.state_dict(self.weights.module, keep_vars=True, **to)
        buffers = {id(each) for each in self.weights.module.buffers()}
        for name, entry in found.items():
            if id(entry) in buffers:
                found[name] = self.weights.meshes.everyone.from_first(entry, f"saved {name}").clone()
            elif isinstance(entry, Tensor):
                found[name] = sharded_of(entry).detach()
        return found

    def load_state_dict(self, given: Mapping[str, Any], *, strict: bool) -> Any:
        """Load by the module's own `load_state_dict`, which raises as torch's; gradients wait for their step.
        *Collective.*"""
        self.weights.refuse_held()
        self.settle()
        unsharded = [bucket for bucket in self.buckets if bucket.views.sharded().shows_unsharded]
        for bucket in self.buckets:
            bucket.rest()
        try:
            return self._load(given, strict=strict)
        finally:
            for bucket in unsharded:
                bucket.use()

    def _load(self, given: Mapping[str, Any], *, strict: bool) -> Any:
        own = self._own.state_dict(self.weights.module, keep_vars=True)
        by_entry = {id(own[name]): value for name, value in given.items() if name in own}
        tied = {name: by_entry[id(entry)] for name, entry in own.items() if name not in given and id(entry) in by_entry}
        values = {name: as_target(value, sharded_of(own.get(name))) for name, value in {**given, **tied}.items()}
        loose = {} if strict else {"strict": False}
        return self._own.load_state_dict(self.weights.module, values, **loose)

    def sharded_state(self, stepped: Sequence[Opt]) -> dict[str, Tensor]:
        self.settle()
        refuse_split_experts(self.buckets)
        weights = {  # views that share the version, by which a forward knows that it must install
            WEIGHTS + name: bucket.views.sharded().view(index, bucket.main_shards)
            for bucket in self.buckets
            for index, (name, _) in enumerate(bucket.params)
        }
        return weights | optimizer_entries(self.buckets, stepped)
