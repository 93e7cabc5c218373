"""Comparison of two versions of the code, and the first commit between them that differs; request and verdict of a
trial."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.bisect.revisions import WORKTREE, Repository, Version
from harness.bisect.snapshot import Snapshot, check_words
from harness.config.doc import as_typed, settings
from harness.config.errors import BadRequest, refuse
from harness.parity import Grade, Outcome, Stage, Verdict
from harness.parity.telling.wording import describe
from harness.parity.tiers.comparable import REPEATABLE
from harness.parity.versions import Side, changed_defaults, compare_versions
from harness.store import commands
from harness.store.redaction import redacted

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Compared:
    verdict: Verdict
    arm: Path
    control: Path


def compare_code(request: Request, old: str, new: str, tell: Tell) -> Compared:
    """Verdict on the run of `new` against that of `old`; runs are made once and reused.

    Raises `BadRequest` (no such revision, or the request does not compose; nothing was run) and `KeyboardInterrupt`.
    """
    request.check()
    repository = Repository.own(request.root)
    control, arm = (repository.version(revision) for revision in (old, new))
    _warn_of_dirt(repository, (control, arm), tell)
    return _compared(request, repository, control, arm, tell)


def _compared(request: Request, repository: Repository, control: Version, arm: Version, tell: Tell) -> Compared:
    if control.tree == arm.tree:
        return Compared(_one_version(request, repository, control, arm), Path(arm.word), Path(control.word))
    snapshots = [Snapshot(repository, version) for version in (control, arm)]
    for snapshot in snapshots:
        snapshot.check(request.words)
    before, after = (_run(snapshot, request, tell) for snapshot in snapshots)
    verdict = compare_versions(Side(after, arm.label), Side(before, control.label), bitwise=request.bitwise)
    return Compared(replace(verdict, commands=_commands(request, verdict, control, arm)), after, before)


def _one_version(request: Request, repository: Repository, control: Version, arm: Version) -> Verdict:
    before = repository.parents(control)[:1]
    return Verdict(
        Outcome.EQUAL,
        f"EQUAL: {arm.label} and {control.label} hold the same files; there is one version of the code, and nothing"
        " was run.",
        arm.word,
        control.word,
        tier="T1",
        admissible="T1: the files are the same",
        commands=tuple(request.command("compare", "--code", each, arm.word) for each in before),
    )


def _warn_of_dirt(repository: Repository, versions: Sequence[Version], tell: Tell) -> None:
    if any(version.asked == "HEAD" for version in versions) and repository.is_dirty():
        tell(f"note: files differ from HEAD, and HEAD is the commit; {WORKTREE} stands for the files")


def _run(snapshot: Snapshot, request: Request, tell: Tell) -> Path:
    before = snapshot.done(request.words) is not None
    state = "was run before" if before else f"training; progress is in {snapshot.log(request.words)}"
    tell(f"{snapshot.version.label}: {state}")
    return snapshot.run(request.words)


def _commands(request: Request, verdict: Verdict, control: Version, arm: Version) -> tuple[str, ...]:
    looks = tuple(command for command in verdict.commands if " --tensor " in command or " diff " in command)
    again = ("compare", "--code", control.word, arm.word)
    if verdict.outcome is Outcome.NOT_COMPARABLE and not unfit(verdict):
        typed = {word.partition("=")[0] for word in request.words}
        values = changed_defaults(Path(verdict.arm), Path(verdict.control)).items()
        more = tuple(f"{key}={as_typed(value)}" for key, value in values if key not in typed)
        return (replace(request, words=(*request.words, *more)).command(*again), *looks) if more else looks
    return looks or (f"{request.command(*again)} --json",)


@dataclass(frozen=True)
class Culprit:
    """same: last version known not to differ. skipped: versions between it and `first`, and why."""

    same: Version
    first: Version
    verdict: Verdict
    skipped: tuple[tuple[Version, str], ...]

    @property
    def sentence(self) -> str:
        what = f"{self.first.title} is the first that differs"
        if self.skipped:
            after = f"after {len(self.skipped)} that could not be tried"
            what = f"{self.first.title} is the first that is known to differ, {after}"
        return f"{what}: {self.verdict.sentence}"


def bisect(request: Request, good: str, bad: str, tell: Tell) -> Culprit:
    """First version that differs from `good`; asked again, runs that are done are used again.

    Args: good: revision of the control. bad: a revision built on it, or WORKTREE. tell: called with a line a trial.

    Raises `BadRequest`: a revision is unknown, an end cannot be run, or they do not differ. `KeyboardInterrupt`.
    """
    request.check()
    if good == WORKTREE:
        raise refuse(f"bisect {WORKTREE}", "nothing is built on it yet: it can be the bad end alone", fix="a commit")
    repository = Repository.own(request.root)
    control, end = (repository.version(revision) for revision in (good, bad))
    _check_history(repository, control, end)
    _warn_of_dirt(repository, (control, end), tell)
    verdicts: dict[str, Verdict] = {}
    reasons: dict[str, str] = {}

    def judge(version: Version) -> Verdict:
        verdicts[version.tree] = _compared(request, repository, control, version, lambda _: None).verdict
        return verdicts[version.tree]

    def answer(version: Version) -> str:
        try:
            verdict = judge(version)
        except BadRequest as error:
            reasons[version.tree] = redacted(" ".join(error.violations[0].problem.split()))
            tell(f"  {version.title}: skipped, {reasons[version.tree]}")
            return SKIP
        found = answer_of(verdict, verdicts[end.tree].outcome)
        reasons[version.tree] = verdict.sentence
        tell(f"  {version.title}: {'skipped, ' * (found == SKIP)}{brief(verdict)}")
        return found

    tell(f"versions after {control.title}, each held against it; progress is in {repository.cache}/*/runs/*.log")
    _check_end(judge(end), control, end)
    tell(f"  the end  {end.title}: {brief(verdicts[end.tree])}")
    same, *between, first = repository.bisect(control, end, answer)
    return Culprit(same, first, verdicts[first.tree], tuple((each, reasons[each.tree]) for each in between))


def _check_history(repository: Repository, good: Version, bad: Version) -> None:
    if good.tree == bad.tree:
        fix = f"two revisions that differ; {WORKTREE} for what is not committed"
        raise refuse(f"bisect {good.label} {bad.label}", "names the same files twice", fix=fix)
    if repository.is_ancestor(good, bad):
        return
    fix = f"two revisions of one history; git merge-base {good.word} {bad.word} says where these part"
    if repository.is_ancestor(bad, good):
        fix = f"bisect {bad.word} {good.word}: the first version that differs from the older one, be it a repair"
    raise refuse(f"bisect {good.label} {bad.label}", "the second is not built on the first", fix=fix)


def _check_end(verdict: Verdict, good: Version, bad: Version) -> None:
    if why := unfit(verdict):
        fix = "both ends must run to their end on one machine"
        raise refuse(bad.label, f"cannot be held against {good.label}: {why}", fix=fix)
    if answer_of(verdict, verdict.outcome) != BAD:
        problem = f"does not differ from {good.label}, so there is nothing to find. {verdict.sentence}"
        fix = "a longer run, another seed, or --bitwise with numerics=deterministic may tell them apart"
        raise refuse(bad.label, problem, fix=fix)


PASSED = (Outcome.EQUAL, Outcome.EQUIVALENT)

GOOD, BAD, SKIP = "good", "bad", "skip"
"""Words of `git bisect` for a version."""


@dataclass(frozen=True)
class Request:
    """Overrides of every trial, and its store. bitwise: any unequal bit is a difference."""

    words: tuple[str, ...] = ()
    root: str = "runs"
    bitwise: bool = False

    def check(self) -> None:
        """Raises `BadRequest`: a setting is not the request's to choose, or bits are demanded where sums have no
        order."""
        check_words(self.words)
        modes = [word.partition("=")[2] for word in self.words if word.startswith(("numerics=", "numerics.mode="))]
        if self.bitwise and not set(modes) & set(REPEATABLE):
            problem = "demands bits, and numerics=fast promises no order of sums: two runs of one code may differ"
            raise refuse("--bitwise", problem, choices=f"with numerics={' or numerics='.join(REPEATABLE)}")

    def command(self, *before: str) -> str:
        return commands.verb(shlex.join([*before, *self.words, *["--bitwise"] * self.bitwise]), self.root)


def unfit(verdict: Verdict) -> str:
    if verdict.outcome is not Outcome.NOT_COMPARABLE:
        return ""
    known = settings()
    strange = [f for f in verdict.findings if f.stage is Stage.record and f.check not in known]
    return verdict.sentence if strange else ""


def brief(verdict: Verdict) -> str:
    if verdict.outcome in PASSED:
        return verdict.outcome.value
    grave = Grade.bad if verdict.outcome is Outcome.DIFFERENT else Grade.doubt
    first = next((finding for finding in verdict.findings if finding.grade is grave), None)
    return verdict.sentence if first is None else f"{verdict.outcome.value}: {describe(first, first, first.note)}"


def answer_of(verdict: Verdict, sought: Outcome) -> str:
    """Answer of a verdict to `git bisect`: UNDECIDED is skipped, and so is NOT_COMPARABLE.

    Where the bad end is NOT_COMPARABLE itself (`sought`), that is the difference which is searched for.
    """
    if verdict.outcome in PASSED:
        return GOOD
    is_sought = verdict.outcome is Outcome.NOT_COMPARABLE and verdict.outcome is sought and not unfit(verdict)
    return BAD if verdict.outcome is Outcome.DIFFERENT or is_sought else SKIP
