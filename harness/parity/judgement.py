"""Two comparable runs, each measurement made once, and their verdict.

docs/verdicts.md says what is asked where both are right in every step ("Two runs with every step checked"), and how
growth is bounded elsewhere ("T2 over the steps"). The order of outcomes is that of `harness.parity.compare`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from harness.config.roundoff import SIXTEEN_BITS
from harness.config.update_rule import KNOWN
from harness.parity.alone import every_step, optimizer, witness
from harness.parity.outcome import REFUTED, Finding, Grade, Outcome, Stage, Verdict, fact, worst
from harness.parity.record import Record
from harness.parity.telling import wording
from harness.parity.tiers import bitwise, comparable, divergence, forward, numeric, trajectory
from harness.parity.tiers.arithmetic import Arithmetic
from harness.parity.tiers.comparable import Admission, admissible, unlisted
from harness.parity.tiers.divergence import Apart, apart
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import Mismatch, TensorPair, compared, names, pool
from harness.parity.tiers.trajectory import Perturbation, grown, listed, stable_until

CAST_FIRST = "casts weights before it quantizes them, by design of FSDP2: forwards are not held to the same bits"

_ALONE: WeakKeyDictionary[Record, dict[Any, tuple[Finding, ...]]] = WeakKeyDictionary()


def _alone(run: Record, arithmetic: Arithmetic, factors: tuple[tuple[float, str], ...]) -> tuple[Finding, ...]:
    """Findings of one run alone; kept as long as the run, because a study holds many arms against one control."""
    known = _ALONE.setdefault(run, {})
    if (found := known.get((arithmetic, factors))) is not None:
        return found
    seen = [] if run.is_watched else sorted((run.witnesses.keys() & run.captures.keys()) - run.skipped)
    found = known[arithmetic, factors] = (
        *every_step.check_data(run),
        *witness.restored(run),
        *witness.replicas(run),
        *optimizer.check(run),
        *every_step.check(run, arithmetic),
        *(finding for step in seen for finding in witness.check(run, step, arithmetic, factors)),
    )
    return found


@dataclass(frozen=True)
class Judgement:
    arm: Record
    control: Record
    facts: list[Finding]
    versions: bool = False
    """True of runs by two versions of the code: bits are owed by equal sources, elsewhere only on demand."""
    bitwise: bool = False

    @cached_property
    def admission(self) -> Admission:
        same = self.arm.provenance.get("sources_digest") == self.control.provenance.get("sources_digest")
        if self.versions and not (same or self.bitwise):
            return Admission("T2", "two versions of the code: one may add in another order (--bitwise demands bits)")
        resumed = self.arm.attempts > 1 or self.control.attempts > 1
        found = admissible(self.arm.config, self.control.config, resumed=resumed)
        why = "no source that can change a number differs" if same else "--bitwise demands what one code owes"
        return replace(found, reason=f"{why}; {found.reason}") if self.versions else found

    @cached_property
    def envelope(self) -> Envelope:
        return Envelope.of(self.arm, self.control)

    @cached_property
    def steps(self) -> list[int]:
        left_out = self.arm.skipped | self.control.skipped
        return sorted((self.arm.captures.keys() & self.control.captures.keys()) - left_out)

    @cached_property
    def pairs(self) -> Mapping[int, list[TensorPair]]:
        return {step: compared(self.arm.captures[step], self.control.captures[step]) for step in self.steps}

    @cached_property
    def mismatches(self) -> Mapping[int, list[Mismatch]]:
        return {step: names(self.arm.captures[step], self.control.captures[step])[1] for step in self.steps}

    @cached_property
    def updates(self) -> Mapping[int, list[TensorPair]]:
        left, right = self.arm.updates, self.control.updates
        return {step: compared(left[step], right[step]) for step in sorted(left.keys() & right.keys())}

    @cached_property
    def _of_itself(self) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
        """Findings of the arm alone, and of the control alone."""
        factors = tuple(numeric.suspects(self.envelope))
        left, right = (run.as_recorded or run for run in (self.arm, self.control))
        return _alone(left, self.envelope.arm, factors), _alone(right, self.envelope.control, factors)

    @cached_property
    def alone(self) -> list[list[Finding]]:
        kinds: dict[str, list[Finding]] = {}
        for finding in chain(*self._of_itself):
            kinds.setdefault(finding.check, []).append(finding)
        return list(kinds.values())

    def _besides(self, first: Finding) -> Finding | None:
        """Gravest failure of a run alone that `first` does not cause.

        A run's own checks take its past as given: those of the other run always count, those of other stages where
        `first` explains itself.
        """
        accused = [any(each is first for each in found) for found in self._of_itself]
        apart = [
            each
            for found, is_accused in zip(self._of_itself, accused, strict=True)
            for each in found
            if (any(accused) and not is_accused) or (first.explains_itself and first.stage not in each.stages)
        ]
        failed = [each for each in apart if each.grade is not Grade.ok]
        return min(failed, key=lambda each: (each.grade is not Grade.bad, _order(each)), default=None)

    def _locally_equal(self, step: int, push: Perturbation) -> bool:
        left, right = self.arm.witnesses.get(step), self.control.witnesses.get(step)
        if left is None or right is None:
            return False
        pairs = compared(left.capture, right.capture)
        if step > 1:
            found = numeric.later_step(step, pairs, self.envelope, push)
        else:
            kinds = numeric.first_step(pairs, [], self.envelope, numeric.suspects(self.envelope))
            found = [finding for kind in kinds for finding in kind]
        return bool(pairs) and all(finding.grade is Grade.ok for finding in found)

    @cached_property
    def last_stable(self) -> int:
        return stable_until(self.control.series("grad_norm"), self.control.series("loss"))

    @cached_property
    def certain(self) -> int:
        """Last step up to which both runs are right in all of `every_step.REQUIRED`; 0 if either was not checked."""
        left = every_step.checked_until(self.arm, self.envelope.arm)
        return min(left, every_step.checked_until(self.control, self.envelope.control))

    def _looked_at(self) -> Mapping[str, Sequence[int]]:
        """Steps in which both runs were observed, by column (`every_step.looked_at`)."""
        left, right = (every_step.looked_at(run) for run in (self.arm, self.control))
        if comparable.is_one(self.arm, self.control):
            left.pop(every_step.RECOMPUTED, None)
        return {name: (1 + (left[name] & right[name]).nonzero()[0]).tolist() for name in left if name in right}

    def _right(self, finding: Finding) -> list[int] | None:
        """Steps in which the run that a finding of its own accuses was asked the same, and was right; else None."""
        accused = 0 if any(each is finding for each in self._of_itself[0]) else 1
        looks = every_step.LOOKS.items()
        column = next((name for name, look in looks if look.words and look.check == finding.check), None)
        if column is not None:
            runs = (self.arm, self.envelope.arm), (self.control, self.envelope.control)
            return every_step.right_in(column, *runs[accused])
        if finding.check not in (optimizer.IN_16_BITS, witness.OF_FORWARD):  # of captured steps
            return None
        own = self._of_itself[accused]
        return [f.step for f in own if f.check == finding.check and f.grade is Grade.ok and f.step is not None]

    def _followed(self) -> tuple[int, int]:
        """Number of tensors that both streams follow, and of all that either run recorded."""
        runs = (self.arm, self.control)
        streams = [set() if run.stream is None else {each.name for each in run.stream.tensors} for run in runs]
        held = [of for run in runs if (of := run.captures.get(1)) is not None]
        return len(streams[0] & streams[1]), len(set[str]().union(*streams, *(of.tensors for of in held)))

    @cached_property
    def broken(self) -> list[Finding]:
        return bitwise.finite_values(self.arm, self.control, self.pairs, self.last_stable)

    @cached_property
    def last(self) -> int:
        return min(
            (finding.step - 1 for finding in self.broken if finding.step is not None), default=self.control.length
        )

    @cached_property
    def push(self) -> Perturbation:
        observed = pool(self.pairs[1]).distance if 1 in self.steps and self.last else None
        optimizer = str(self.control.config["optimizer.name"])
        push = trajectory.perturbation(self.envelope, optimizer, observed)
        if not self.control.is_watched or 1 not in self.updates or optimizer not in KNOWN:
            return push  # else the first update was held to the rule, and nobody vouches for the later steps
        return replace(push, seen=divergence.first_update(self.arm, self.control))

    @cached_property
    def distances(self) -> Apart | None:
        """By the streams; None where one of the two has none, or they have no sketch in common."""
        left, right = self.arm.stream, self.control.stream
        return None if left is None or right is None else apart(left, right)

    def _jumps(self) -> list[list[Finding]]:
        if self.distances is None:
            return []
        captured = 1 in self.steps and not self.mismatches[1]  # judged elsewhere
        twice = self.arm.gathers_twice or self.control.gathers_twice
        return divergence.jumps(
            self.distances,
            self.envelope,
            self.push,
            self.last_stable,
            self.certain,
            wide=all(run.config["dtype.main_params"] not in SIXTEEN_BITS for run in (self.arm, self.control)),
            first=2 if captured else 1,
            begins=Stage.gather if twice else Stage.forward,
            taken=self._taken,
        )

    @cached_property
    def bits(self) -> list[Finding]:
        return bitwise.check(self.arm, self.control, self.pairs, self.mismatches)

    @cached_property
    def numbers(self) -> list[list[Finding]]:
        """T2, a list a kind, before the first non-finite value; empty without bounds."""
        if not self.envelope.is_bounded:
            return []
        usable = [step for step in self.steps if step <= self.last]
        kinds: list[list[Finding]] = []
        if self._sketched is not None and self.arm.stream and self.control.stream and self.last:
            kinds += numeric.first_step_sketched(self.arm.stream, self.control.stream, self._sketched, self.envelope)
        if 1 in usable:
            factors = numeric.suspects(self.envelope)
            kinds += numeric.first_step(self.pairs[1], self.mismatches[1], self.envelope, factors)
        kinds += forward.check(self.arm, self.control, self.envelope) if self.last else []
        kinds += self._captured(usable)
        steps = trajectory.check(self.arm, self.control, self.envelope, self.push, self.last, self.last_stable)
        kinds += [[f for f in kind if f.step == 1 or not self._is_certain(f.step)] for kind in steps]
        kinds += self._jumps()
        if self.certain:
            until = min(self.last, self.certain + 1)
            kinds += [divergence.losses(self.arm, self.control, self.envelope, until, self.last_stable)]
        return self._placed([kind for kind in kinds if kind])

    def losses(self) -> list[Finding]:
        parts = trajectory.losses(self.arm, self.control, self.envelope, self.push, self.last, self.last_stable)
        return [finding for part in parts for finding in part.every()]

    def _is_certain(self, step: int | None) -> bool:
        return step is not None and 1 < step <= self.certain + 1

    def _captured(self, usable: Sequence[int]) -> list[list[Finding]]:
        kinds = []
        bounds = self._grown({step: self.pairs[step] for step in usable})
        for step in usable:
            if step > 1 and not self._is_certain(step):
                kinds += [numeric.later_step(step, self.pairs[step], self.envelope, self.push, bounds[step])]
        first = {pair.name: pair for pair in self.pairs[1]} if 1 in usable else {}
        updated = {step: pairs for step, pairs in self.updates.items() if step <= self.last}
        bounds = self._grown(updated)
        for step, pairs in updated.items():
            if not self._is_certain(step):
                runs = (self.arm, self.control)
                kinds += [numeric.update_sizes(step, pairs, self.envelope, runs, first, bounds[step])]
        return kinds

    def _grown(self, pairs: Mapping[int, Sequence[TensorPair]]) -> dict[int, float]:
        steps = np.array(sorted(pairs), dtype=np.int64)
        off = [max((p.distance for p in pairs[step] if math.isfinite(p.distance)), default=0.0) for step in steps]
        bounds = grown(np.array(off), trajectory.ROUNDED, steps)
        found = zip(steps.tolist(), bounds.tolist(), strict=True)
        return {step: math.inf if step > self.last_stable else bound for step, bound in found}

    def _placed(self, kinds: list[list[Finding]]) -> list[list[Finding]]:
        """Findings placed at their stage, as near as is known.

        Gradients of captured steps: in the reduction where local ones agree; since any stage of an uncaptured step
        before; those of step 1 maybe since the forward. A watch sees them when they are clipped.
        """
        wrong = [f for kind in kinds for f in kind if f.stage is Stage.gradient and f.grade is not Grade.ok]
        summed = {f.step for f in wrong if f.check != trajectory.NORM and f.since is None} & self.pairs.keys()
        alike = {step: self._locally_equal(step, self.push) for step in summed if step is not None}
        own = [(f.step, f.stage) for kind in self.alone for f in kind if f.grade is not Grade.ok]

        def place(finding: Finding) -> Finding:
            step, since = finding.step, finding.since
            if finding.grade is Grade.ok or step is None:
                return finding
            stage = finding.stage
            if stage is Stage.gradient and since is None and step in self.pairs:
                if step not in alike:
                    stage = Stage.clipping
                elif alike[step]:
                    stage, since = self._taken, None if self._taken is Stage.reduction else Stage.reduction
                elif step > 1 and step - 1 not in self.pairs:
                    stage, since = Stage.optimizer, Stage.weights
                elif step == 1 and forward.parts(self.arm, self.control):
                    since = Stage.forward
            elif step > 1 and finding.check == trajectory.NORM:
                stage, since = Stage.optimizer, Stage.forward
            found = replace(finding, stage=stage, since=since)
            if since is None:
                return found
            return every_step.narrowed(found, every_step.cleared((self.arm, self.control), step, own))

        return [[place(finding) for finding in kind] for kind in kinds]

    @property
    def _taken(self) -> Stage:
        return Stage.clipping if comparable.is_one(self.arm, self.control) else Stage.reduction

    @cached_property
    def _sketched(self) -> Apart | None:
        """Distances by which the gradients of step 1 are held to a baseline, which has none of them whole."""
        found, one = self.distances, self.arm.is_baseline or self.control.is_baseline
        return found if found is not None and one and found.sees_gradients and 1 not in self.steps else None

    @cached_property
    def blindness(self) -> list[Finding]:
        if self._sketched is not None:
            note = "rounding could hide one rank's contribution from sketches and norms; compare the runs themselves"
            # one of N ranks that is missing, of gradients that are noise, shortens their mean by half of 1/N
            return numeric.blind(REFUTED * self.envelope.norm, self.envelope.smallest_fault / 2, note)
        if 1 not in self.steps and self.certain and self.distances is not None and self.distances.sees_gradients:
            return []
        if 1 not in self.steps:
            note = "no gradients were captured at step 1, and Adam can hide a wrong one from every later number"
            told = partial(fact, "gradients captured", tier="T2", wrong=Grade.doubt, note=note)
            return [told(Stage.record, "none", "step 1", step=1)]
        note = "rounding could hide one rank's contribution; hold it against a control of the same compute dtype"
        return numeric.blind(numeric.resolution(self.pairs[1], self.envelope), self.envelope.smallest_fault, note)

    @cached_property
    def one_sided(self) -> list[Finding]:
        runs = (self.arm, self.control)
        asked = [set(run.config["measure.capture_steps"]) for run in runs]
        missing = (self.arm.captures.keys() ^ self.control.captures.keys()) & asked[0] & asked[1]
        note = "raise measure.capture_limit_mib, or run it again"
        told = partial(fact, "gradients captured", Stage.record, wrong=Grade.doubt, note=note)
        said = {step: ["captured" if step in run.captures else "absent" for run in runs] for step in sorted(missing)}
        return [told(*pair, step=step) for step, pair in said.items()]

    def verdict(self) -> Verdict:
        bits = [finding for finding in self.bits if finding.grade is not Grade.ok]
        own = [finding for kind in self.alone for finding in kind if finding.grade is not Grade.ok]
        own += [finding for finding in self.alike if finding.grade is not Grade.ok]
        failed = sorted([*self.broken, *self.one_sided, *own, *(self._failures(bits) if bits else [])], key=_order)
        outcome = self._outcome(bits, failed)
        return Verdict(
            outcome=outcome,
            sentence=f"{outcome.value}: {self.arm.name} against {self.control.name}{self._claim(outcome, failed)}.",
            arm=str(self.arm.path),
            control=str(self.control.path),
            tier=failed[0].tier if failed else ("T1" if outcome is Outcome.EQUAL else "T2"),
            admissible=str(self.admission),
            evidence=self._evidence(),
            findings=tuple(failed),
            resolution=self._resolution,
            commands=wording.commands(outcome, self.arm, self.control, failed),
        )

    @cached_property
    def _resolution(self) -> float | None:
        return numeric.resolution(self.pairs[1], self.envelope) if 1 in self.steps and not self.broken else None

    def _claim(self, outcome: Outcome, failed: Sequence[Finding]) -> str:
        seen, of_tensors = self._looked_at(), comparable.is_one(self.arm, self.control)
        if failed:
            again, length = seen.get(every_step.RECOMPUTED, ()), self.arm.length
            told = wording.wrong_of(
                outcome, failed, self._besides, self._right, of_tensors=of_tensors, again=again, length=length
            )
            return "; ".join([f": {told}", *self.limits])
        runs, evidence = (self.arm, self.control), self._evidence()
        told = wording.right_of(outcome, *runs, evidence, self._resolution, seen, self._followed())
        return "; ".join([f" {told}", *self.limits])

    @cached_property
    def limits(self) -> list[str]:
        """Unknown facts of a watched run and another arithmetic by design, as clauses; with any of them equal bits are
        no proof."""
        found = comparable.limits(self.arm, self.control) if comparable.is_one(self.arm, self.control) else []
        runs = (self.arm, self.envelope.arm), (self.control, self.envelope.control)
        casting = [run.name for run, arithmetic in runs if arithmetic.casts_first]
        return [*found, *([f"{casting[0]} {CAST_FIRST}"] if len(casting) == 1 else [])]

    @cached_property
    def alike(self) -> list[Finding]:
        """Weights of the first unequal step of two runs that are equal so far, unless one has shown by itself why."""
        own = [f.step or 0 for kind in self.alone for f in kind if f.grade is Grade.bad]
        return [
            f
            for f in divergence.after_equal_gradients(self.arm, self.control)
            if f.grade is Grade.ok or (f.step or 0) < min([*own, math.inf])
        ]

    def _failures(self, bits: Sequence[Finding]) -> list[Finding]:
        numbers = [finding for kind in self.numbers for finding in kind if finding.grade is not Grade.ok]
        return [*(bits if self.admission.tier == "T1" else []), *numbers, *self.blindness]

    def _outcome(self, bits: Sequence[Finding], failed: Sequence[Finding]) -> Outcome:
        if any(finding.grade is Grade.bad for finding in failed):
            return Outcome.DIFFERENT
        if failed:
            return Outcome.UNDECIDED
        return Outcome.EQUIVALENT if bits or self.limits else Outcome.EQUAL

    def _evidence(self) -> tuple[Finding, ...]:
        count = sum(fact.count for fact in self.facts)
        comparable_row = fact("comparable", Stage.record, "equal", tier="T0", count=count)
        rows = [comparable_row, *unlisted(self.arm, self.control), *self.broken, *self.one_sided, *self.bits]
        for kind in [*self.alone, self.alike, *self.numbers]:
            found = worst(kind)
            if found is not None:
                count = listed(kind)
                rows.append(found if found.count == count else replace(found, count=count))
        return (*rows, *(self.blindness if any(bit.grade is not Grade.ok for bit in self.bits) else ()))


def _order(finding: Finding) -> tuple[float, ...]:
    grades, stages = [Grade.bad, Grade.doubt, Grade.ok], list(Stage)
    place = finding.step or 0, grades.index(finding.grade), stages.index(finding.stage)
    return (*place, not finding.explains_itself, -finding.ratio)
