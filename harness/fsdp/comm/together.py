"""The same operation on each of several tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.fsdp.comm.device import is_queued


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor], *, follows: bool = True) -> None:
    """Copy each source into its target, unless it lies there. follows: the host waits for what is copied to it."""
    for target, source in zip(targets, sources, strict=True):
        if not _is_there(target, source):
            target.copy_(source, non_blocking=not follows)


def _is_there(target: Tensor, source: Tensor) -> bool:
    return target.numel() > 0 and target.data_ptr() == source.data_ptr()


def add_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add each source to its target."""
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
    for tensor in tensors:
        tensor.mul_(factor)


def _scale_on_device(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """By a factor of fp32 at least: torch would first round it to the dtype of a 16-bit tensor."""
    for each in tensors:
        wide = each.dtype if each.dtype.itemsize >= torch.float32.itemsize else torch.float32
        torch.mul(each, factor.to(wide).reshape(1), out=each)


def zero_together(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()
