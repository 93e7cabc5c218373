"""Checks of one run at every step by its own stream (`harness.store.check_stream`), without another run.

Five things are looked at in each step, each the worst over all tensors, and a sixth about the step as a whole; two
more once:

    sum        the engine's gradient against the sum of what autograd handed out           reduction
    gather     the weights that the forward used against the main weights                  gather
    kept       weights and moments before the step against those that the last one left    weights
    replicas   what ranks hold after it that keep copies of one piece       from gradient to optimizer
    rule       what the optimizer did to a sample of elements against its rule             optimizer
    norm       the norm that is logged and clipped by against that of the gradient         clipping
    again      in captured and drawn steps, a rank's gradients against those of the plain   forward and gradient
               model with the same weights and tokens (`harness.train.again`)
    drift      in that step, what the plain model makes of the seed's weights and step 1's  forward and gradient
               tokens against what it made of them before the first (`harness.train.again`)

[Note: Bounds of the stream] `gather`, `kept` and `replicas` compare numbers that were copied or cast, and a cast has
one result: all that may be left is the fp64 sum of a sketch, `EXACT` (sqrt(n) roundings of 2^-53 of n terms, 1e-11 for
10^10 weights). `rule` is measured in units of an elementwise worst case: 1 is the bound. `norm` is a sum of squares in
the main gradients' dtype (`Arithmetic.logged_norm`).

`sum` is the largest of m sketches of T tensors. A reduction errs by e = `Arithmetic.reduction` of the norm of its
terms or of their sum, whichever is longer, in the mean square, and no more than SAFETY e of any tensor
(docs/verdicts.md, Witnesses). A sketch of an error
is a signed sum of it: normal, with the error's norm as its deviation. The largest of n = m T steps draws exceeds
z(1 - p / 2n) deviations with probability p, so

    allowed = SAFETY e z(1 - RARE / (2 m T steps)),     refuted = twice that

which for 65 tensors and 1,000 steps is 5.5 deviations, for 100,000 steps 6.2. Under numerics=exact e has FINEST added
to it: a gradient smaller than what integers hold to that accuracy is told relative to one that is not
(`integer_floor`).

`again` is the largest of m sketches of T tensors on N ranks in S steps, of two gradients that the same modules made of
the same bits in the same shapes. Where kernels are the same too, as on CPUs (see [Note: Same kernels] in
`tiers.forward`), all bits are; where a library may choose by more than shapes, each of the two errs by e =
`Arithmetic.local`, so

    refuted = 2 SAFETY sqrt(2) e z(1 - RARE / (2 m T N S))

Half of that is allowed. In 16 bits and less, where e is some per cent, nothing is on a CPU: what differs at all is in
doubt, and what is off by more than twice SAFETY SIGMAS roundings is refuted. A parameter that a forward uses twice may
have its two gradients added in the compute dtype or in fp32, and lie one rounding off. Wider dtypes are allowed SAFETY
SIGMAS roundings there, 4e-7 in fp32, as products of unaligned memory may add in another order; refuted is as elsewhere.
An engine of one's own may have kernels of its own, and 8 bits may be made of weights that were cast before: these are
held to e. Where routers choose and kernels may be others, a choice that rounding turned changes an expert's gradient by
anything, and nothing is refuted.

`drift` is held to the same. Both times it is one process and its plain model: on a CPU, what differs at all in any
dtype is in doubt.

[Note: Routes that cannot flip] On CPUs a router's scores have the same bits twice. Only memory that lies otherwise may
add in another order, by a rounding in a product: a flip is then expected of fewer routes than `RARE` (of 512 in fp32,
2e-5), and what is refuted of other models is refuted. Where more routes could flip, as in 16 bits, s of the T K / N
tokens of an expert change its gradient by sqrt(2 s N / T K), s = max(1, 2 n / N) for n flips, and twice that is refuted
as well.

DeepSpeed's ZeRO-3 adds up a residual stream's gradients in another order by design, in fp32 by 7e-7 and more, and is
allowed that. Kernels may add in another order each time, as some of attention do. Then both differ from the first step
on, the plain model from itself too: a code that changed later leaves the first step alone, an engine that is wrong
`drift`. Such a run is allowed what another order of additions explains, in 16 bits SAFETY SIGMAS roundings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from harness.config.roundoff import FINEST, RMS, SIXTEEN_BITS, UNIT
from harness.parity.alone import fed
from harness.parity.outcome import REFUTED, Finding, Grade, Stage
from harness.parity.record import Record
from harness.parity.tiers.arithmetic import SAFETY, SIGMAS, Arithmetic
from harness.parity.tiers.graded import Series
from harness.store.check_stream import ONCE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from harness.store.check_stream import Stream

EXACT = 1e-9
"""Largest relative difference of fp64 sums of equal numbers."""

RARE = 1e-4
"""Probability that the largest sketch of a right run exceeds its bound."""

REQUIRED = ("sum", "gather", "kept", "rule", "norm")
"""Columns required for a step to be right given its past; `replicas` compares nothing on one rank."""


OF_GRADIENTS = ("sum", "norm")
"""Columns undefined in a step skipped for overflow; its `rule` says that nothing changed."""


@dataclass(frozen=True)
class Look:
    check: str
    stage: Stage
    wrong: str
    since: Stage | None = None


BETWEEN = "weights between steps"

LOOKS = {
    "sum": Look("sum, sketched", Stage.reduction, "not the sum of what its ranks computed"),
    "gather": Look("weights of forwards, sketched", Stage.gather, "a forward used other weights than the main ones"),
    "kept": Look(BETWEEN, Stage.weights, "changed between two steps, by something else than the optimizer"),
    "replicas": Look(
        "copies, sketched", Stage.optimizer, "ranks left with different copies of one piece", since=Stage.gradient
    ),
    "rule": Look("update by the rule, sampled", Stage.optimizer, "not what the optimizer's rule makes of the gradient"),
    "norm": Look("logged norm, sketched", Stage.clipping, "not the norm of the gradient that was reduced"),
    "again": Look(
        "gradient worked out again",
        Stage.gradient,
        "not what the plain model gives for the same weights and tokens",
        since=Stage.forward,
    ),
    "drift": Look(
        "the same function",
        Stage.gradient,
        "the model's code is another function than when the run began: of the seed's weights and step 1's tokens",
        since=Stage.forward,
    ),
}

TAKEN = Look(
    LOOKS["norm"].check,
    Stage.optimizer,
    "the momentum took gradients with another factor than the one that clips",
    since=Stage.clipping,
)
"""Meaning of `norm` for SGD where the logged norm itself is right."""

CLIPPED = replace(TAKEN, stage=Stage.clipping, wrong=TAKEN.wrong.replace("momentum", "moments"), since=None)
"""Meaning of `norm` where the logged norm is right and moments separate the gradient's factor."""


