"""The state of a sharded model as its user sees it, whole or by name; and how it is taken back.

Keys are `weights/<parameter>` (main weights; compute weights of frozen parameters) and `optimizer/<parameter>/<entry>`.
All share the engine's memory: what is written into them counts from the next forward or update on. Tensors with the
parameter's shape are DTensors, plain ones where nothing cuts them. Counters such as `step` are plain tensors of shape
[], one a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import HOME

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


def unsharded(
    module: nn.Module, buckets: Sequence[ParamGroup], shards_of: Callable[[ParamGroup], list[Tensor]], what: str
) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of each parameter, on the CPU, in the module's order. *Collective*."""
    present = {name for bucket in buckets for name, _ in bucket.params}
    homes = (getattr(param, HOME)[0] for _, param in module.named_parameters())
    order = [name for name in homes if name in present]
    early: dict[str, Tensor] = {}
    for bucket in buckets:
        group = None if bucket.tp is None else bucket.tp.group
        slices = bucket.named_slices(bucket.gather_whole(shards_of(bucket), what))
        for slot, (name, view) in zip(bucket.layout.slots, slices, strict=True):
            early[name] = bucket.tp_shard_of(slot).join(view.detach(), group).to("cpu", copy=True)
            while order and order[0] in early:
                yield order[0], early.pop(order.pop(0))
