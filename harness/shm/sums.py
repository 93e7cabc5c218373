"""Sums in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Elements summed at a time, so that the running sum stays in cache."""


def sum_in_order(terms: Sequence[Tensor], out: Tensor, dtype: torch.dtype, *, block: int = BLOCK) -> None:
    """out = terms[0] + terms[1] + ..., added one by one in `dtype`; flat tensors of one length.

    One of the terms may lie where `out` does.
    """
    for begin in range(0, out.numel(), block):
        end = min(begin + block, out.numel())
        first, *others = (term[begin:end] for term in terms)
        into = out[begin:end]
        if not others and torch.promote_types(first.dtype, dtype) == dtype:
            into.copy_(first)
            continue
        if len(others) == 1 and first.dtype == others[0].dtype == into.dtype == dtype:
            torch.add(first, others[0], out=into)
            continue
        total = first.to(dtype, copy=True)
        for other in others:
            total.add_(other if torch.promote_types(other.dtype, dtype) == dtype else other.to(dtype))
        into.copy_(total)
