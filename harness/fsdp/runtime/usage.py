"""Which parameters got a gradient on no rank in a step: their `.grad` is None on all ranks.

A parameter is used if any rank had a gradient of it in any microbatch of the step; then all ranks update it, those that
had none with the others' sum. Ranks sum one int64 a parameter once a step, in the message that also carries the
counters of numerics=exact. Each of these numbers tells the step, too: `_UPDATE` for each update of the weights so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.mesh import Mesh, Meshes
from harness.fsdp.runtime.step import StepError
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.param_group import ParamGroup

_UPDATE = 1 << 20


class Usage:
    """Finds, once a step, parameters that got a gradient on no rank.

    Args:
        groups: ranks and their gradients, of dense parameters first, then of experts.
    """

    def __init__(self, groups: Sequence[tuple[Communicator, Sequence[Gradients]]]) -> None:
        self.groups = groups

    @classmethod
    def of(cls, meshes: Meshes, trained: Sequence[ParamGroup]) -> Usage:
        def held_by(mesh: Mesh) -> list[Gradients]:
            return [b.gradients for b in trained if b.mesh is mesh and b.gradients is not None]

        return cls([(mesh.everyone, held_by(mesh)) for mesh in meshes])

    def find(self, num_updates: int, beyond: Tensor | None = None) -> int:
        """Set `unused` of all gradients. *Collective.*

        Args:
            num_updates: of this rank's weights so far.
            beyond: int64, shape [1], summed over the first group in the same message.

        Returns the sum of `beyond`, or 0.

        Raises:
            StepError: ranks are in different steps.
        """
        first, *others = self.groups
        found = self._count(*first, num_updates, beyond)
        for group in others:
            self._count(*group, num_updates)
        return found

    def _count(
        self, comm: Communicator, gradients: Sequence[Gradients], num_updates: int, beyond: Tensor | None = None
    ) -> int:
        had = [index in each.came for each in gradients for index in range(len(each.params))]
        if beyond is None and not had:
            return 0
        device, updates = comm.runtime.device, num_updates * _UPDATE
        if all(had):  # filled on the device
            sums = torch.full((len(had),), 1 + updates, dtype=torch.int64, device=device)
        else:
            sums = torch.tensor([each + updates for each in had], dtype=torch.int64, device=device)
        what = "used parameters" if beyond is None else "gradients beyond the fixed point"
        sums = sums if beyond is None else torch.cat([beyond, sums])
        comm.sum_scalars(sums, what)
        if beyond is None and all(had) and is_queued(device):  # no sum is zero, and the host would wait for the device
            return 0
        totals: list[int] = sums.tolist()
        found = 0 if beyond is None else totals.pop(0)
        if any(each // _UPDATE != num_updates * comm.size for each in totals):
            raise StepError(
                f"this rank's gradients are those after {num_updates} updates of the weights, and other ranks' are"
                " not: some rank ran a backward more, or less. All ranks must run equally many backwards with"
                " synchronisation in each step"
            )
        counts = iter([each % _UPDATE for each in totals])
        for group in gradients:
            group.unused = frozenset(index for index in range(len(group.params)) if not next(counts))
        return found
