"""Optimizer and its state, norms and clipping, shared by every engine.

[Note: Cost of a timed step] torch's `clip_grad_norm_` takes one multi-tensor norm and one product. Peers are charged no
more: on CUDA `sum_of_squares`, our engine's own, is one multi-tensor norm too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.config.schema import OptimizerConfig, OptimizerName
from harness.engines.protocol import Workload
from harness.fsdp import create_state, sum_of_squares
from harness.muon import MuonWithAdamW

OF_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps")


class Group(NamedTuple):
    """orthogonalized: by Muon."""

    params: Sequence[Tensor]
    decays: bool
    orthogonalized: bool = False


def groups_of(
    config: OptimizerConfig, workload: Workload, params: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> list[Group]:
    """Parameters by decay, and by rule under `optimizer=muon`. shapes: of unsharded ones."""
    is_muon, by_kind = config.name is OptimizerName.muon, dict[tuple[bool, bool], list[Tensor]]()
    for name, param in params.items():
        kind = workload.decays(name, shapes[name]), is_muon and workload.orthogonalizes(name, shapes[name])
        by_kind.setdefault(kind, []).append(param)
    return [Group(by_kind[kind], *kind) for kind in sorted(by_kind, reverse=True)]


def make_optimizer(config: OptimizerConfig, groups: Sequence[Group], *, fused: bool = False) -> torch.optim.Optimizer:
    """SGD (with momentum), Adam (decay in the gradient), AdamW (decoupled), or Muon beside AdamW, over groups.

    Or the user's own class, called with the groups, the learning rate and `config.options`. `set_lr` changes the rate
    each step. `fused` takes torch's one-kernel step, whose last bits depend on where tensors are cut; else steps are
    plain tensor arithmetic.
    """
    tables: list[dict[str, Any]] = [
        {"params": list(group.params), "weight_decay": config.weight_decay if group.decays else 0.0}
        for group in groups
        if group.params
    ]
    kernel: dict[str, Any] = {"fused": True} if fused else {"foreach": False}
    if config.name is OptimizerName.sgd:
        return torch.optim.SGD(tables, lr=config.lr, momentum=config.momentum, **kernel)
    if config.name is OptimizerName.ext:
        own: Callable[..., torch.optim.Optimizer] = resolve_name(str(config.target))
        return own(tables, lr=config.lr, **config.options)
    family: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    if config.name is OptimizerName.adam:
        family = torch.optim.Adam
    elif config.name is OptimizerName.muon:
        family, settings = MuonWithAdamW, {name: getattr(config, name) for name in OF_MUON}
        settings |= {"adjust_lr_fn": config.adjust_lr_fn.name, "muon": True}
        for table, group in zip(tables, filter(lambda each: each.params, groups), strict=True):
            table.update(settings if group.orthogonalized else {})
    beta1, beta2 = config.betas
    return family(tables, lr=config.lr, betas=(beta1, beta2), eps=config.eps, **kernel)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_coefficient(norm: float, clip_norm: float | None) -> float:
    """min(1, clip_norm / (norm + 1e-6)) as in torch; nan where the norm is nan."""
    if clip_norm is None:
        return 1.0
    coefficient = clip_norm / (norm + 1e-6)
    # Not min(): that would turn a nan norm into 1 and hide it.
    return 1.0 if coefficient >= 1.0 else coefficient


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """State itself, not copied, as `<parameter>/<entry>` -> tensor."""
    held = create_state(optimizer)
    return {f"{names[param]}/{entry}": value for param, own in held.items() for entry, value in own.items()}


def make_room(optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Make what is to be loaded of the `entries` of an optimizer that needs parameters whole, as its own step would.

    params: by name. held: on meta, by the keys of a state. What is no scalar and has not the shape of its sharded
    parameter stays on meta until its owner is known.
    """
    for name, param in params.items() if hasattr(optimizer, "needs_whole") else ():
        for entry in getattr(optimizer, "entries", ()):
            like = held.get(f"optimizer/{name}/{entry}")
            if like is None or entry in optimizer.state.get(param, {}):
                continue
            if like.shape == param.shape:
                made = torch.zeros_like(param, dtype=like.dtype, requires_grad=False)
            else:
                is_at_owner = isinstance(param, DTensor) and like.dim() > 0
                made = torch.zeros_like(like, device="meta" if is_at_owner else param.device)
            optimizer.state[param][entry] = made


def euclidean_norm(
    tensors: Sequence[Tensor], device: torch.device, total: Callable[[Tensor], Tensor] = lambda squares: squares
) -> float:
    """Euclidean norm over all elements of all tensors; inf or nan where an element is.

    Args: tensors: plain, on `device`, of any floating dtypes. total: sums squares (fp64, shape [1]) over the ranks with
    the rest. Collective over them.
    """
    return math.sqrt(total(sum_of_squares(tensors, device)).item())


@torch.no_grad()
def scale(tensors: Sequence[Tensor], coefficient: float) -> None:
    """Multiply tensors in place, in a multi-tensor operation a dtype; 1 is a no-op.

    16-bit tensors are multiplied one by one: the multi-tensor product would round the coefficient to their dtype.
    """
    if coefficient == 1.0:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        held = [tensor for tensor in tensors if tensor.dtype is dtype]
        if dtype.itemsize >= 4:
            torch._foreach_mul_(held, coefficient)
        else:
            for tensor in held:
                tensor.mul_(coefficient)