RECOMPUTED = "again"


def check(run: Record, arithmetic: Arithmetic) -> list[Finding]:
    if run.stream is None:
        return []
    found = [finding for name in LOOKS for finding in _column(run, run.stream, name, arithmetic)]
    return [*(_of_checkpoint(run, finding) for finding in found), *_left_out(run, run.stream)]


def _of_checkpoint(run: Record, finding: Finding) -> Finding:
    resumed = run.summary.get("restored")
    lost = resumed and finding.check == BETWEEN and finding.step == int(resumed["step"]) + 1
    return replace(finding, stage=Stage.checkpoint) if lost and finding.grade is not Grade.ok else finding


def _left_out(run: Record, stream: Stream) -> list[Finding]:
    import numpy as np

    known = ~np.isnan(stream.column("sum"))
    wrong = [step for step in sorted(run.skipped) if step <= len(known) and known[step - 1]]
    note = f"in {run.name}, no gradient had overflowed"
    return [
        Finding("T1", "update left out", Stage.optimizer, Grade.bad, "left out", "made", step=step, note=note)
        for step in wrong
    ]


def _column(run: Record, stream: Stream, name: str, arithmetic: Arithmetic) -> list[Finding]:
    import numpy as np

    look, values = LOOKS[name], stream.column(name)
    if name == RECOMPUTED and run.gathers_twice:
        look = replace(look, since=Stage.gather)
    rows = np.flatnonzero(~np.isnan(values))
    steps, beyond = np.minimum(rows + 1, run.length), rows >= run.length
    limit, most = bounds(name, run, stream, arithmetic)
    allowed, refuted = np.full(len(rows), limit), np.full(len(rows), most)
    taken = ~beyond & _taken_otherwise(run, stream, steps) if name == "norm" else np.zeros(len(rows), dtype=bool)
    found = []
    for part, said in (
        (~beyond & ~taken, look),
        (taken, _factor(run)),
        (beyond, replace(look, check="weights after the last step", wrong="changed after the last update")),
    ):
        if not part.any():
            continue
        note = f"in {run.name}, {said.wrong}"
        series = Series(
            said.check,
            said.stage,
            steps[part],
            values[rows][part],
            allowed[part],
            refuted[part],
            said.since,
            note,
        )
        found += series.findings(_named(stream, name, rows[part]))
    return found


