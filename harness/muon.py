"""Muon for matrices beside AdamW for everything else, in one optimizer; and the parts of torch's Muon that a sharded
step is made of.

[Note: Parts of Muon] Of torch's Muon (`torch/optim/_muon.py`) the iteration alone needs a whole matrix. Momentum, the
Nesterov mix, weight decay and the last addition are elementwise: they may be made of rows. The iteration begins with a
cast to bfloat16 and its result has that dtype, so that nothing is lost if rows travel in it. Matrices of a stack are
batched, `TOGETHER` at a time whoever owns them, as a batch of another length may round otherwise.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

TOGETHER = 8
MOMENTUM = "momentum_buffer"
WIRE = torch.bfloat16
SETTINGS: dict[str, Any] = dict(inspect.signature(torch.optim.Muon).parameters)
DEFAULTS = {name: each.default for name, each in SETTINGS.items() if name not in ("params", "lr")} | {"blocks": 1}
"""Settings of a group with `muon=True`: those of torch's Muon, and one block."""
_adamw: Callable[[torch.optim.Optimizer], Any] = inspect.unwrap(torch.optim.AdamW.step)


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW, but groups with `muon=True` are stepped as by torch's Muon, whose settings and defaults they have.

    A parameter of three dimensions is a stack of matrices, as of experts. `blocks=n` in a group cuts the rows of each
    matrix into n, as a packed projection is into heads; each block is orthogonalized by itself.
    """

    def __init__(self, params: Any, lr: Any = 1e-3, **settings: Any) -> None:
        super().__init__(params, lr, **settings)
        self._step_supports_amp_scaling = False  # a fused kernel leaves out what overflowed, matrices do not

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError: a parameter of a group with `muon=True` is no matrix, no stack, or not of whole blocks."""
        group = {"muon": False, **param_group}
        super().add_param_group({**DEFAULTS, **group} if group["muon"] else group)
        if group["muon"]:
            for param in self.param_groups[-1]["params"]:
                matrices_of(param.shape, self.param_groups[-1], f"a parameter of shape {[*param.shape]}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """AdamW's own asks that every parameter has a count of steps."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        for group in filter(steps_matrices, groups):
            for param in group["params"]:
                if param.grad is not None:
                    _step_alone(group, param, param.grad, self.state[param])
        self.param_groups = [group for group in groups if not steps_matrices(group)]
        try:
            _adamw(self)
        finally:
            self.param_groups = groups
        return loss


def steps_matrices(group: Mapping[str, Any]) -> bool:
    """True for a group of torch's Muon, and one with `muon=True`."""
    return bool(group.get("muon", "ns_steps" in group))


def matrices_of(shape: torch.Size, group: Mapping[str, Any], name: str) -> tuple[int, int]:
    """(rows, columns) of a parameter's matrices.

    Raises:
        ValueError: it is no matrix; or a stack, or cut into blocks, where torch's Muon would step it; or blocks are
            not of whole rows.
    """
    blocks, is_ours = group.get("blocks", 1), "muon" in group
    if not is_ours and (blocks != 1 or len(shape) != 2):
        raise ValueError(
            f"{name} with blocks={blocks} is in a group of torch.optim.Muon, which steps whole matrices alone: use"
            " harness.muon.MuonWithAdamW with muon=True in the group, or give the parameter to AdamW"
        )
    if len(shape) not in (2, 3):
        raise ValueError(
            f"{name} is in a group with muon=True, which takes matrices, and stacks of them in three dimensions: put"
            " vectors, scalars and kernels of convolutions into a group without it, which AdamW steps"
        )
    rows, columns = shape[-2:]
    if not (isinstance(blocks, int) and blocks > 0 and rows % blocks == 0):
        raise ValueError(
            f"{name} has {rows} rows in a matrix, which blocks={blocks} does not divide: give a divisor, as the number"
            " of heads of a packed projection, in a group of its own"
        )
    return rows // blocks, columns


def mix(group: Mapping[str, Any], grad: Tensor, momentum: Tensor) -> Tensor:
    """Advance the momentum by a gradient: what is to be orthogonalized, elementwise; perhaps the momentum itself."""
    momentum.lerp_(grad, 1 - group["momentum"])
    return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def orthogonalize(group: Mapping[str, Any], matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration on whole matrices, bfloat16 [n, rows, columns], in whose place it works."""
    a, b, c = group["ns_coefficients"]
    is_tall, product = matrices.size(1) > matrices.size(2), torch.addmm if len(matrices) == 1 else torch.baddbmm
    wide = matrices.mT if is_tall else matrices
    for each in wide:
        each.div_(each.norm().clamp(min=group["eps"]))
    wide = wide.squeeze(0)
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.mT
        wide = product(wide, product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.mT if is_tall else wide).view(matrices.shape)


def add(group: Mapping[str, Any], param: Tensor, update: Tensor, rows: int, columns: int) -> None:
    """Let rows of a parameter decay, and add those of an orthogonalized matrix of so many rows and columns."""
    lr: Any = group["lr"]
    rate: Any = lr.squeeze() if isinstance(lr, Tensor) and lr.dim() else lr
    param.mul_(1 - rate * group["weight_decay"])
    ratio = math.sqrt(max(1, rows / columns)) if columns else 1.0
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    param.add_(update, alpha=-(rate * ratio))


def _step_alone(group: Mapping[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """Step a whole parameter, as torch's Muon steps a matrix."""
    rows, columns = matrices_of(param.shape, group, "a parameter")
    if MOMENTUM not in state:
        state[MOMENTUM] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    given = mix(group, grad, state[MOMENTUM]).to(WIRE, copy=True)
    for box in boxes(param.shape, rows):
        place = tuple(slice(*each) for each in box)
        found = orthogonalize(group, given[place].reshape(-1, rows, columns))
        add(group, param[place], found.reshape(param[place].shape), rows, columns)


def multiplications(rows: int, columns: int, iterations: int) -> int:
    """Multiplications of an orthogonalization. Each iteration makes a product of the matrix with its transpose, squares
    that, and multiplies the matrix by the sum of both."""
    short, long = sorted((rows, columns))
    return iterations * (2 * short * short * long + short**3)


def boxes(shape: torch.Size, rows: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Begin and end in each dimension of what is orthogonalized together: `TOGETHER` neighbours of a stack, or blocks
    of one matrix, as many as there are."""
    *stack, height, columns = shape
    if not all(shape):
        return
    if stack and rows == height:
        for begin in range(0, stack[0], TOGETHER):
            yield (begin, min(begin + TOGETHER, stack[0])), (0, height), (0, columns)
        return
    for layer in range(*stack or (1,)):
        for begin in range(0, height, TOGETHER * rows):
            found = (begin, min(begin + TOGETHER * rows, height)), (0, columns)
            yield ((layer, layer + 1), *found) if stack else found
