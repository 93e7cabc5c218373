"""Positions of ranks where a collective does not complete, and the message made of them.

[Note: Mutual waits] Ranks that wait for each other are found before a wait is over the limit: all wait long, and began
different collectives. Backends pair collectives by their order and not by names, so what all wait for is another pair.
Where ranks began the same ones, the rank that began fewest waits for one that all have begun: the exchange is slow.
Positions may be of different moments, since histories only grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SAME_WORK = (
    "All ranks must run the same forwards, backwards and steps, and the same units in them: a rank that has no data, or"
    " leaves a batch out, runs one with its loss times 0"
)
ONLY_SLOW = ". Where a rank is only slow, set watchdog_timeout_s higher"


class CollectiveError(RuntimeError):
    """A collective did not complete: a rank waited too long, ended, or ran another collective. All ranks that can be
    reached raise it with the same message, which names ranks and collectives."""


@dataclass
class Position:
    """One rank's position.

    where: place in the program. waits: the collective it waits for and, if known, that one's place among all this rank
    has begun; None if it waits for none. seconds: since when. history: number and name of its last collectives.
    failure: error of its backend. is_blocked: its main thread waits long.
    """

    where: str
    waits: str | None
    seconds: float
    history: list[tuple[int, str]]
    failure: str | None = None
    is_blocked: bool = False


Positions = Mapping[int, Position]


def describe_hang(positions: Positions, ranks: Sequence[int], timeout_s: float, *, is_deadlock: bool = False) -> str:
    """Names the collective in which ranks first differ, and every rank's position."""
    parts = [difference] if (difference := first_difference(positions)) else []
    parts += _waiting(positions) + _absent(positions, ranks)
    parts += [f"the backend of rank {rank} said: {p.failure}" for rank, p in sorted(positions.items()) if p.failure]
    advice = f". {SAME_WORK}{'' if is_deadlock else ONLY_SLOW}"
    cause = f"a collective did not come about within {timeout_s:g} s"
    if any(each.failure for each in positions.values()):
        cause, advice = "a collective failed", ""
    elif is_deadlock:
        cause = "ranks wait for each other, each for a collective that another one has not begun in its place"
    return f"{cause}: {'; '.join(parts)}{advice if len(positions) == len(ranks) else ''}"


def all_stuck(positions: Positions) -> bool:
    """True if all ranks wait long, and began different collectives; see [Note: Mutual waits]."""
    return all(each.is_blocked for each in positions.values()) and bool(first_difference(positions))


def first_difference(positions: Positions) -> str:
    """The first number at which ranks began different collectives; "" if there is none in their histories."""
    histories = {rank: {int(number): name for number, name in each.history} for rank, each in positions.items()}
    for number in sorted(set().union(*histories.values())):
        names = {rank: history[number] for rank, history in histories.items() if number in history}
        if len(set(names.values())) > 1:
            sides = "; ".join(f"{ranks_text(ranks)} at {name}" for name, ranks in by_value(names).items())
            return f"mismatch, collective number {number} is not the same on all ranks: {sides}"
    return ""


def _waiting(positions: Positions) -> list[str]:
    places = {rank: f"{each.waits} {each.where}" for rank, each in positions.items() if each.waits is not None}
    return [
        f"{ranks_text(ranks)} wait{'s' if len(ranks) == 1 else ''} since"
        f" {max(positions[rank].seconds for rank in ranks):.1f} s in {place}"
        for place, ranks in by_value(places).items()
    ]


def _absent(positions: Positions, ranks: Sequence[int]) -> list[str]:
    """Ranks that wait for nothing, and ranks that do not answer."""
    parts = []
    for rank, each in sorted(positions.items()):
        if each.waits is None:
            came = "failed" if each.failure else "has not come: it is"
            number, name = each.history[-1] if each.history else (0, "")
            last = (
                f"; the last collective it began is {name} (number {number})"
                if name
                else " and has begun no collective"
            )
            parts.append(f"rank {rank} {came} {each.where}{last}")
    if silent := [rank for rank in ranks if rank not in positions]:
        parts.append(
            f"{ranks_text(silent)} do{'es' if len(silent) == 1 else ''} not answer: ended, stopped, or inside a call"
            " that lets no other thread run (the rank's own log tells)"
        )
    return parts


def by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 1`; at most eight by number."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"
