"""Which parameters got a gradient on no rank in a step: their `.grad` is None on all ranks.

A parameter is used if any rank had a gradient of it in any microbatch of the step; then all ranks update it, those that
had none with the others' sum. Ranks sum one int64 a parameter once a step, in the message that also carries the
counters of numerics=exact. Each of these numbers tells the step, too: `_UPDATE` for each update of the weights so far.
A rank that had a gradient of every parameter knows that none is unused, and reads the sums a step later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending
from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.mesh import Mesh, Meshes
from harness.fsdp.runtime.step import StepError
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.param_group import ParamGroup

_UPDATE = 1 << 20


@dataclass(frozen=True)
class Group:
    comm: Communicator
    gradients: Sequence[Gradients]


class Usage:
    """Finds, once a step, parameters that got a gradient on no rank.

    Args:
        groups: gradients of dense parameters first, then of experts.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self._unread: list[tuple[Group, Pending, Tensor, int]] = []

    @classmethod
    def of(cls, meshes: Meshes, trained: Sequence[ParamGroup]) -> Usage:
        def held_by(mesh: Mesh) -> list[Gradients]:
            return [b.gradients for b in trained if b.mesh is mesh and b.gradients is not None]

        return cls([Group(mesh.everyone, held_by(mesh)) for mesh in meshes])

    def find(self, num_updates: int, beyond: Tensor | None = None) -> int:
        """Set `unused` of all gradients. *Collective.*

        Args:
            num_updates: of this rank's weights so far.
            beyond: int64, shape [1], summed over the first group in the same message.

        Returns the sum of `beyond`, or 0.

        Raises:
            StepError: ranks are in different steps.
        """
        self._read_late()
        sums = [
            self._count(group, num_updates, beyond if index == 0 else None) for index, group in enumerate(self.groups)
        ]
        return sums[0]

    def _count(self, group: Group, num_updates: int, beyond: Tensor | None) -> int:
        had = [index in each.came for each in group.gradients for index in range(len(each.params))]
        if group.comm.size == 1:
            self._note(group.gradients, [int(each) for each in had])
            return 0 if beyond is None else int(beyond)
        if beyond is None and not had:
            return 0
        device, updates = group.comm.runtime.device, num_updates * _UPDATE
        counts = _filled(had, updates, device)
        what = "used parameters" if beyond is None else "gradients beyond the fixed point"
        sums = counts if beyond is None else torch.cat([beyond, counts])
        pending = group.comm.begin_sum(sums, what)
        if beyond is None and all(had) and not is_queued(device):  # no sum is zero
            self._unread.append((group, pending, sums, num_updates))
            return 0
        with events.waiting():
            pending.wait()
        if beyond is None and all(had):  # and the host would wait for the device
            return 0
        totals: list[int] = sums.tolist()
        found = 0 if beyond is None else totals.pop(0)
        _check_step(group, totals, num_updates)
        self._note(group.gradients, [each % _UPDATE for each in totals])
        return found

    def _read_late(self) -> None:
        unread, self._unread = self._unread, []
        for group, pending, sums, num_updates in unread:
            with events.waiting():
                pending.wait()
            _check_step(group, sums.tolist(), num_updates)

    def _note(self, asked: Sequence[Gradients], counts: list[int]) -> None:
        begin = 0
        for each in asked:
            of_bucket = counts[begin : begin + len(each.params)]
            begin += len(each.params)
            each.unused = frozenset(index for index, count in enumerate(of_bucket) if not count)


def _check_step(group: Group, totals: Sequence[int], num_updates: int) -> None:
    if any(each // _UPDATE != num_updates * group.comm.size for each in totals):
        raise StepError(
            f"this rank's gradients are those after {num_updates} updates of the weights, and other ranks' are"
            " not: some rank ran a backward more, or less. All ranks must run equally many backwards with"
            " synchronisation in each step"
        )


def _filled(had: Sequence[bool], more: int, device: torch.device) -> Tensor:
    """Ones and zeros plus `more`, int64; filled on the device where they are equal."""
    if all(had):
        return torch.full((len(had),), 1 + more, dtype=torch.int64, device=device)
    return torch.tensor([each + more for each in had], dtype=torch.int64, device=device)
