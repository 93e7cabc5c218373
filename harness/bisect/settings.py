"""Smallest set of settings that makes two runs differ: delta debugging over their configurations.

Every trial is the good run's frozen cell with some of the bad run's settings, in the study `bisect`, against the good
cell, which is run there too. So old or distant runs serve as descriptions alone.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from harness.bisect.snapshot import check_words
from harness.bisect.trials import ROOM, Answer, Request, answer_of, brief, check_ends, smallest
from harness.config.compose import Cell, freeze
from harness.config.doc import as_typed
from harness.config.errors import BadRequest, refuse
from harness.config.words import as_word, in_store
from harness.launch.room import NoRoom, check_room
from harness.launch.terminal import Terminal
from harness.parity import Verdict, compare
from harness.parity.record import load
from harness.parity.versions import own_fault
from harness.store import commands
from harness.store.errors import EXIT_BUSY, Busy
from harness.store.identity import EXCLUDED
from harness.store.redaction import redacted
from harness.store.rundir import RunDir, Store, flatten
from harness.store.screen import counted
from harness.study.replay import replay

STUDY = "bisect"
Tell = Callable[[str], None]
Frozen = dict[str, Any]

OURS = {
    "wait": True,
    "inline": False,
    "dry_run": False,
    "rerun": "stale",
    "preempt_at": 0,
}


@dataclass(frozen=True)
class Responsible:
    settings: tuple[tuple[str, Any, Any], ...]
    """Name, good value and bad value of each; a 1-minimal set."""
    of: int
    verdict: Verdict
    next: tuple[str, ...]

    @property
    def sentence(self) -> str:
        changes = ", ".join(f"{key}={as_typed(bad)} for {as_typed(good)}" for key, good, bad in self.settings)
        what = f"{changes} is the smallest difference" if self.of > 1 else f"{changes} is the only difference"
        return f"{what}{f' of {self.of}' * (self.of > 1)} that flips the verdict: {self.verdict.sentence}"


class KeySearch:
    def __init__(self, request: Request, good: str, bad: str, tell: Tell) -> None:
        """request: overrides over both cells, and the store. good, bad: a path, a prefix of a signature or `@last`.
        tell: called with a line a trial.

        Raises `StoreError`: there is no such run. `BadRequest`: their cells do not compose any more, or do not differ.
        """
        check_words(request.words)
        self._store = Store(request.root)
        self._good_run, self._bad_run = self._store.find(good), self._store.find(bad)
        self._good, self._bad = (self._frozen(run, request) for run in (self._good_run, self._bad_run))
        self._request, self._tell = request, tell
        left, right = flatten(self._good), flatten(self._bad)
        self._values = {key: (left.get(key), right[key]) for key in sorted(right) if _counts(key, left, right)}
        self._verdicts: dict[tuple[str, ...], Verdict] = {}
        self._number = itertools.count(1)
        if not self._values:
            fix = f"{commands.verb('diff')} names other differences; compare --code tries versions of the code"
            raise refuse(f"bisect --keys {good} {bad}", "are one configuration: no setting of a run differs", fix=fix)

    def _frozen(self, run: RunDir, request: Request) -> Frozen:
        found = deepcopy(replay(run.config(), run.overrides(), request.words).config)
        found["study"]["name"] = STUDY
        found["launch"] |= OURS | {"root": str(self._store.root)}
        return found

    def find(self) -> Responsible:
        """Search; a repeated call reuses finished runs.

        Raises `BadRequest`: the two cells cannot be run, or do not differ. `NoRoom`: the disk is too full.
        `KeyboardInterrupt`.
        """
        names = tuple(self._values)
        control = self._cell(())
        self._check_room([control, self._cell(names)], ceil(log2(len(names))))
        self._run([control])
        if fault := own_fault(load(self._store.path_of(control))):
            fix = "name a run as GOOD whose own witnesses agree with it"
            raise refuse(
                self._good_run.name, f"is wrong by itself, so nothing can be held against it: {fault}", fix=fix
            )
        differing = f"{counted(len(names), 'setting')}: {', '.join(names)}"
        self._tell(f"{self._good_run.name} and {self._bad_run.name} differ in {differing}")
        everything = self._judge(names)
        bad_end = "the good run with every setting of the bad one"
        check_ends(everything, "the good run", bad_end, undecided=self._request.undecided)
        self._tell(f"  all {len(names)}: {brief(everything)}")
        self._sought = everything.outcome
        found = smallest(names, self._try)
        verdict = self._verdicts[found]
        settings = tuple((key, *self._values[key]) for key in found)
        return Responsible(settings, len(names), verdict, self._next(found, verdict))

    def _try(self, names: tuple[str, ...]) -> Answer:
        head = f"  {next(self._number)}  {', '.join(self._words(names))}"
        try:
            verdict = self._judge(names)
        except NoRoom:
            raise
        except BadRequest as error:
            self._tell(f"{head}: skipped, {redacted(' '.join(str(error.violations[0]).split()))}")
            return Answer.unresolved
        answer = answer_of(verdict, self._sought, undecided=self._request.undecided)
        self._tell(f"{head}: {'skipped, ' * (answer is Answer.unresolved)}{brief(verdict)}")
        return answer

    def _judge(self, names: tuple[str, ...]) -> Verdict:
        control, arm = self._cell(()), self._cell(names)
        self._run([arm])
        verdict = compare(self._store.path_of(arm), self._store.path_of(control))
        self._verdicts[names] = verdict
        return verdict

    def _cell(self, names: tuple[str, ...]) -> Cell:
        """Raises `BadRequest`: the rules refuse the good cell with these settings changed."""
        mixed = deepcopy(self._good)
        for name in names:
            *path, last = name.split(".")
            group = mixed
            for key in path:
                group = group[key]
            group[last] = self._values[name][1]
        # Not held against the request: a setting that has no effect without another is a trial like any other.
        return freeze(mixed, (), earlier=self._words(names))

    def _run(self, cells: Sequence[Cell]) -> None:
        from harness.launch.submit import submit  # late: a refusal needs none of it

        self._check_room(cells)
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            code = submit(cells, Terminal(nowhere))
        if code == 130:
            raise KeyboardInterrupt
        if code == EXIT_BUSY:
            raise Busy("another process runs one of the trials; ask again when it is done")
        if code == 75:
            raise refuse(f"--keys {STUDY}", "a trial was stopped", fix="ask again: it goes on from there")

    def _check_room(self, cells: Sequence[Cell], further: int = 0) -> None:
        check_room(cells, further=further, subject=f"--root {self._store.root}", fix=f"{ROOM}; GOOD and BAD as paths")

    def _words(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name}={as_word(self._values[name][1])}" for name in names)

    def _next(self, found: tuple[str, ...], verdict: Verdict) -> tuple[str, ...]:
        again = shlex.join(["--from", str(self._good_run.path), *self._request.words, *self._words(found)])
        return (commands.request(" ".join([again, *in_store(self._store.root)])), *verdict.commands[:1])


def _counts(key: str, left: Frozen, right: Frozen) -> bool:
    return key.split(".")[0] not in EXCLUDED and left.get(key) != right[key]
