"""The entry of the engine, as FSDP2's; `harness.fsdp.megatron` has the entries of megatron-fsdp."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from harness.fsdp import megatron
from harness.fsdp.module import FSDPModule
from harness.fsdp.options import OPTIONS
from harness.fsdp.sharding import shard

ShardedModel = FSDPModule
OWN = inspect.signature(shard).parameters.keys() - inspect.signature(megatron.fully_shard_model).parameters.keys()
"""Arguments of this entry that megatron-fsdp names otherwise."""


def fully_shard(module: nn.Module, optimizer: Any = None, **arguments: Any) -> Any:
    """Shard a module in place over all ranks, those of a mesh or of process groups, and return it. *Collective.*

    Its class becomes a mix-in of `FSDPModule` and its own; between passes its parameters are DTensors. Pass an
    optimizer over them to `fully_shard_optimizer`, or control it yourself with `finish_grad_sync`, `clip_grad_norm_`
    and `install_weights`. With an optimizer here, for one version, the result is a pair, as of
    `harness.fsdp.megatron.fully_shard`, whose arguments may stand in place of these.

    Args:
        module: on the "meta" device if `initial_value` or `init_on_meta` is given.
        mesh: one dimension: shards; two: replicas, then shards.
        group, groups: instead of a mesh, the data-parallel ranks, or those of both axes.
        expert_groups: the same for parameters with `allreduce = False` (experts); None: as for the others.
        unit_modules: classes (or dotted paths) whose outermost instances are gathered and reduced together, such as
            transformer blocks; without any, the whole module is one unit.
        strategy: ZeRO stage along the inner axis: a `Strategy`, its name, or 0-3.
        outer_strategy: what the outer axis splits: an `OuterStrategy`, its name, or 0-1.
        mp_policy: dtypes of weights and gradients.
        device: device of the buckets; None is that of the parameters, or the group's if they are on meta.
        grad_divisor: summed gradients, those of experts too, are divided by it once per step. None is the number of
            ranks (of both axes, experts or not), so that a loss averaged on each rank gives the averaged gradient; a
            loop over k microbatches then scales its loss by 1/k. If it is the number of global microbatches (or
            tokens), the loop does not scale the loss.
        initial_value: returns each parameter's full value by name, the same on all ranks; None takes the parameters and
            buffers of the group's first rank, as DDP does.
        init_on_meta: parameters on the meta device get their values from `reset_parameters()` of each module.
        prefetch and the others: see `harness.fsdp.options.Options`.

    Raises:
        TypeError: an unknown argument.
        ValueError: an argument's value, with what would be valid; or a part of the module is sharded already.
    """
    if optimizer is None or arguments.keys() & OWN:
        model = shard(module, FSDPModule, **arguments)
        return model if optimizer is None else (model, megatron.fully_shard_optimizer(model, optimizer))
    return megatron.fully_shard(module, optimizer, **arguments)


def _signature() -> inspect.Signature:
    """The signature of `shard`, with an optimizer in place of the mix-in, and every option by name."""
    module, _, *others, _ = inspect.signature(shard).parameters.values()
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=option.kind)
        for name, option in OPTIONS.items()
    ]
    return inspect.Signature(
        [module, module.replace(name="optimizer", default=None, annotation=Any), *others, *options],
        return_annotation=Any,
    )


fully_shard.__signature__ = _signature()  # type: ignore[attr-defined] # read by inspect
