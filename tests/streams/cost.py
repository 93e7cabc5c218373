"""What a recorded step costs: launches and stops of the host, the critical path, and communication that nothing hides.

[Note: A clock for a log] The host gives work one after another, each launch taking `launch_s` of its time. Work begins
when the host has given it, its stream has done what came before, and everything its stream waits for is done. A kernel
takes as long as its bytes or its arithmetic, whichever is more; a collective a latency and its bytes over the link. A
step takes from when everything of the step before is done to when everything of its own is: a gather after an update,
which the next forward hides, hides in neither step's favour. What is *exposed* is what a step would be shorter by if
every collective took no time: so a wait of compute counts, and traffic beside compute does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tests.streams.log import HOST, Entry, Kernel, Log, Mark, Phase, Stop, Wait

ENGINES = ("harness/fsdp/", "torch/distributed/fsdp/")


@dataclass(frozen=True)
class Machine:
    """launch_s: of the host for one kernel, event or wait. bytes_per_s: of the device's memory. link_bytes_per_s: of a
    link, to and from a rank. latency_s: of a collective. flops: of matrix products. ranks: that were recorded.

    widen: how many times larger than the recorded model's are the bytes and products of the one that is meant. tokens:
    how many times more of these a rank's microbatch has.
    """

    launch_s: float = 5e-6
    bytes_per_s: float = 3.35e12
    link_bytes_per_s: float = 360e9
    latency_s: float = 15e-6
    flops: float = 600e12
    ranks: int = 2
    widen: float = 1.0
    tokens: float = 1.0

    def seconds(self, kernel: Kernel) -> float:
        """How long it takes once it runs."""
        if kernel.group:
            sent = kernel.moves * (self.ranks - 1) / self.ranks  # of a ring
            return self.latency_s + self.widen * sent / self.link_bytes_per_s
        size = sum(span.end - span.begin for span in (*kernel.reads, *kernel.writes))
        if kernel.flops:
            return self.widen * max(kernel.flops * self.tokens / self.flops, size / self.bytes_per_s)
        return self.widen * size / self.bytes_per_s


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
    """Count a step."""
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


@dataclass(frozen=True)
class Timeline:
    """step_s: from the end of the step before to its own. exposed_s: what collectives add to that."""

    step_s: float
    exposed_s: float


def timeline(before: Sequence[Entry], entries: Sequence[Entry], machine: Machine) -> Timeline:
    """How long a step takes after another one; see [Note: A clock for a log]."""
    whole = _Clock(machine)
    silent = _Clock(replace(machine, link_bytes_per_s=float("inf"), latency_s=0.0))
    ends = []
    for step in (before, entries):
        for clock in (whole, silent):
            clock.run(step)
        ends.append((whole.end, silent.end))
    step_s, silent_s = (end - begin for begin, end in zip(*ends, strict=True))
    return Timeline(step_s, step_s - silent_s)


class _Clock:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.host = 0.0
        self._ready: dict[str, float] = {}
        self._events: dict[int, float] = {}

    @property
    def end(self) -> float:
        """When everything is done."""
        return max([self.host, *self._ready.values()])

    def run(self, entries: Iterable[Entry]) -> None:
        """Walk through a step."""
        for entry in entries:
            if isinstance(entry, Kernel):
                self._kernel(entry)
            elif isinstance(entry, Mark):
                self.host += self.machine.launch_s / 5
                self._events[entry.event] = self._ready.get(entry.stream, 0.0)
            elif isinstance(entry, Wait):
                self.host += self.machine.launch_s / 5
                self._ready[entry.stream] = max(self._ready.get(entry.stream, 0.0), self._events.get(entry.event, 0.0))
            elif isinstance(entry, Stop):
                waited = [self._ready.get(entry.stream, 0.0)] if entry.stream else self._ready.values()
                self.host = max([self.host, *waited])

    def _kernel(self, kernel: Kernel) -> None:
        seconds = self.machine.seconds(kernel)
        if kernel.stream == HOST:
            self.host += seconds
            return
        self.host += self.machine.launch_s
        begin = max(self.host, self._ready.get(kernel.stream, 0.0))
        self._ready[kernel.stream] = begin + seconds
