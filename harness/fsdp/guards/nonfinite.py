"""Gradients that are not finite, reported by all ranks at the end of a step.

A rank that raised in the middle of a backward would leave the others waiting in their collectives: one small all-reduce
tells every rank, and all raise one error. A bucket is looked at once a backward: right before it is sent, in the wire's
dtype, or else at the end of the backward. The host reads one number, and the rest only if that is not zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import everyones
from harness.fsdp.storage.param_group import ParamGroup

PURPOSE = "non-finite gradients"


class GradientGuard:
    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._microbatch = 0  # counts from 1
        # of each bucket in each backward: microbatch, names and numbers of elements, and the largest element of each
        self._seen: list[tuple[int, list[tuple[str, int]], Tensor]] = []

    def begin_backward(self) -> None:
        self._microbatch += 1

    def forget(self) -> None:
        self._microbatch, self._seen = 0, []

    @torch.no_grad()
    def look(self, bucket: ParamGroup, gradients: Tensor) -> None:
        """Look at an unsharded bucket of unreduced gradients, any floating-point dtype."""
        held = [(name, view) for name, view in bucket.named_slices(gradients) if view.numel()]
        if held:
            largest = torch.stack([torch.linalg.vector_norm(view, math.inf) for _, view in held])
            self._seen.append((self._microbatch, [(name, view.numel()) for name, view in held], largest))

    def report(self) -> None:
        """Raise the same FloatingPointError on all ranks if any of them found something. *Collective.*"""
        found = torch.zeros(1, dtype=torch.int64, device=self.comm.runtime.device)
        for _, _, largest in self._seen:
            found += largest.isfinite().logical_not_().sum()
        if not int(self.comm.sum_scalars(found, PURPOSE)):
            return
        first = min(filter(None, everyones(self._first(), self.comm, PURPOSE)))
        raise FloatingPointError(
            f"gradients are not finite before their reduction: {first[-1]}. No weight was changed; zero_grad() forgets"
            " the step"
        )

    def _first(self) -> tuple[int, int, str] | None:
        """Microbatch, rank and description of this rank's first bad bucket.

        Of its parameters the last one: the backward reached it first.
        """
        for microbatch, params, largest in self._seen:
            for (name, numel), value in zip(reversed(params), reversed(largest.tolist()), strict=True):
                if not math.isfinite(value):
                    kind = "NaN" if math.isnan(value) else "Inf"
                    where = f"{name} on rank {self.comm.rank} in microbatch {microbatch}"
                    return microbatch, self.comm.rank, f"{where}: {kind} among {numel} elements"
        return None
