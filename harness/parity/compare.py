"""The verdict on two runs, and on every arm of a study.

whole and comparable? (T0)  no -> NOT_COMPARABLE
a number that is none?      in one run -> DIFFERENT; in both -> UNDECIDED, unless they differ before it
every recorded bit equal?   yes -> EQUAL, whatever the tier
bits owed? (T1)             yes -> DIFFERENT
within what rounding does?  (T2) refuted -> DIFFERENT; in doubt, or too blind to tell -> UNDECIDED; else EQUIVALENT
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from harness.config.errors import refuse
from harness.parity.alone import optimizer, structure, witness
from harness.parity.outcome import Finding, Grade, Outcome, Stage, Verdict, worst
from harness.parity.record import Record, load
from harness.parity.reference import unbounded, with_reach
from harness.parity.telling import wording
from harness.parity.tiers import bitwise, comparable, finite, numeric, trajectory, updates
from harness.parity.tiers.admissible import Admission, admissible
from harness.parity.tiers.envelope import Arithmetic, Envelope
from harness.parity.tiers.gradients import Mismatch, TensorPair, compare_tensor, names, pool
from harness.parity.tiers.trajectory import Kick
from harness.store.provenance import sources_digest

CHECKOUT = "checkout"
"""Accept only runs made by this checkout's sources: any other is stale."""


def compare(arm: Path, control: Path, *, sources: str | None = CHECKOUT) -> Verdict:
    """Is `arm` still the same training run as `control`?

    Args:
        arm: a run directory.
        control: the run directory it is held against.
        sources: digest of the sources both must have been made by; `CHECKOUT` for the present ones; None lets them be
            any, the same in both (for a store that was made elsewhere).

    Raises:
        BadRequest: both are one directory.
        StoreError: one of them is no run.
    """
    if Path(arm).resolve() == Path(control).resolve():
        fix = "name two runs; a repetition for an A/A pair is made by train.replicate=1"
        raise refuse(f"compare {arm}", "is one run named twice", fix=fix)
    digest = sources_digest() if sources == CHECKOUT else sources
    return judge(load(arm, digest), load(control, digest))


def loss_bounds(arm: Path, control: Path) -> list[Finding]:
    """Every step's loss against what rounding explains, for a picture; empty where the two cannot be compared.

    Raises:
        StoreError: one of them is no run.
    """
    left, right = load(Path(arm)), load(Path(control))
    facts = comparable.check(left, right)
    if any(fact.grade is not Grade.ok for fact in facts):
        return []
    kinds = _Judgement(left, right, facts).numbers
    return [finding for kind in kinds for finding in kind if finding.check == "loss"]


def judge(
    arm: Record, control: Record, *, facts: list[Finding] | None = None, admission: Admission | None = None
) -> Verdict:
    """The verdict on two runs that were read; `facts` and `admission` where other rules decide on T0 and T1."""
    facts = comparable.check(arm, control) if facts is None else facts
    differing = [fact for fact in facts if fact.grade is not Grade.ok]
    if differing:
        return wording.not_comparable(arm, control, differing)
    judgement = _Judgement(arm, with_reach(arm, control), facts, admission)
    if not judgement.envelope.is_bounded and any(bit.grade is not Grade.ok for bit in judgement.bits):
        return wording.not_comparable(arm, control, [unbounded(arm)])
    return judgement.verdict()


@lru_cache(maxsize=64)
def _alone(run: Record, arithmetic: Arithmetic, factors: tuple[tuple[float, str], ...]) -> tuple[Finding, ...]:
    """What one run says of itself; kept, because a study holds many arms against one control."""
    seen = sorted(run.witnesses.keys() & run.captures.keys())
    return (
        *witness.restored(run),
        *structure.check(run),
        *optimizer.check(run),
        *(finding for step in seen for finding in witness.check(run, step, arithmetic, factors)),
    )


