"""What a recorded step launches, and where it stops the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tests.streams.log import HOST, Entry, Kernel, Log, Mark, Phase, Stop, Wait

ENGINES = ("harness/fsdp/", "torch/distributed/fsdp/")


def step_of(log: Log, number: int) -> list[Entry]:
    """What was written from the first forward of a step to its end: of the step's own work, `step()` included."""
    found: list[Entry] = []
    step, inside = 0, False
    for entry in log.entries:
        if isinstance(entry, Phase):
            inside = inside or entry.name == "forward"
            if entry.name == "end":
                if step == number:
                    return found
                step, inside = step + 1, False
        if inside and step == number:
            found.append(entry)
    raise ValueError(f"the log has no step {number}")


@dataclass(frozen=True)
class Counts:
    """Of one step. compute: kernels of the model's forward and backward. engine: kernels that the engine asks for.
    update: of the optimizer. collectives: launches of NCCL. orders: events recorded and waited for. stops: of the host,
    by place."""

    compute: int
    engine: int
    update: int
    collectives: int
    orders: int
    stops: dict[str, int]

    @property
    def launches(self) -> int:
        """Kernels of all kinds but the model's own."""
        return self.engine + self.update + self.collectives


def counts_of(entries: Iterable[Entry]) -> Counts:
    kinds: Counter[str] = Counter()
    stops: Counter[str] = Counter()
    phase = ""
    for entry in entries:
        if isinstance(entry, Phase):
            phase = entry.name
        elif isinstance(entry, Stop):
            stops[f"{entry.site.file}:{entry.site.function} ({entry.why})"] += 1
        elif isinstance(entry, Mark | Wait):
            kinds["orders"] += not (isinstance(entry, Wait) and entry.why == "issue")
        elif isinstance(entry, Kernel) and entry.stream != HOST:
            kinds[_kind(entry, phase)] += 1
    return Counts(*(kinds[each] for each in ("compute", "engine", "update", "collectives", "orders")), dict(stops))


def _kind(kernel: Kernel, phase: str) -> str:
    if kernel.group:
        return "collectives"
    if kernel.site.file.startswith(ENGINES):
        return "engine"
    return "update" if phase == "step" else "compute"
