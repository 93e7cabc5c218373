"""Checks of one run at every step by its own stream (`harness.store.check_stream`), without another run.

`LOOKS` places what each column finds; docs/verdicts.md ("Checks at every step") says what it compares and derives its
bound. Under numerics=exact the error of a sum has FINEST added to it: a gradient smaller than what integers hold to
that accuracy is told relative to one that is not (`integer_floor`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from harness.config.roundoff import FINEST, RMS, SIXTEEN_BITS, UNIT
from harness.parity.outcome import REFUTED, Finding, Grade, Stage, fact
from harness.parity.record import Record
from harness.parity.tiers.arithmetic import SAFETY, SIGMAS, Arithmetic
from harness.parity.tiers.trajectory import Series
from harness.store.check_stream import ONCE, Stream

EXACT = 1e-9
"""Largest relative difference of fp64 sums of equal numbers."""

RARE = 1e-4
"""Probability that the largest sketch of a right run exceeds its bound."""

OF_GRADIENTS = ("sum", "norm")
"""Columns undefined in a step skipped for overflow; its `rule` says that nothing changed."""


@dataclass(frozen=True)
class Look:
    """A check of one column. words: what it looked at, for the sentence about right runs; of others none is made."""

    check: str
    stage: Stage
    wrong: str
    since: Stage | None = None
    words: str = ""


BETWEEN = "weights between steps"
AFTER_END = "weights after the last step"
RECOMPUTED = "again"

LOOKS = {
    "kept": Look(
        BETWEEN, Stage.weights, "changed between two steps, by something else than the optimizer", words=BETWEEN
    ),
    "gather": Look(
        "weights of forwards, sketched",
        Stage.gather,
        "a forward used other weights than the main ones",
        words="weights of forwards",
    ),
    "sum": Look("sum, sketched", Stage.reduction, "not the sum of what its ranks computed", words="sums of gradients"),
    "norm": Look(
        "logged norm, sketched",
        Stage.clipping,
        "not the norm of the gradient that was reduced, or not its factor",
        words="the norm",
    ),
    "rule": Look(
        "update by the rule, sampled",
        Stage.optimizer,
        "not what the optimizer's rule makes of the gradient",
        words="samples of the update",
    ),
    "replicas": Look(
        "copies, sketched", Stage.optimizer, "ranks left with different copies of one piece", Stage.gradient
    ),
    RECOMPUTED: Look(
        "gradient worked out again",
        Stage.gradient,
        "not what the plain model gives for the same weights and tokens",
        Stage.forward,
        "forwards and backwards, worked out again",
    ),
    "drift": Look(
        "the same function",
        Stage.gradient,
        "the model's code is another function than when the run began: of the seed's weights and step 1's tokens",
        Stage.forward,
    ),
}

REQUIRED = tuple(name for name, look in LOOKS.items() if look.words and name != RECOMPUTED)
"""Columns required for a step to be right given its past; `replicas` compares nothing on one rank."""

DIGESTS = ("data_digest", "fed_digest")
FED = "tokens as fed"
WRONG = "it was fed other tokens or targets than its data source holds"


def check_data(run: Record) -> list[Finding]:
    seen, right = fed(run)
    wrong: list[int] = (1 + np.flatnonzero(seen & ~right)).tolist()
    found = []
    if wrong:
        held, given = (run.columns[key][wrong[0] - 1] for key in DIGESTS)
        more = f", in {len(wrong)} steps up to step {wrong[-1]}" if len(wrong) > 1 else ""
        note = f"in {run.name}, {WRONG}{more}"
        found.append(fact(FED, Stage.data, given, held, step=wrong[0], count=len(wrong), note=note))
    if right.any():
        found.append(fact(FED, Stage.data, "as held", "as held", count=int(right.sum())))
    return found


def fed(run: Record) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """True per step whose tokens were hashed as they were fed; and where they were what the data source holds."""
    pairs = [*zip(*(run.columns[key] for key in DIGESTS), strict=True)]
    seen = np.array([None not in pair for pair in pairs], dtype=bool)
    return seen, seen & np.array([held == given for held, given in pairs], dtype=bool)


def check(run: Record, arithmetic: Arithmetic) -> list[Finding]:
    if run.stream is None:
        return []
    found = [finding for name in LOOKS for finding in _column(run, run.stream, name, arithmetic)]
    return [*(_of_checkpoint(run, finding) for finding in found), *_left_out(run, run.stream)]


def _of_checkpoint(run: Record, finding: Finding) -> Finding:
    last = (run.summary.get("restored") or {}).get("step", run.summary.get("resumed"))
    lost = last is not None and finding.check == BETWEEN and finding.step == int(last) + 1
    return replace(finding, stage=Stage.checkpoint) if lost and finding.grade is not Grade.ok else finding


def _left_out(run: Record, stream: Stream) -> list[Finding]:
    known = ~np.isnan(stream.column("sum"))
    wrong = [step for step in sorted(run.skipped) if step <= len(known) and known[step - 1]]
    note = f"in {run.name}, no gradient had overflowed"
    told = partial(fact, "update left out", Stage.optimizer, "left out", "made", note=note)
    return [told(step=step) for step in wrong]


def _column(run: Record, stream: Stream, name: str, arithmetic: Arithmetic) -> list[Finding]:
    look, values = LOOKS[name], stream.column(name)
    if name == RECOMPUTED and run.gathers_twice:
        look = replace(look, since=Stage.gather)
    if name == "norm" and run.config.get("optimizer.name") == "sgd":  # dampening does to a gradient what clipping does
        look = replace(look, stage=Stage.optimizer, since=Stage.clipping)
    rows = np.flatnonzero(~np.isnan(values))
    if not len(rows):
        return []
    steps, beyond = np.minimum(rows + 1, run.length), rows >= run.length
    limit, most = bounds(name, run, stream, arithmetic)
    allowed, refuted = np.full(len(rows), limit), np.full(len(rows), most)
    if name == RECOMPUTED:
        refuted[_owed_again(run, arithmetic, values[rows])] = min(most, max(limit, REFUTED * _rounded(arithmetic)))
    note, tensors = f"in {run.name}, {look.wrong}", _tensors(stream, name, rows)
    series = Series(look.check, look.stage, steps, values[rows], allowed, refuted, look.since, note, tensors)
    after_end = replace(series, check=AFTER_END, note=f"in {run.name}, changed after the last update")
    return [*series.at(~beyond).findings(), *after_end.at(beyond).findings()]


def _tensors(stream: Stream, name: str, rows: NDArray[np.int64]) -> NDArray[np.object_] | None:
    """Name of the tensor that each row of a column is about; None where it is about none."""
    if name == "norm":
        return None
    names = {place: each.name for place, each in enumerate(stream.tensors)}
    return np.array([names.get(index) for index in stream.column(f"{name}_tensor")[rows].tolist()], dtype=object)


def _owed_again(run: Record, arithmetic: Arithmetic, values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """True per recomputed step of 8-bit layers if all before it had equal bits."""
    is_asked = arithmetic.fp8 and arithmetic.num_experts == 1 and run.attempts < 2
    if not is_asked or run.config.get("cluster.device") != "cpu" or run.config.get("engine.name") == "ext":
        return np.zeros(len(values), dtype=bool)
    others = values > EXACT
    return (np.arange(len(values)) > 0) & (np.cumsum(others) - others == 0)


def bounds(name: str, run: Record, stream: Stream, arithmetic: Arithmetic) -> tuple[float, float]:
    """Largest value that is allowed, and largest that is not refuted."""
    allowed = bound(name, stream, arithmetic)
    refuted = REFUTED * allowed
    if name not in ONCE:
        return allowed, refuted
    on_cpu = run.config.get("cluster.device") == "cpu"
    shared = run.config.get("engine.name") != "ext" and not arithmetic.fp8
    rounded = _rounded(arithmetic)
    if arithmetic.compute in SIXTEEN_BITS and on_cpu:
        allowed = rounded if arithmetic.reused else EXACT
        if shared:
            refuted = REFUTED * rounded
    elif shared and on_cpu:
        allowed = min(allowed, max(rounded, EXACT))
    if name == "drift" and on_cpu:
        allowed = EXACT
    another_order = rounded if arithmetic.compute in SIXTEEN_BITS else bound(name, stream, arithmetic)
    reordered = (name == RECOMPUTED and _adds_apart(run)) or _reassociates(stream, another_order)
    if on_cpu and reordered:
        allowed = another_order
    if arithmetic.num_experts > 1:
        owes_bits = on_cpu and (shared or name == "drift") and not reordered
        refuted = max(refuted, REFUTED * _rerouted(arithmetic)) if owes_bits else math.inf
    return allowed, refuted


def _rounded(arithmetic: Arithmetic) -> float:
    """Effect of one rounding in the compute dtype, as memory that lies otherwise may cause."""
    return SAFETY * SIGMAS * RMS * UNIT[arithmetic.compute]


def _rerouted(arithmetic: Arithmetic) -> float:
    """Effect of flips on an expert's gradient on one rank; 0 if fewer than `RARE` are expected."""
    tokens, experts = arithmetic.tokens / arithmetic.ranks, arithmetic.num_experts
    flips = arithmetic.swapped(RMS * UNIT[arithmetic.compute], tokens)
    changed = max(1.0, 2 * flips / experts)
    return math.sqrt(2 * changed * experts / (tokens * arithmetic.experts_per_token)) if flips > RARE else 0.0


