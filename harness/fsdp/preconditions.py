"""What a module must be to be sharded: told before anything is changed, with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from harness.fsdp.wrapper import is_sharded, part_of

TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Modules that make sparse gradients, or edit their weights in a forward, when they are asked to."""
OTHER_ENGINES = ("torch.nn.parallel", "torch.distributed.fsdp")
"""Where classes of torch's own engines are defined."""


def check_request(module: nn.Module, unit_classes: Sequence[type[nn.Module]], grad_divisor: float | None) -> None:
    """Refuse what cannot be sharded.

    Raises:
        ValueError: of the module, a part of it, its parameters, the unit classes or the divisor: what is wrong with it.
    """
    if grad_divisor is not None and not grad_divisor > 0:
        raise ValueError(f"grad_divisor={grad_divisor} must be positive")
    if is_sharded(module):
        raise ValueError(f"{type(module).__name__} is sharded already; shard a module once")
    for path, part in module.named_modules():
        _check_part(path or "the module", part)
    params = list(module.named_parameters())
    if not params:
        raise ValueError(f"{type(module).__name__} has no parameters to shard: shard the module that has them")
    for name, param in params:
        _check_param(name, param)
    _check_apart(params)
    _check_units(module, unit_classes)


def _check_part(path: str, part: nn.Module) -> None:
    kind = type(part).__name__
    if is_sharded(part) or part_of(part) is not None:
        raise ValueError(
            f"{path} ({kind}) is sharded already, by itself or as a part of another model: shard the outermost module"
            " once, and name what is gathered together in fsdp_unit_modules"
        )
    if any(base.__module__.startswith(OTHER_ENGINES) for base in type(part).__mro__):
        raise ValueError(
            f"{path} ({kind}) is wrapped by another data-parallel engine, which would reduce gradients too: shard the"
            " plain module"
        )
    if isinstance(part, TABLES) and part.sparse:
        raise ValueError(
            f"{path} ({kind}) has sparse=True, and flat buffers hold dense gradients alone: build it with sparse=False"
        )
    if isinstance(part, TABLES) and part.max_norm is not None and part.weight.requires_grad:
        raise ValueError(
            f"{path} ({kind}) has max_norm={part.max_norm}: each forward scales the rows that this rank's data uses, so"
            " that ranks would have other weights. Build it with max_norm=None, and scale what it gives; or all rows,"
            " between steps, inside `with model.gathered():`"
        )


def _check_param(name: str, param: nn.Parameter) -> None:
    if is_lazy(param):
        raise ValueError(
            f"parameter {name} has no shape yet ({type(param).__name__} of a lazy module): run one forward before"
            " sharding, or build the module with its sizes"
        )


def _check_apart(params: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Each parameter gets a place of its own: what was a view of another one would follow it no more."""
    plain = [(name, p) for name, p in params if p.layout is torch.strided and not p.is_meta and type(p.data) is Tensor]
    reach = [(p.data_ptr(), p.data_ptr() + _reach(p) * p.itemsize, name) for name, p in plain if p.numel()]
    for (_, end, name), (begin, _, other) in pairwise(sorted(reach)):
        if begin < end:
            raise ValueError(
                f"parameters {name} and {other} share memory, and are not the same parameter: an update of one would"
                " not reach the other any more. Tie them (b.weight = a.weight), use a part of one in the forward"
                " (a.weight[:n]), or make one a copy (clone())"
            )


def _reach(param: Tensor) -> int:
    """Elements from a parameter's first to its last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))


def _check_units(module: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    """At least one class must match: a list may serve several models."""
    if not classes or any(isinstance(part, tuple(classes)) for part in module.modules()):
        return
    there = sorted({type(part).__name__ for part in module.modules() if next(part.parameters(), None) is not None})
    raise ValueError(
        f"fsdp_unit_modules={[each.__name__ for each in classes]} matches no module of {type(module).__name__}, so that"
        f" everything would be one unit; it has {', '.join(there)}. Name some of these, or give no list"
    )
