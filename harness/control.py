"""Small control messages between ranks, on a gloo group apart from the engine's traffic."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from harness.data.order import MASK64
from harness.engines.protocol import Ranks
from harness.fsdp import Observer
from harness.probe.collectives import CollectiveMeter

EXCHANGE = "exchange of the loop's own numbers"


class StepReport(NamedTuple):
    losses: list[float]
    """Mean loss of each global microbatch, in global order, fp64."""
    held: list[int]
    """Unsigned 64-bit digest of the source's sequences, for each rank with data of its own."""
    fed: list[int]
    """Unsigned 64-bit digest of the sequences that each of these ranks was fed."""
    stop: bool
    save: bool = False


class Control:
    """Exchanges of small integers, which the meter does not count; no traffic for one rank."""

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None, meter: CollectiveMeter) -> None:
        """group: gloo, of all ranks; None for one rank."""
        self.ranks = ranks
        self.group = group
        self.meter = meter

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Signed 64-bit integers of every rank, by rank; each rank gives as many. Collective over the control group."""
        return self._begin(values)()

    def _begin(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        if self.group is None:
            return lambda: [list(values)]
        mine = torch.tensor(values, dtype=torch.int64)
        theirs = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        group = self.group
        with self.meter.paused():
            work = dist.all_gather(theirs, mine, group=group, async_op=True)

        def end() -> list[list[int]]:
            assert work is not None
            with Observer.waiting(EXCHANGE, group=group):
                work.wait()
            return [row.tolist() for row in theirs]

        return end

    def begin_totals(self, sums: torch.Tensor, largest: torch.Tensor) -> Callable[[], None]:
        """Begin an elementwise sum and maximum over ranks, in place on rank 0 (scratch elsewhere).

        Call the result to wait. Collective over the control group.
        """
        if self.group is None:
            return lambda: None
        group = self.group
        with self.meter.paused():
            works = [
                dist.reduce(sums, 0, group=group, async_op=True),
                dist.reduce(largest, 0, dist.ReduceOp.MAX, group=group, async_op=True),
            ]

        def end() -> None:
            with Observer.waiting(EXCHANGE, group=group):
                for work in works:
                    if work is not None:
                        work.wait()

        return end

    def begin_report(
        self, losses: Sequence[float], held: int, fed: int, stop: bool, save: bool = False
    ) -> Callable[[], StepReport]:
        """Begin to exchange losses, data digests and requests to stop or save, once a step.

        Call the result to wait, before any other exchange. Collective over the control group.
        """
        bits = torch.tensor(losses, dtype=torch.float64).view(torch.int64).tolist()
        gathered = self._begin([*bits, _signed(held), _signed(fed), int(stop) + 2 * int(save)])

        def end() -> StepReport:
            rows = gathered()
            peers = [rows[first : first + self.ranks.tp] for first in range(0, len(rows), self.ranks.tp)]
            reports = [_fed_otherwise(each) for each in peers]  # tensor-parallel ranks say the same of the same data
            return StepReport(
                losses=torch.tensor([row[:-3] for row in reports]).view(torch.float64).flatten().tolist(),
                held=[row[-3] & MASK64 for row in reports],
                fed=[row[-2] & MASK64 for row in reports],
                stop=any(row[-1] & 1 for row in rows),
                save=any(row[-1] & 2 for row in rows),
            )

        return end


def _fed_otherwise(rows: Sequence[list[int]]) -> list[int]:
    """Digests of each data rank: of ranks that share data, the first that deviates from its source, else the first."""
    return next((row for row in rows if row[-3] != row[-2]), rows[0])


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """JSON value of every rank, by rank; this rank's alone without a group. Collective over `group` (gloo).

    Text, not torch's object collectives: those are pickles, and reading a pickle runs code.
    """
    text = json.dumps(value).encode()
    if group is None:
        return [json.loads(text)]
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    sizes = [int(length) for length in lengths]
    rows = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(rows, torch.nn.functional.pad(mine, (0, max(sizes) - len(text))), group=group)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _signed(digest: int) -> int:
    return digest - (1 << 64) if digest >= 1 << 63 else digest