def _adds_apart(run: Record) -> bool:
    """True of DeepSpeed's ZeRO-3: what a module's own uses of an input give is added up before what others give, as
    inputs pass through a function of autograd first. Seen: 7e-7 and more in fp32."""
    return run.config.get("engine.name") == "deepspeed" and run.config["sharding.strategy"] == "optim_grads_params"


def _reassociates(stream: Stream, most: float) -> bool:
    """True if equal modules give other gradients of equal bits by at most this, in step 1 and of the seed's weights."""
    asked_twice = stream.column("drift")
    seen = [*stream.column(RECOMPUTED)[:1].tolist(), *asked_twice[~np.isnan(asked_twice)].tolist()]
    return len(seen) > 1 and all(EXACT < off <= most for off in seen)


def bound(name: str, stream: Stream, arithmetic: Arithmetic) -> float:
    """Largest value of a column that rounding explains."""
    if name == "rule":
        return 1.0
    if name == "norm":
        return arithmetic.logged_norm
    if name in ONCE:
        times = max(1, int(np.count_nonzero(~np.isnan(stream.column(name)))))
        draws = stream.sketches * len(stream.tensors) * arithmetic.ranks * times
        return math.sqrt(2) * SAFETY * arithmetic.local * _deviations(draws)
    if name != "sum":
        return EXACT
    deviations = _deviations(stream.sketches * len(stream.tensors) * len(stream.column("sum")))
    error = math.hypot(arithmetic.reduction, 0.0 if arithmetic.exact_bits is None else FINEST)
    return SAFETY * error * deviations + arithmetic.stagnation + EXACT


