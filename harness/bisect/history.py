"""Comparison of two versions of the code, and the first commit between them that differs; request and verdict of a
trial."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
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
    if control.tree == arm.tree:
        return Compared(_one_version(request, repository, control, arm), Path(arm.word), Path(control.word))
    _warn_of_dirt(repository, (control, arm), tell)
    snapshots = [Snapshot(repository, version) for version in (control, arm)]
    for snapshot in snapshots:
        snapshot.check(request.words)
    runs = [_run(snapshot, request, tell) for snapshot in snapshots]
    verdict = _judge(request, arm, runs[1], control, runs[0])
    return Compared(replace(verdict, commands=_commands(request, verdict, control, arm)), runs[1], runs[0])


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


def _judge(request: Request, arm: Version, run: Path, control: Version, control_run: Path) -> Verdict:
    return compare_versions(Side(run, arm.label), Side(control_run, control.label), bitwise=request.bitwise)


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
class Skipped:
    version: Version
    why: str


@dataclass(frozen=True)
class Culprit:
    control: Version
    same: Version
    first: Version
    verdict: Verdict
    skipped: tuple[Skipped, ...]
    next: tuple[str, ...]

    @property
    def sentence(self) -> str:
        if self.skipped:
            rest = len(self.skipped)
            what = f"{self.first.title} is the first that is known to differ, after {rest} that could not be tried"
        else:
            what = f"{self.first.title} is the first that differs"
        return f"{what}: {self.verdict.sentence}"


class Bisection:
    def __init__(self, request: Request, good: str, bad: str, tell: Tell) -> None:
        """Raises `BadRequest`: a revision is unknown, or `bad` is not built on `good`.

        Args: good: revision of the control. bad: a revision built on it, or WORKTREE. tell: called with a line a trial.
        """
        request.check()
        if good == WORKTREE:
            raise refuse(
                f"bisect {WORKTREE}", "nothing is built on it yet: it can be the bad end alone", fix="a commit"
            )
        self._request, self._tell = request, tell
        self._repository = Repository.own(request.root)
        self.good, self.bad = (self._repository.version(revision) for revision in (good, bad))
        _check_history(self._repository, self.good, self.bad)
        _warn_of_dirt(self._repository, (self.good, self.bad), tell)
        self._verdicts: dict[str, Verdict] = {}
        self._reasons: dict[str, str] = {}

    def find(self) -> Culprit:
        """Bisect; a repeated call reuses finished runs.

        Raises `BadRequest`: an end cannot be run, or they do not differ. `KeyboardInterrupt`.
        """
        ends = [Snapshot(self._repository, version) for version in (self.good, self.bad)]
        for end in ends:
            end.check(self._request.words)
        self._tell(f"versions after {self.good.title}, each held against it")
        self._tell(f"how far the first one is: {ends[0].log(self._request.words)}; each version has such a file")
        self._control = ends[0].run(self._request.words)
        verdict = self._verdict(self.bad)
        check_ends(verdict, self.good.label, self.bad.label, undecided=self._request.undecided)
        self._tell(f"  the end  {self.bad.title}: {brief(verdict)}")
        same, *between, first = self._repository.bisect(self.good, self.bad, lambda version: self._try(version).value)
        skipped = tuple(Skipped(version, self._reasons[version.tree]) for version in between)
        found = Culprit(self.good, same, first, self._verdicts[first.tree], skipped, ())
        return replace(found, next=tuple(self._next(found)))

    def _verdict(self, version: Version) -> Verdict:
        run = Snapshot(self._repository, version).run(self._request.words)
        self._verdicts[version.tree] = _judge(self._request, version, run, self.good, self._control)
        return self._verdicts[version.tree]

    def _try(self, version: Version) -> Answer:
        head = f"  {version.title}"
        if version.tree == self.good.tree:
            self._tell(f"{head}: EQUAL, the same files")
            return Answer.same
        try:
            verdict = self._verdict(version)
        except BadRequest as error:
            self._reasons[version.tree] = redacted(" ".join(error.violations[0].problem.split()))
            self._tell(f"{head}: skipped, {self._reasons[version.tree]}")
            return Answer.unresolved
        answer = answer_of(verdict, self._verdicts[self.bad.tree].outcome, undecided=self._request.undecided)
        if answer is Answer.unresolved:
            self._reasons[version.tree] = verdict.sentence
        self._tell(f"{head}: {'skipped, ' * (answer is Answer.unresolved)}{brief(verdict)}")
        return answer

    def _next(self, found: Culprit) -> list[str]:
        commands = [self._request.command("compare", "--code", found.same.word, found.first.word)]
        parents = [] if found.first.asked == WORKTREE or found.skipped else self._repository.parents(found.first)
        if len(parents) > 1:  # what was merged has a history of its own
            fork = self._repository.fork(*parents[:2])
            commands += [self._request.command("bisect", fork, parents[1])] if fork else []
        return commands


def _check_history(repository: Repository, good: Version, bad: Version) -> None:
    if good.tree == bad.tree:
        fix = f"two revisions that differ; {WORKTREE} for what is not committed"
        raise refuse(f"bisect {good.label} {bad.label}", "names the same files twice", fix=fix)
    if repository.is_ancestor(good, bad):
        return
    fork = repository.fork(good.commit, bad.commit)
    if repository.is_ancestor(bad, good):
        fix = f"bisect {bad.word} {good.word}: the first version that differs from the older one, be it a repair"
    else:
        fix = f"bisect {fork} {bad.word}: from where they part" if fork else "two revisions of one history"
    raise refuse(f"bisect {good.label} {bad.label}", "the second is not built on the first", fix=fix)


class Answer(Enum):
    """Word of `git bisect` for a version."""

    same = "good"
    differs = "bad"
    unresolved = "skip"


PASSED = (Outcome.EQUAL, Outcome.EQUIVALENT)


@dataclass(frozen=True)
class Request:
    """Overrides of every trial, its store, and the criterion of a difference.

    bitwise: any unequal bit. undecided: doubtful verdicts count.
    """

    words: tuple[str, ...] = ()
    root: str = "runs"
    bitwise: bool = False
    undecided: bool = False

    def check(self) -> None:
        """Raises `BadRequest`: a setting is not the request's to choose, or bits are demanded where sums have no
        order."""
        check_words(self.words)
        modes = [word.partition("=")[2] for word in self.words if word.startswith(("numerics=", "numerics.mode="))]
        if self.bitwise and not set(modes) & set(REPEATABLE):
            problem = "demands bits, and numerics=fast promises no order of sums: two runs of one code may differ"
            raise refuse("--bitwise", problem, choices=f"with numerics={' or numerics='.join(REPEATABLE)}")

    def command(self, *before: str) -> str:
        flags = ["--bitwise"] * self.bitwise + ["--undecided"] * (self.undecided and before[0] == "bisect")
        return commands.verb(shlex.join([*before, *self.words, *flags]), self.root)


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


def answer_of(verdict: Verdict, sought: Outcome, *, undecided: bool = False) -> Answer:
    """Verdict as an answer to a search.

    DIFFERENT differs, EQUAL and EQUIVALENT are the same, UNDECIDED is neither (or differs, if `undecided`).
    NOT_COMPARABLE differs only if `sought` (the outcome at the bad end) is the same; elsewhere it is unresolved.
    """
    if verdict.outcome in PASSED:
        return Answer.same
    if verdict.outcome is Outcome.DIFFERENT or (undecided and verdict.outcome is Outcome.UNDECIDED):
        return Answer.differs
    if verdict.outcome is Outcome.NOT_COMPARABLE and verdict.outcome is sought and not unfit(verdict):
        return Answer.differs
    return Answer.unresolved


def check_ends(verdict: Verdict, good: str, bad: str, *, undecided: bool = False) -> None:
    """Raises `BadRequest`, with the verdict's sentence: the ends do not differ."""
    if why := unfit(verdict):
        raise refuse(bad, f"cannot be held against {good}: {why}", fix="both ends must run to their end on one machine")
    if answer_of(verdict, verdict.outcome, undecided=undecided) is not Answer.differs:
        fix = "a longer run, another seed, or --bitwise with numerics=deterministic may tell them apart"
        if verdict.outcome is Outcome.UNDECIDED:
            fix = "--undecided takes what is in doubt for a difference"
        raise refuse(bad, f"does not differ from {good}, so there is nothing to find. {verdict.sentence}", fix=fix)
