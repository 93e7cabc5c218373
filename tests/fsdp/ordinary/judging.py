"""What a program's outcome is worth: right, refused by name, or a defect of the engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tests.fsdp.ordinary.program import Program
from tests.fsdp.ordinary.running import Lost, Outcome, Raised, Trained

TOLERANCE = {"fp64": 1e-9, "fp32": 2e-3, "bf16": 0.5}
"""Of what weights moved by; and of numbers that are seen, a tenth of it."""


@dataclass(frozen=True)
class Verdict:
    """kind: "right", "refused" (sentence: of the engine), or "wrong" (sentence: what)."""

    kind: str
    sentence: str = ""


@dataclass(frozen=True)
class Refusal:
    """What the engine may refuse, by the words it does it with, and the programs that ask for it."""

    name: str
    words: str
    asked: Callable[[Program], bool]


REFUSALS = (
    Refusal(
        "a weight of another unit",
        r"a plain tensor of shape .* meets a sharded one.*`fully_shard` both together",
        lambda p: p.strategy == "optim_grads_params" and p.units == "linear" and _reads_projections(p),
    ),
    Refusal(
        "an average that is no copy of sharded weights",
        r"a plain tensor of shape .* meets a sharded one.*distribute_rows\(tensor, like=parameter\)",
        lambda p: p.aside in ("ema", "gathered_ema"),
    ),
    Refusal(
        "a further backward that no hook sees",
        r"was added to the finished one of an earlier backward",
        lambda p: p.strategy == "no_shard" and p.carry == "object",
    ),
    Refusal(
        "optimizers from before sharding",
        r"was kept from before sharding.*fully_shard_optimizer\(model, optimizer\)",
        lambda p: p.order != "explicit",
    ),
    Refusal(
        "reentrant checkpoints over units",
        r"came from a backward inside the backward that nothing announced",
        lambda p: p.units == "linear" and "Reentrant" in p.pieces,
    ),
    Refusal("inputs edited in place", r"edited an input in place", lambda p: "InPlace" in p.pieces),
    Refusal(
        "whole-tensor optimizers",
        r"LBFGS cannot step sharded parameters|a plain tensor of shape .* meets a sharded one",
        lambda p: p.optimizer == "lbfgs",
    ),
)


def _reads_projections(program: Program) -> bool:
    """Whether a module reads weights of a linear layer inside it, which is a unit."""
    return bool({"Attention", "Encoder"} & set(program.pieces))


def judge(program: Program, ranks: Sequence[Outcome], right: Callable[[], Trained]) -> Verdict:
    """What came of a program on all ranks; `right` runs it on one process."""
    for rank, outcome in enumerate(ranks):
        if isinstance(outcome, Lost):
            return Verdict("wrong", f"rank {rank} {outcome.why}")
    raises = [outcome for outcome in ranks if isinstance(outcome, Raised)]
    if raises:
        return _judge_refusal(program, ranks, raises)
    trained = [outcome for outcome in ranks if isinstance(outcome, Trained)]
    narrowest = "bf16" if program.choice == "mixed" and program.dtype != "fp64" else program.dtype
    told = difference(trained, right(), TOLERANCE[narrowest])
    return Verdict("wrong", told) if told else Verdict("right")


def _judge_refusal(program: Program, ranks: Sequence[Outcome], raises: Sequence[Raised]) -> Verdict:
    if len({str(each) for each in raises}) > 1 or len(raises) < len(ranks):
        each = "; ".join(f"rank {r}: {o if isinstance(o, Raised) else 'goes on'}" for r, o in enumerate(ranks))
        return Verdict("wrong", f"ranks part: {each}\n{raises[0].trace}")
    one = raises[0]
    if not one.by_engine and "modified inplace" not in one.sentence:  # which torch says itself, as under FSDP2
        return Verdict("wrong", f"an error that is no answer: {one.trace}")
    for refusal in REFUSALS:
        if refusal.asked(program) and re.search(refusal.words, one.sentence, re.S):
            return Verdict("refused", refusal.name)
    return Verdict("wrong", f"refused for no known reason: {one.trace}")


# -- numbers -----------------------------------------------------------------------------------------------------------


def difference(ranks: Sequence[Trained], right: Trained, tolerance: float) -> str:
    """What differs first between ranks of an engine and one process, or nothing."""
    for rank, found in enumerate(ranks):
        for whose in (rank, None):
            if told := _seen(found.seen.get(whose, []), right.seen.get(whose, []), tolerance / 10):
                return f"rank {rank}: {told}"
        if told := _weights(found.weights, right, tolerance):
            return f"rank {rank}: {told}"
    return ""


def _seen(found: Sequence[float], right: Sequence[float], tolerance: float) -> str:
    if len(found) != len(right):
        return f"{len(found)} numbers were observed, not {len(right)}"
    for number, (a, b) in enumerate(zip(found, right, strict=True)):
        if not abs(a - b) <= tolerance * max(abs(b), 0.1):
            return f"number {number} that was observed is {a!r}, not {b!r}"
    return ""


def _weights(found: dict[str, Tensor], right: Trained, tolerance: float) -> str:
    """Distances in shares of what a weight moved by, or of what all moved by on average: a tensor may move little."""
    if found.keys() != right.weights.keys():
        return f"names of weights: {sorted(found)}"
    moved = {name: _size(value - right.start[name]) for name, value in right.weights.items()}
    whole = sum(each**2 for each in moved.values()) ** 0.5
    numel = sum(value.numel() for value in right.weights.values())
    for name, value in right.weights.items():
        share = whole * (value.numel() / numel) ** 0.5
        off = _size(found[name].double() - value)
        if not off <= tolerance * (max(moved[name], share) if moved[name] else 0.0):
            return f"{name} is off by {off:.3g}; it was to move by {moved[name]:.3g}"
    return ""


def _size(tensor: Tensor) -> float:
    return float(tensor.double().norm())
