"""Norm and scaling of many tensors in a few multi-tensor kernels.

[Note: Cost of a timed step] torch's `clip_grad_norm_` takes one multi-tensor norm and one product, while sums in fp64
tensor by tensor would charge a peer thousands of launches. So on CUDA one `_foreach_norm` gives all norms, summed in
fp32 in blocks as in torch, and only those few numbers are squared and added in fp64. On CPU, where launches are cheap
and memory is not, it is `sum_of_squares`, our engine's own.

[Note: Numbers beyond fp32] Squares overflow in fp32 from 1.8e19 and vanish below 1e-19. Totals outside the safe range
are computed again in fp64; every rank sees the same total, so all of them do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.fsdp import sum_of_squares

SAFE = (1e-24, 1e30)
"""Range of totals without relevant overflow or underflow in fp32."""


@torch.no_grad()
def euclidean_norm(
    tensors: Sequence[Tensor], device: torch.device, total: Callable[[Tensor], Tensor] = lambda squares: squares
) -> float:
    """Euclidean norm over all elements of all tensors; inf or nan where an element is.

    Args: tensors: plain, on `device`, of any floating dtypes. total: sums squares (fp64, shape [1]) over the ranks with
    the rest. Collective over them, called twice by all ranks or by none.
    """
    held = [tensor.detach() for tensor in tensors]
    if device.type != "cuda":
        return math.sqrt(total(sum_of_squares(held, device)).item())
    found = total(grouped_squares(held, device)).item()
    if not SAFE[0] < found < SAFE[1]:
        found = total(sum(map(_square_in_fp64, held), torch.zeros(1, dtype=torch.float64, device=device))).item()
    return math.sqrt(found)


def grouped_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares, fp64 and of shape [1], in one multi-tensor operation a dtype.

    fp64 is summed in fp64, everything else in fp32; empty tensors count for nothing.
    """
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        held = [tensor for tensor in tensors if tensor.dtype is dtype and tensor.numel()]
        if held:
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            norms = torch.stack(torch._foreach_norm(held, 2.0, dtype=wide))
            squares += norms.to(torch.float64).square().sum()
    return squares


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


def _square_in_fp64(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square()