def _deviations(draws: int) -> float:
    return NormalDist().inv_cdf(1 - RARE / (2 * max(1, draws)))


def checked_until(run: Record, arithmetic: Arithmetic) -> int:
    """Last step up to which data, and all of `REQUIRED` at every step that was looked at, are right; 0 for none.

    Weights between steps are required where the step before was looked at too.
    """
    if run.stream is None:
        return 0
    right = np.ones(min(run.length, len(run.stream.column("sum"))), dtype=bool)
    left_out = np.isin(np.arange(1, len(right) + 1), sorted(run.skipped))
    right &= fed(run)[1][: len(right)]
    looked = run.stream.looked[: len(right)]
    follows = np.concatenate(([True], looked[:-1]))
    for name in REQUIRED:
        values = run.stream.column(name)[: len(right)]
        with np.errstate(invalid="ignore"):
            fine = values <= bound(name, run.stream, arithmetic)
        unknown = (left_out & (name in OF_GRADIENTS)) | ~looked | (~follows & (name == "kept"))
        right &= fine | (np.isnan(values) & unknown)
    return len(right) if right.all() else int(np.argmin(right))


def right_in(column: str, run: Record, arithmetic: Arithmetic) -> list[int]:
    """Steps in which a column was observed, and was right."""
    if run.stream is None:
        return []
    values = run.stream.column(column)[: run.length]
    found: list[int] = (1 + np.flatnonzero(values <= bounds(column, run, run.stream, arithmetic)[0])).tolist()
    return found


def looked_at(run: Record) -> dict[str, NDArray[np.bool_]]:
    """True per step that was observed, by column of a pass, and `fed`.

    Gradients of a skipped step, which are undefined, count as observed.
    """
    seen = {"fed": fed(run)[0]}
    left_out = np.isin(np.arange(1, run.length + 1), sorted(run.skipped))
    if run.stream is None:
        return seen
    for name in (*REQUIRED, RECOMPUTED):
        values = run.stream.column(name)[: run.length]
        known = np.zeros(run.length, dtype=bool)
        known[: len(values)] = ~np.isnan(values)
        seen[name] = known | (left_out & (name in OF_GRADIENTS))
    return seen


ALWAYS = (Stage.record, Stage.data, Stage.checkpoint)
"""Stages cleared by comparability itself; a checkpoint has its own witness."""


def cleared(runs: Collection[Record], step: int, wrong: Collection[tuple[int | None, Stage]]) -> set[Stage]:
    """Stages that both runs' streams found right, at a step and the one before.

    A wrong loss has any cause since the loss before. Gathers are observed in forwards only: one for the backward may
    still be at fault.

    Args: wrong: step and stage of the witnesses' findings.
    """
    found = set(ALWAYS)
    for name in REQUIRED:
        seen = all(_seen(run, name, at) for run in runs for at in {max(1, step - 1), step})
        if seen and not any(LOOKS[name].stage is each and at in (step - 1, step) for at, each in wrong):
            found.add(LOOKS[name].stage)
    return found - {Stage.gather} if any(each.gathers_twice for each in runs) else found


def _seen(run: Record, column: str, step: int) -> bool:
    if run.stream is None:
        return False
    values = run.stream.column(column)
    return step <= len(values) and not math.isnan(float(values[step - 1]))


def narrowed(finding: Finding, clear: Collection[Stage]) -> Finding:
    """Finding without cleared stages at both ends; unchanged if none would be left."""
    stages = list(finding.stages)
    left = [stage for stage in stages if stage not in clear]
    if finding.grade is Grade.ok or not left:
        return finding
    return replace(finding, stage=left[-1], since=None if len(left) == 1 else left[0])
