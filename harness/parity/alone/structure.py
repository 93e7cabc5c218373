"""Facts of one run by itself: equal replicas, separate and tied weights, data as its source holds them, and its end.

The weights before the last captured updates and those updates add up to the last weights, up to the rounding of each
difference, u(main) of it. Anything beyond happened after the last step, where no loss shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from harness.config.roundoff import SIXTEEN_BITS, UNIT
from harness.parity.alone import in_run
from harness.parity.outcome import Finding, Stage, fact
from harness.parity.record import Record
from harness.parity.tiers.gradients import HANDFUL, length


def check(run: Record) -> list[Finding]:
    return [*_replicas(run), *_memory(run), *_apart(run)]


def _replicas(run: Record) -> list[Finding]:
    others = run.summary.get("other_replicas")
    if others is None:
        return []
    said, wanted = "equal", "equal"
    if others:
        said, wanted = f"rank {', '.join(map(str, others))} ends with other weights", "rank 0's"
    return [fact("replicas", Stage.gather, said, wanted, step=run.length or None, note=f"in {run.name}")]


def _memory(run: Record) -> list[Finding]:
    facts = run.summary.get("structure")
    if not facts:
        return []
    told = partial(fact, stage=Stage.weights, step=1, note=f"in {run.name}")
    shared = [(first, f"shares memory with {second}", "its own memory") for first, second in facts["aliases"]]
    found = [told("tensors apart", observed=said, wanted=own, tensor=name) for name, said, own in shared]
    found += [told("ties kept", observed="a weight of its own", wanted="tied", tensor=name) for name in facts["untied"]]
    if facts["elsewhere"] and not found:
        found = [told("tensors apart", observed=f"not on {', '.join(facts['elsewhere'])}")]
    return found or [told(check, observed="equal") for check in ("tensors apart", "ties kept")]


def _apart(run: Record) -> list[Finding]:
    if run.config["dtype.compute"] in SIXTEEN_BITS:  # gains of about one are all one there
        return []
    looked = sorted(step for step in run.witnesses if step > 1)
    told = partial(fact, "weights apart", Stage.weights, note=f"in {run.name}")
    pairs = [(step, *pair) for step in looked for pair in _same_bits(run, step)]
    found = [told(f"has the bits of {second}", "its own", step=step, tensor=first) for step, first, second in pairs]
    return found or [told("equal", step=step) for step in looked[:1]]


def _same_bits(run: Record, step: int) -> list[tuple[str, str]]:
    held: dict[tuple[int, tuple[int, ...]], str] = {}
    pairs = []
    before = run.captures.get(step - 1)
    for name, checksum in run.witnesses[step].kept.items():
        tensor = before.tensors.get(name) if before is not None else None
        if before is None or tensor is None or tensor.size < HANDFUL * 4:
            continue
        first = held.setdefault((checksum, tensor.shape), name)
        if first != name and before.raw(first).tobytes() != before.raw(name).tobytes():
            pairs.append((first, name))
    return pairs


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


FOLLOWS = "weights at the end follow"


def check_ending(run: Record) -> list[Finding]:
    begin = _begin(run)
    if run.final is None or begin is None:
        return []
    unit = UNIT[str(run.config["dtype.main_params"])]
    found = []
    for name in run.final.tensors:
        updates = [run.updates[step] for step in range(begin, run.length + 1)]
        if name not in run.weights[begin].tensors or any(name not in each.tensors for each in updates):
            continue
        expected, moved = run.weights[begin].values(name), 0.0
        for each in updates:
            update = each.values(name)
            expected, moved = expected + update, moved + length(update)
        norm = length(expected) or 1.0
        off, allowed = length(run.final.values(name) - expected) / norm, unit * moved / norm
        note = "changed after the last update"
        found.append(in_run(run, FOLLOWS, Stage.weights, off, allowed, run.length, name, note))
    return found


def _begin(run: Record) -> int | None:
    step = run.length
    while step in run.updates:
        if step in run.weights:
            return step
        step -= 1
    return None