@dataclass(frozen=True)
class _Judgement:
    """Two comparable runs, and what is measured between them, each thing once."""

    arm: Record
    control: Record
    facts: list[Finding]
    ruled: Admission | None = None

    @cached_property
    def admission(self) -> Admission:
        if self.ruled is not None:
            return self.ruled
        resumed = self.arm.attempts > 1 or self.control.attempts > 1
        return admissible(self.arm.config, self.control.config, resumed=resumed)

    @cached_property
    def envelope(self) -> Envelope:
        return Envelope.of(self.arm, self.control)

    @cached_property
    def steps(self) -> list[int]:
        """Steps that both runs captured."""
        return sorted(self.arm.captures.keys() & self.control.captures.keys())

    @cached_property
    def pairs(self) -> Mapping[int, list[TensorPair]]:
        found: dict[int, list[TensorPair]] = {}
        for step in self.steps:
            left, right = self.arm.captures[step], self.control.captures[step]
            found[step] = [compare_tensor(name, left, right) for name in names(left, right)[0]]
        return found

    @cached_property
    def mismatches(self) -> Mapping[int, list[Mismatch]]:
        return {step: names(self.arm.captures[step], self.control.captures[step])[1] for step in self.steps}

    @cached_property
    def updates(self) -> Mapping[int, list[TensorPair]]:
        """Updates that both runs captured."""
        found: dict[int, list[TensorPair]] = {}
        for step in sorted(self.arm.updates.keys() & self.control.updates.keys()):
            left, right = self.arm.updates[step], self.control.updates[step]
            found[step] = [compare_tensor(name, left, right) for name in names(left, right)[0]]
        return found

    @cached_property
    def testimony(self) -> list[list[Finding]]:
        """What each run's own witnesses say of it, a list a kind."""
        factors = tuple(numeric.suspects(self.envelope))
        kinds: dict[str, list[Finding]] = {}
        for run, arithmetic in ((self.arm, self.envelope.arm), (self.control, self.envelope.control)):
            for finding in _alone(run, arithmetic, factors):
                kinds.setdefault(finding.check, []).append(finding)
        return list(kinds.values())

    def _locally_equal(self, step: int, push: Kick) -> bool:
        """Whether the witnesses of both runs saw the same gradients at a step: what differs then came after them."""
        left, right = self.arm.witnesses.get(step), self.control.witnesses.get(step)
        if left is None or right is None:
            return False
        pairs = [compare_tensor(name, left.capture, right.capture) for name in names(left.capture, right.capture)[0]]
        if step > 1:
            found = numeric.later_step(step, pairs, self.envelope, push)
        else:
            kinds = numeric.first_step(pairs, [], self.envelope, numeric.suspects(self.envelope))
            found = [finding for kind in kinds for finding in kind]
        return bool(pairs) and all(finding.grade is Grade.ok for finding in found)

    @cached_property
    def broken(self) -> list[Finding]:
        """Values that are not finite."""
        return finite.check(self.arm, self.control, self.pairs)

    @cached_property
    def bits(self) -> list[Finding]:
        return bitwise.check(self.arm, self.control, self.pairs, self.mismatches)

    @cached_property
    def numbers(self) -> list[list[Finding]]:
        """T2, a list a kind; of the steps before the first value that is not finite. Nothing without bounds."""
        if not self.envelope.is_bounded:
            return []
        broken_at = finite.first_step(self.broken)
        last = None if broken_at is None else broken_at - 1
        usable = [step for step in self.steps if last is None or step <= last]
        observed = pool(self.pairs[1]).distance if 1 in usable else None
        kinds: list[list[Finding]] = []
        if 1 in usable:
            factors = numeric.suspects(self.envelope)
            kinds += numeric.first_step(self.pairs[1], self.mismatches[1], self.envelope, factors)
        kinds += [self._logged_norms(usable)]
        push = trajectory.kick(self.envelope, str(self.control.config["optimizer.name"]), observed)
        for step in (step for step in usable if step > 1):
            kinds += [numeric.later_step(step, self.pairs[step], self.envelope, push)]
        first = {pair.name: pair for pair in self.pairs[1]} if 1 in usable else {}
        for step, pairs in self.updates.items():
            if last is None or step <= last:
                kinds += [updates.check(step, pairs, self.envelope, (self.arm, self.control), first)]
        kinds += trajectory.check(self.arm, self.control, self.envelope, observed, last)
        return self._placed([kind for kind in kinds if kind], push)

    def _placed(self, kinds: list[list[Finding]], push: Kick) -> list[list[Finding]]:
        """Differences of gradients where they arose: in the reduction where the local gradients agree, and in what
        follows where the captured ones do and only their norm does not."""
        wrong = [
            (f.step, f.check)
            for kind in kinds
            for f in kind
            if f.stage is Stage.gradient and f.grade is not Grade.ok and f.step in self.pairs
        ]
        summed = {step for step, check in wrong if check != trajectory.NORM}
        steps = {step for step, _ in wrong}
        places = {step: self._place(step, push) if step in summed else Stage.clipping for step in steps}
        return [
            [replace(f, stage=places.get(f.step, f.stage)) if f.stage is Stage.gradient else f for f in kind]
            for kind in kinds
        ]

    def _place(self, step: int | None, push: Kick) -> Stage:
        return Stage.reduction if step is not None and self._locally_equal(step, push) else Stage.gradient

    def _logged_norms(self, usable: Sequence[int]) -> list[Finding]:
        found = []
        for step in usable:
            if self.mismatches[step]:
                continue
            norms = [pair.arm_norm for pair in self.pairs[step]], [pair.norm for pair in self.pairs[step]]
            found.append(numeric.logged_norm(self.arm, step, norms[0], self.envelope.arm.logged_norm))
            found.append(numeric.logged_norm(self.control, step, norms[1], self.envelope.control.logged_norm))
        return found

    @cached_property
    def blindness(self) -> list[Finding]:
        """Why a T2 pass would prove too little."""
        if 1 not in self.steps:
            note = "no gradients were captured at step 1, and Adam can hide a wrong one from every later number"
            return [Finding("T2", "gradients captured", Stage.record, Grade.doubt, "none", "step 1", step=1, note=note)]
        seen, needed = numeric.resolution(self.pairs[1], self.envelope), self.envelope.smallest_fault
        if seen <= needed:
            return []
        note = "rounding could hide one rank's contribution; hold it against a control of the same compute dtype"
        return [Finding("T2", "resolution", Stage.gradient, Grade.doubt, seen, needed, step=1, note=note)]

    @cached_property
    def one_sided(self) -> list[Finding]:
        """Gradients that both were asked to capture and only one has: equal bits elsewhere do not speak for them."""
        asked = [set(run.config["measure.capture_steps"]) for run in (self.arm, self.control)]
        missing = (self.arm.captures.keys() ^ self.control.captures.keys()) & asked[0] & asked[1]
        held = {True: "captured", False: "absent"}
        return [
            Finding(
                "T1",
                "gradients captured",
                Stage.record,
                Grade.doubt,
                held[step in self.arm.captures],
                held[step in self.control.captures],
                step=step,
                note="raise measure.capture_limit_mib, or run it again",
            )
            for step in sorted(missing)
        ]

    def verdict(self) -> Verdict:
        """By the order in the module's docstring."""
        bits = [finding for finding in self.bits if finding.grade is not Grade.ok]
        own = [finding for kind in self.testimony for finding in kind if finding.grade is not Grade.ok]
        failed = sorted([*self.broken, *self.one_sided, *own, *(self._failures(bits) if bits else [])], key=_order)
        outcome = self._outcome(bits, failed)
        resolution = numeric.resolution(self.pairs[1], self.envelope) if 1 in self.steps and not self.broken else None
        return wording.verdict(
            outcome=outcome,
            arm=self.arm,
            control=self.control,
            admission=self.admission,
            evidence=self._evidence(),
            findings=failed,
            resolution=resolution,
        )

    def _failures(self, bits: Sequence[Finding]) -> list[Finding]:
        """What unequal bits come to: a fault where bits are owed, and all that T2 found."""
        numbers = [finding for kind in self.numbers for finding in kind if finding.grade is not Grade.ok]
        return [*(bits if self.admission.tier == "T1" else []), *numbers, *self.blindness]

    def _outcome(self, bits: Sequence[Finding], failed: Sequence[Finding]) -> Outcome:
        if any(finding.grade is Grade.bad for finding in failed):
            return Outcome.DIFFERENT
        if failed:
            return Outcome.UNDECIDED
        return Outcome.EQUIVALENT if bits else Outcome.EQUAL

    def _evidence(self) -> tuple[Finding, ...]:
        """The worst of each kind, with how many it stands for."""
        count = sum(fact.count for fact in self.facts)
        comparable_row = Finding("T0", "comparable", Stage.record, Grade.ok, "equal", "equal", count=count)
        rows = [comparable_row, *self.broken, *self.one_sided, *self.bits]
        for kind in [*self.testimony, *self.numbers]:
            found = worst(kind)
            if found is not None:
                rows.append(wording.standing_for(found, len(kind)))
        return (*rows, *(self.blindness if any(bit.grade is not Grade.ok for bit in self.bits) else ()))


def _order(finding: Finding) -> tuple[int, int, int, float]:
    """First cause first: the earliest step, the gravest grade, the stage within the step, the farthest out."""
    grades, stages = [Grade.bad, Grade.doubt, Grade.ok], list(Stage)
    return (finding.step or 0, grades.index(finding.grade), stages.index(finding.stage), -finding.ratio)