def _factor(run: Record) -> Look:
    if run.config.get("optimizer.name") != "sgd":
        return CLIPPED
    return TAKEN if run.config.get("optimizer.clip_norm") is not None else replace(TAKEN, since=None)


def _taken_otherwise(run: Record, stream: Stream, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    import numpy as np

    logged = np.array(run.series("grad_norm"), float)[steps - 1]
    whole, said = (stream.column(name)[steps - 1] for name in ("reduced_squares", "norm"))
    with np.errstate(divide="ignore", invalid="ignore"):
        own = np.abs(logged - np.sqrt(whole)) / np.sqrt(whole)
    found: NDArray[np.bool_] = own < said / 2
    return found


def _named(stream: Stream, name: str, rows: NDArray[np.int64]):  # type: ignore[no-untyped-def]
    if name == "norm":
        return lambda at: None
    indices = stream.column(f"{name}_tensor")

    def tensor(at: int) -> str | None:
        index = indices[rows[at]]
        return stream.tensors[int(index)].name if 0 <= index < len(stream.tensors) else None

    return tensor


def bounds(name: str, run: Record, stream: Stream, arithmetic: Arithmetic) -> tuple[float, float]:
    """Largest value that is allowed, and largest that is not refuted."""
    allowed = bound(name, stream, arithmetic)
    refuted = REFUTED * allowed
    if name not in ONCE:
        return allowed, refuted
    on_cpu = run.config.get("cluster.device") == "cpu"
    shared = run.config.get("engine.name") != "ext" and not arithmetic.fp8
    rounded = SAFETY * SIGMAS * RMS * UNIT[arithmetic.compute]
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


def _rerouted(arithmetic: Arithmetic) -> float:
    """Effect of flips on an expert's gradient on one rank; see [Note: Routes that cannot flip]."""
    tokens, experts = arithmetic.tokens / arithmetic.ranks, arithmetic.num_experts
    flips = arithmetic.swapped(RMS * UNIT[arithmetic.compute], tokens)
    changed = max(1.0, 2 * flips / experts)
    return math.sqrt(2 * changed * experts / (tokens * arithmetic.experts_per_token)) if flips > RARE else 0.0


def _adds_apart(run: Record) -> bool:
    """True of DeepSpeed's ZeRO-3: what a module's own uses of an input give is added up before what others give, as
    inputs pass through a function of autograd first."""
    return run.config.get("engine.name") == "deepspeed" and run.config["sharding.strategy"] == "optim_grads_params"


def _reassociates(stream: Stream, most: float) -> bool:
    """True if equal modules give other gradients of equal bits by at most this, in step 1 and of the seed's weights."""
    import numpy as np

    asked_twice = stream.column("drift")
    seen = [*stream.column(RECOMPUTED)[:1].tolist(), *asked_twice[~np.isnan(asked_twice)].tolist()]
    return len(seen) > 1 and all(EXACT < off <= most for off in seen)


def bound(name: str, stream: Stream, arithmetic: Arithmetic) -> float:
    """Largest value of a column that rounding explains; see [Note: Bounds of the stream]."""
    import numpy as np

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
    """Last step up to which data and all of `REQUIRED` are right at every step; 0 for none."""
    import numpy as np

    if run.stream is None:
        return 0
    right = np.ones(min(run.length, len(run.stream.column("sum"))), dtype=bool)
    left_out = np.isin(np.arange(1, len(right) + 1), sorted(run.skipped))
    right &= np.array(fed.right_at(run), dtype=bool)[: len(right)]
    for name in REQUIRED:
        values = run.stream.column(name)[: len(right)]
        with np.errstate(invalid="ignore"):
            fine = values <= bound(name, run.stream, arithmetic)
        right &= fine | (left_out & np.isnan(values) & (name in OF_GRADIENTS))
    return len(right) if right.all() else int(np.argmin(right))


def looked_at(run: Record) -> dict[str, NDArray[np.bool_]]:
    """True per step that was observed, by column of a pass, and `fed`.

    Gradients of a skipped step, which are undefined, count as observed.
    """
    import numpy as np

    seen = {"fed": np.array(fed.seen_at(run), dtype=bool)}
    left_out = np.isin(np.arange(1, run.length + 1), sorted(run.skipped))
    if run.stream is None:
        return seen
    for name in (*REQUIRED, RECOMPUTED):
        values = run.stream.column(name)[: run.length]
        known = np.zeros(run.length, dtype=bool)
        known[: len(values)] = ~np.isnan(values)
        seen[name] = known | (left_out & (name in OF_GRADIENTS))
    return seen
