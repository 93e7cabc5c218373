"""Facts of one run by itself: equal replicas, and data as its source holds them."""

from __future__ import annotations

from collections.abc import Iterator

from harness.parity.outcome import Finding, Stage, fact
from harness.parity.record import Record


def check(run: Record) -> list[Finding]:
    others = run.summary.get("other_replicas")
    if others is None:
        return []
    said, wanted = "equal", "equal"
    if others:
        said, wanted = f"rank {', '.join(map(str, others))} ends with other weights", "rank 0's"
    return [fact("replicas", Stage.gather, said, wanted, step=run.length or None, note=f"in {run.name}")]


DIGESTS = ("data_digest", "fed_digest")
FED = "tokens as fed"
WRONG = "it was fed other tokens or targets than its data source holds"


def check_data(run: Record) -> list[Finding]:
    right, seen = right_at(run), seen_at(run)
    wrong = [step for step in range(1, run.length + 1) if seen[step - 1] and not right[step - 1]]
    found = []
    if wrong:
        held, fed = (run.columns[key][wrong[0] - 1] for key in DIGESTS)
        more = f", in {len(wrong)} steps up to step {wrong[-1]}" if len(wrong) > 1 else ""
        note = f"in {run.name}, {WRONG}{more}"
        found.append(fact(FED, Stage.data, fed, held, step=wrong[0], count=len(wrong), note=note))
    if any(right):
        found.append(fact(FED, Stage.data, "as held", "as held", count=sum(right)))
    return found


def seen_at(run: Record) -> list[bool]:
    return [held is not None and fed is not None for held, fed in _pairs(run)]


def right_at(run: Record) -> list[bool]:
    return [held is not None and held == fed for held, fed in _pairs(run)]


def _pairs(run: Record) -> Iterator[tuple[str | None, str | None]]:
    return zip(*(run.columns[key] for key in DIGESTS), strict=True)
