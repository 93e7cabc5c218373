"""Structural checks of one run: equal replicas, separate weights, tied weights."""

from __future__ import annotations

from harness.config.roundoff import SIXTEEN_BITS
from harness.parity.outcome import Finding, Grade, Stage
from harness.parity.record import Record
from harness.parity.tiers.gradients import HANDFUL


def check(run: Record) -> list[Finding]:
    return [*_replicas(run), *_memory(run), *_apart(run)]


def _replicas(run: Record) -> list[Finding]:
    others = run.summary.get("other_replicas")
    if others is None:
        return []
    step = run.length or None
    if not others:
        return [_finding(run, "replicas", Stage.gather, "equal", step)]
    said = f"rank {', '.join(map(str, others))} ends with other weights"
    return [_finding(run, "replicas", Stage.gather, said, step, wanted="rank 0's")]


def _memory(run: Record) -> list[Finding]:
    facts = run.summary.get("structure")
    if not facts:
        return []
    found = [
        _finding(run, "tensors apart", Stage.weights, f"shares memory with {second}", 1, first, "its own memory")
        for first, second in facts["aliases"]
    ]
    found += [
        _finding(run, "ties kept", Stage.weights, "a weight of its own", 1, name, "tied") for name in facts["untied"]
    ]
    if facts["elsewhere"] and not found:
        found = [_finding(run, "tensors apart", Stage.weights, f"not on {', '.join(facts['elsewhere'])}", 1)]
    return found or [
        _finding(run, "tensors apart", Stage.weights, "equal", 1),
        _finding(run, "ties kept", Stage.weights, "equal", 1),
    ]


def _apart(run: Record) -> list[Finding]:
    if run.config["dtype.compute"] in SIXTEEN_BITS:  # gains of about one are all one there
        return []
    found = []
    for step in sorted(run.witnesses.keys() - {1}):
        for first, second in _same_bits(run, step):
            found.append(
                _finding(run, "weights apart", Stage.weights, f"has the bits of {second}", step, first, "its own")
            )
    looked = [step for step in run.witnesses if step > 1]
    return found or ([_finding(run, "weights apart", Stage.weights, "equal", min(looked))] if looked else [])


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


def _finding(
    run: Record, kind: str, stage: Stage, said: str, step: int | None, tensor: str | None = None, wanted: str = "equal"
) -> Finding:
    right = said == wanted
    note = "" if right else f"in {run.name}"
    return Finding(
        "T1", kind, stage, Grade.ok if right else Grade.bad, said, wanted, step=step, tensor=tensor, note=note
    )
