"""Several tensors in one operation, where work is queued: one launch for all, with the bits of one for each.

On a CPU a launch costs nothing, and tensors go one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.fsdp.comm.device import is_queued
from harness.private_torch import foreach_add_, foreach_copy_, foreach_mul_


def _is_one(tensors: Sequence[Tensor]) -> bool:
    return len(tensors) > 1 and is_queued(tensors[0].device)


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor], *, follows: bool = True) -> None:
    """Copy each source into its target, unless it lies there. follows: the host waits for what is copied to it."""
    apart = [(target, source) for target, source in zip(targets, sources, strict=True) if not _is_there(target, source)]
    if _is_one(targets) and apart:
        foreach_copy_([target for target, _ in apart], [source for _, source in apart], not follows)
        return
    for target, source in apart:
        target.copy_(source, non_blocking=not follows)


def _is_there(target: Tensor, source: Tensor) -> bool:
    return target.numel() > 0 and target.data_ptr() == source.data_ptr()


def add_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add each source to its target."""
    if _is_one(targets):
        foreach_add_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.add_(source)


def scale_together(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply each by a factor, rounding once. A factor of shape [] on a device to which work is queued stays there:
    it multiplies even where it is 1, and the host does not look at it."""
    if isinstance(factor, Tensor) and tensors and is_queued(factor.device):
        _scale_on_device(tensors, factor)
        return
    factor = float(factor)
    if factor == 1.0:
        return
    if _is_one(tensors):
        foreach_mul_(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def _scale_on_device(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """One launch for tensors of the factor's own width; 16-bit ones go one by one, for which torch would first round
    the factor to their dtype."""
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        alike = [each for each in tensors if each.dtype == dtype]
        if dtype.itemsize >= torch.float32.itemsize:
            foreach_mul_(alike, factor.to(dtype))
            continue
        wide = factor.to(torch.float32).reshape(1)
        for each in alike:
            torch.mul(each, wide, out=each)
