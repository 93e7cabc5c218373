"""Where ranks stand when a collective does not come about, and one sentence that tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.fsdp.comm.events import Label

SAME_WORK = (
    "All ranks must run the same forwards, backwards and steps, and the same units in them: a rank that has no data, or"
    " leaves a batch out, runs one with its loss times 0"
)
"""What to do where every rank answers, and they are not at the same collective."""
ONLY_SLOW = ". Where a rank is only slow, set watchdog_timeout_s higher"


class CollectiveError(RuntimeError):
    """A collective did not complete: a rank waited too long, ended, or ran another collective. All ranks that can be
    reached raise it with the same message, which names ranks, units and collectives."""


@dataclass
class Position:
    """One rank's position.

    where: unit and direction. waits: the collective it waits for, or None. number: that collective's place among all
    this rank has begun, 0 if unknown. seconds: how long it has waited. history: number and name of the collectives it
    began last. failure: what its backend said. is_deadlock: whether this rank found that all wait for each other.
    """

    where: str
    waits: str | None
    number: int | None
    seconds: float
    history: list[tuple[int, str]]
    failure: str | None = None
    is_deadlock: bool = False


def tell(positions: Mapping[int, Position], ranks: Sequence[int], timeout_s: float) -> str:
    """What happened: the collective in which ranks first differ, who waits where, who is elsewhere, who is silent; and
    what to do."""
    told = [difference] if (difference := first_difference(positions)) else []
    told += _waiting(positions)
    told += _absent(positions, ranks)
    told += [f"the backend of rank {rank} said: {p.failure}" for rank, p in sorted(positions.items()) if p.failure]
    silent = positions.keys() < set(ranks)
    failed = any(each.failure for each in positions.values())
    deadlocked = any(each.is_deadlock for each in positions.values())
    cause = "a collective failed" if failed else f"a collective did not come about within {timeout_s:g} s"
    if deadlocked and not failed:
        cause = "ranks wait for each other, each for a collective that another one has not begun"
    advice = "" if failed or silent else f". {SAME_WORK}{'' if deadlocked else ONLY_SLOW}"
    return f"{cause}: " + "; ".join(told) + advice


def tell_long_wait(positions: Mapping[int, Position], ranks: Sequence[int], timeout_s: float) -> str:
    """Who waits for whom, while that is no fault yet, and how long it may last."""
    told = [*_waiting(positions), *_absent(positions, ranks)]
    return f"{'; '.join(told)}. This is an error after {timeout_s:g} s (watchdog_timeout_s)"


def _absent(positions: Mapping[int, Position], ranks: Sequence[int]) -> list[str]:
    """Who waits for nothing, and who is silent."""
    told = [_elsewhere(rank, each) for rank, each in sorted(positions.items()) if each.waits is None]
    if silent := [rank for rank in ranks if rank not in positions]:
        verb = "does" if len(silent) == 1 else "do"
        told.append(
            f"{ranks_text(silent)} {verb} not answer: ended, stopped, or inside a call that lets no other thread run"
            " (the rank's own log tells)"
        )
    return told


def first_difference(positions: Mapping[int, Position]) -> str:
    """Where the numbered collectives of the ranks first differ; "" where they do not, as far as they remember."""
    histories = {rank: {int(n): name for n, name in each.history} for rank, each in positions.items()}
    for number in sorted(set().union(*histories.values())):
        names = {rank: history[number] for rank, history in histories.items() if number in history}
        if len(set(names.values())) > 1:
            sides = "; ".join(f"{ranks_text(ranks)} at {name}" for name, ranks in by_value(names).items())
            return f"mismatch, collective number {number} is not the same on all ranks: {sides}"
    return ""


def _waiting(positions: Mapping[int, Position]) -> list[str]:
    places = {
        rank: f"{each.waits}{f' (number {each.number})' if each.number else ''} {each.where}"
        for rank, each in positions.items()
        if each.waits is not None
    }
    told = []
    for place, ranks in by_value(places).items():
        seconds = max(positions[rank].seconds for rank in ranks)
        verb = "waits" if len(ranks) == 1 else "wait"
        told.append(f"{ranks_text(ranks)} {verb} since {seconds:.1f} s in {place}")
    return told


def _elsewhere(rank: int, position: Position) -> str:
    came = "failed" if position.failure else "has not come: it is"
    if not position.history:
        return f"rank {rank} {came} {position.where} and has begun no collective"
    number, name = position.history[-1]
    return f"rank {rank} {came} {position.where}; the last collective it began is {name} (number {number})"


def by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Ranks by what they have in common, in order of their first rank."""
    found: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 1`; of many, the first ones and how many more."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"


def text_of(label: Label) -> str:
    """`all_gather blocks.0/float32`."""
    return f"{label.kind} {label.bucket}"
