"""Comparing every collective over all ranks before its data moves.

[Note: Check before data moves] `CollectiveCheck` compares through the store, not through the group: NCCL would take
mismatched calls for one collective and mix up their data. The rank that comes last reads what all have told and makes
the verdict; the others wait for that, so a collective takes the store a few requests a rank, however many ranks there
are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from harness.fsdp.comm import events
from harness.fsdp.comm.events import Label
from harness.fsdp.guards.hang_report import CollectiveError, by_value, ranks_text, text_of
from harness.fsdp.guards.shared_store import stores_of

CAME, VERDICT, ALIKE = "came", "verdict", "alike"


class CollectiveCheck:
    """Compares every collective over all ranks before its data moves. Slow: each one then waits for all ranks.

    Args:
        group: has all ranks of the model.
        timeout_s: seconds to wait for the others.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank()
        self._limit_s = timeout_s
        self._number = 0
        self._ends: list[Callable[[], None]] = []
        if len(self.ranks) > 1:
            (self._store,) = stores_of(group, timeout_s=self._limit_s, clones=1)
            self._ends = [events.on_check(self._check)]

    def close(self) -> None:
        """Stop checking; a second call does nothing."""
        while self._ends:
            self._ends.pop()()

    def _check(self, label: Label, data: Sequence[Any]) -> None:
        self._number += 1
        number, mine = self._number, f"{text_of(label)} of {_contents(data)}"
        keys = {rank: f"{number}/{rank}" for rank in self.ranks}
        self._store.set(keys[self.rank], mine)
        is_last = self._store.add(f"{number}/{CAME}", 1) == len(self.ranks)
        if is_last:
            self._store.set(f"{number}/{VERDICT}", self._compared(keys))
        try:
            self._store.wait([f"{number}/{VERDICT}"], timedelta(seconds=self._limit_s))
        except (RuntimeError, dist.DistError) as error:
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise CollectiveError(
                f"check_collectives: collective {number} is {mine} on rank {self.rank}; {ranks_text(missing)} came to"
                f" no collective {number} within {self._limit_s:g} s"
            ) from error
        told = self._store.get(f"{number}/{VERDICT}").decode()
        if told != ALIKE:
            raise CollectiveError(
                f"check_collectives: ranks are about to issue different collectives as number {number}: {told}. No data"
                " of it has moved. All ranks must run the same modules in the same order"
            )
        # All have come here, so all have read the verdict before.
        for old in (self.rank, *((CAME, VERDICT) if is_last else ())):
            self._store.delete_key(f"{number - 1}/{old}")

    def _compared(self, keys: Mapping[int, str]) -> str:
        """What the ranks are about to issue, where it differs; else `ALIKE`."""
        found = self._store.multi_get(list(keys.values()))
        texts = {rank: each.decode() for rank, each in zip(keys, found, strict=True)}
        if len(set(texts.values())) == 1:
            return ALIKE
        return "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in by_value(texts).items())


def _contents(data: Sequence[Any]) -> str:
    """Lengths and dtypes of tensors, or of parts of them."""
    tensors = [getattr(each, "tensor", each) for each in data]
    kinds = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    lengths = "+".join(str(tensor.numel()) for tensor in tensors)
    return f"{lengths or 'unknown'} elements {', '.join(kinds)}".rstrip()
