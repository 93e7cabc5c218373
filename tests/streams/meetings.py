"""Whether recorded ranks meet in their collectives, and whether all of them come to an end: logs of all ranks, run as
devices run them.

[Note: Apart, then together] A rank that is recorded moves data when it asks for a collective, so its host waits for the
others, which the host of a GPU does not. Where ranks use different units they ask different communicators first, and
that wait would be for ever. So here each rank runs alone: a collective gives it what it gave itself, and what it
computes is wrong. What it asks for, and in which order, does not depend on numbers. Then all logs run together: each
host hands out its work and stops where it must, each stream goes on in order, and a collective ends when all of its
ranks have come to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from torch import Tensor

from tests.streams.group import RecordedGroup
from tests.streams.log import HOST, Entry, Kernel, Mark, Stop, Wait


@contextmanager
def apart() -> Iterator[None]:
    """Collectives of recorded groups wait for nobody, and every rank gets what it has given as if all had."""

    def alone(group: RecordedGroup, what: str, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[each.detach().clone() for each in tensors] for _ in range(group.size())]

    with mock.patch.object(RecordedGroup, "_meet", alone):
        yield


@dataclass(frozen=True)
class Meeting:
    """The collective of this number in a communicator, which its ranks come to."""

    group: str
    ranks: tuple[int, ...]
    number: int


Given = tuple[Kernel | Mark | Wait, Meeting | None]
"""What a stream was given, and where it meets others."""


@dataclass
class Rank:
    """Where a rank is: its host in its log, its streams in what they were given.

    groups: by the stream of a communicator, its ranks.
    """

    log: Sequence[Entry]
    groups: Mapping[str, tuple[int, ...]]
    place: int = 0
    streams: dict[str, deque[Given]] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)
    """Of collectives that were asked for, by communicator."""
    reached: set[int] = field(default_factory=set)
    """Events."""

    def hand_out(self) -> bool:
        """The host goes on until it must wait; whether it has."""
        begin = self.place
        while self.place < len(self.log):
            entry = self.log[self.place]
            if isinstance(entry, Stop):
                if any(self.streams.get(name) for name in ([entry.stream] if entry.stream else self.streams)):
                    break
            elif isinstance(entry, Kernel | Mark | Wait) and entry.stream != HOST:
                self.streams.setdefault(entry.stream, deque()).append((entry, self._meeting(entry)))
            self.place += 1
        return self.place > begin

    def _meeting(self, entry: Kernel | Mark | Wait) -> Meeting | None:
        if not isinstance(entry, Kernel) or not entry.group:
            return None
        self.numbers[entry.group] += 1
        return Meeting(entry.group, self.groups[entry.group], self.numbers[entry.group])


Brought = dict[Meeting, dict[int, str]]
"""What ranks ask for, by meeting and rank."""


def found(ranks: Sequence[Rank]) -> list[str]:
    """What is wrong: meetings to which ranks bring different things, then what waits for ever."""
    brought: Brought = {}
    while sum(rank.hand_out() + _go_on(number, rank, brought) for number, rank in enumerate(ranks)):
        pass
    wrong = [
        f"collective {at.number} of {at.group} is {' | '.join(f'{asked} on rank {r}' for r, asked in those.items())}"
        for at, those in brought.items()
        if len(set(those.values())) > 1
    ]
    for number, rank in enumerate(ranks):
        wrong += [f"rank {number}, stream {name} waits for ever: {q[0][0]}" for name, q in rank.streams.items() if q]
        if rank.place < len(rank.log):
            wrong.append(f"rank {number}, the host waits for ever: {rank.log[rank.place]}")
    return wrong


def _go_on(number: int, rank: Rank, brought: Brought) -> bool:
    """Let a rank's streams go on until each must wait; whether any has."""
    went_on = False
    for queue in rank.streams.values():
        while queue:
            head, at = queue[0]
            if isinstance(head, Wait) and head.event not in rank.reached:
                break
            if at is not None and isinstance(head, Kernel):
                those = brought.setdefault(at, {})
                those[number] = f"{head.name} of {head.site.of} ({head.moves} bytes)"
                if len(those) < len(at.ranks):
                    break
            if isinstance(head, Mark):
                rank.reached.add(head.event)
            queue.popleft()
            went_on = True
    return went_on
