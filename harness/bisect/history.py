"""Comparison of two versions of the code: the request of both runs, and their verdict."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.bisect.revisions import WORKTREE, Repository, Version
from harness.bisect.snapshot import Snapshot, check_words
from harness.config.doc import as_typed, settings
from harness.config.errors import refuse
from harness.parity import Outcome, Stage, Verdict
from harness.parity.tiers.comparable import REPEATABLE
from harness.parity.versions import Side, changed_defaults, compare_versions
from harness.store import commands

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
    if "HEAD" in (control.asked, arm.asked) and repository.is_dirty():
        tell(f"note: files differ from HEAD, and HEAD is the commit; {WORKTREE} stands for the files")
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
class Request:
    """Overrides of both runs, and their store. bitwise: any unequal bit is a difference."""

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
