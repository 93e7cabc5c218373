"""Comparison of two versions of the code: each composes and trains the request from its own files, under this Python.

[Note: Nothing of the user's is touched] Files are written through a separate index. The user's index, branches, stashes
and files do not change; contents only in the working tree become loose objects, as by `git stash create`.

`<root>/.code/<tree>/files` is the version, named by its git tree, so that equal versions are one.
`<root>/.code/<tree>/runs/<words>` is a store for each request: runs of two versions may have one name.

A request stays words, read with the version's own schema, `conf/` and rules. Across versions only `run.py`,
`launch.root`, `launch.dry_run` and the run directory are shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.config.errors import BadRequest, refuse
from harness.config.words import quote
from harness.launch.local.ranks import log_tail
from harness.launch.local.run import listening
from harness.parity import Verdict
from harness.parity.compare import compare_versions
from harness.parity.tiers.comparable import REPEATABLE
from harness.store import checksums, commands, provenance, status
from harness.store.errors import StoreError
from harness.store.files import Lock
from harness.store.provenance import OF_ANOTHER, PACKAGE, python_path
from harness.store.rank_place import FOREIGN
from harness.store.rundir import CONFIG
from harness.store.status import State

WORKTREE = "WORKTREE"
FOLDER = ".code"
SHORT = 7
TICK_S = 0.2


@dataclass(frozen=True)
class Request:
    """Overrides of both runs, and their store. bitwise: any unequal bit is a difference."""

    words: tuple[str, ...] = ()
    root: str = "runs"
    bitwise: bool = False

    def check(self) -> None:
        """Raises `BadRequest`: bits are demanded where sums have no order."""
        modes = [word.partition("=")[2] for word in self.words if word.startswith(("numerics=", "numerics.mode="))]
        if self.bitwise and not set(modes) & set(REPEATABLE):
            problem = "demands bits, and numerics=fast promises no order of sums: two runs of one code may differ"
            raise refuse("--bitwise", problem, choices=f"with numerics={' or numerics='.join(REPEATABLE)}")


def compare_code(request: Request, old: str, new: str, tell: Callable[[str], None]) -> Verdict:
    """Verdict on the run of `new` against that of `old`; runs are made once and reused.

    Raises `BadRequest` (no such revision, or the request does not compose; nothing was run) and `KeyboardInterrupt`.
    """
    request.check()
    repository = Repository.own(request.root)
    control, arm = (repository.version(revision) for revision in (old, new))
    if control.tree == arm.tree:
        problem = f"and {control.label} hold the same files: there is one version of the code, and nothing was run"
        raise refuse(arm.label, problem, fix="name another revision")
    snapshots = [Snapshot(repository, version) for version in (control, arm)]
    for snapshot in snapshots:
        snapshot.check(request.words)
    runs = []
    for snapshot in snapshots:
        before = snapshot.done(request.words) is not None
        state = "was run before" if before else f"training; progress is in {snapshot.log(request.words)}"
        tell(f"{snapshot.version.label}: {state}")
        runs.append(snapshot.run(request.words))
    verdict = compare_versions(runs[1], runs[0], (arm.label, control.label), bitwise=request.bitwise)
    words = ["compare", "--code", control.word, arm.word, *request.words, *["--bitwise"] * request.bitwise]
    again = f"{commands.verb(shlex.join(words), request.root)} --json"
    looks = tuple(each for each in verdict.commands if " --tensor " in each or " diff " in each)
    return replace(verdict, commands=looks or (again,))


class GitError(StoreError):
    """Message of git."""


@dataclass(frozen=True)
class Version:
    """One version of the code.

    asked: revision as typed. commit: 40 digits; the base of WORKTREE. tree: git tree.
    """

    asked: str
    commit: str
    tree: str

    @property
    def label(self) -> str:
        """`main (1a2b3c4)`, or the commit alone."""
        if self.asked == WORKTREE:
            return f"{WORKTREE} (on {self.commit[:SHORT]})"
        return self.word if self.commit.startswith(self.asked) else f"{self.asked} ({self.commit[:SHORT]})"

    @property
    def word(self) -> str:
        return WORKTREE if self.asked == WORKTREE else self.commit[:SHORT]


@dataclass(frozen=True)
class Repository:
    """top: the checkout. cache: `<root>/.code`, made at the first write."""

    top: Path
    cache: Path

    @classmethod
    def own(cls, root: Path | str) -> Repository:
        """Repository of the running code, with versions cached under the store's `root`.

        Raises `BadRequest`: none (a wheel), or Python could not import a version from there.
        """
        home = PACKAGE.parent
        cache = Path(root).expanduser().absolute() / FOLDER
        try:
            top, why = cls(home, cache)._git("rev-parse", "--show-toplevel").strip(), ""
        except GitError as error:
            top, why = "", f" ({error})"
        if not top or Path(top).resolve() != home.resolve():
            fix = "git clone the project, pip install -e . there, and ask from inside the clone"
            raise refuse(f"the code in {home}", f"is no git checkout of its own: it has one version{why}", fix=fix)
        return cls(home, cache)

    def version(self, revision: str) -> Version:
        """Raises `BadRequest`: git knows no such commit."""
        if revision == WORKTREE:
            return Version(revision, self._git("rev-parse", "HEAD").strip(), self._worktree())
        try:
            commit = self._git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").strip()
        except GitError as error:
            choices = f"a commit, a branch or a tag; {WORKTREE} for the files as they are"
            raise refuse(repr(revision), f"is no commit of this repository ({error})", choices=choices) from error
        return Version(revision, commit, self._git("rev-parse", f"{commit}^{{tree}}").strip())

    def _worktree(self) -> str:
        inside = self.cache.parent.is_relative_to(self.top) and self.cache.parent != self.top
        hidden = [f"--exclude=/{self.cache.parent.relative_to(self.top)}/"] if inside else []
        with self._own_index() as index:
            self._git("read-tree", "HEAD", variables=index)
            self._git("add", "--update", variables=index)
            new = self._git("ls-files", "-z", "--others", "--exclude-standard", *hidden, variables=index)
            self._git("update-index", "-z", "--add", "--stdin", variables=index, given=new)
            return self._git("write-tree", variables=index).strip()

    def files(self, version: Version) -> Path:
        """Folder of a version's files, created atomically and reused.

        Raises `BadRequest` (git cannot write them) and `OSError` (the store cannot be written).
        """
        target = self.cache / version.tree[:16] / "files"
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".files.{secrets.token_hex(6)}.tmp")
        try:
            draft.mkdir()
            with self._own_index() as index:
                self._git("--work-tree", str(draft), "checkout", version.tree, "--", ".", variables=index)
            os.rename(draft, target)
        except OSError:
            if not target.is_dir():  # else another request was faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target

    @contextlib.contextmanager
    def _own_index(self) -> Iterator[dict[str, str]]:
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache, prefix=".index.") as folder:
            yield {"GIT_INDEX_FILE": str(Path(folder) / "index")}

    def _git(self, *arguments: str, variables: Mapping[str, str] | None = None, given: str = "") -> str:
        outer = {name: value for name, value in os.environ.items() if name not in OF_ANOTHER}
        command = ["git", "--no-optional-locks", "-C", str(self.top), *arguments]
        environment, sent = outer | {"LC_ALL": "C"} | dict(variables or {}), given.encode(errors="surrogateescape")
        try:
            done = subprocess.run(command, env=environment, input=sent, capture_output=True, check=False)
        except OSError as error:
            raise GitError(f"git cannot be started: {error.strerror}") from error
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise GitError(lines[-1] if lines else f"git {arguments[0]} ended with {done.returncode}")
        return done.stdout.decode(errors="surrogateescape")


class Snapshot:
    def __init__(self, repository: Repository, version: Version) -> None:
        """Write the version's files, unless present. Raises `BadRequest`: Python would import another copy of them."""
        self.version = version
        self._files = repository.files(version)
        self._folder = self._files.parent
        command = [sys.executable, "-P", "-c", "import harness; print(list(harness.__path__)[0])"]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=False)
        found = done.stdout.strip()
        if not found or Path(found).resolve() != (self._files / "harness").resolve():
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            problem = f"is not what Python imports from its own files: it finds {found or last}"
            raise refuse(version.label, problem, fix="leave -I, -E and import hooks out of the environment")

    def check(self, words: Sequence[str]) -> None:
        """Compose the request, and start nothing. Raises `BadRequest` with the version's message."""
        log = self._store(words).with_suffix(".check.log")
        if self.done(words) is None and self._call([*words, "launch.dry_run=true"], self._store(words), log):
            raise self._refusal(log)

    def run(self, words: Sequence[str]) -> Path:
        """Run directory of the request, run if not done; its state tells the outcome.

        Raises `BadRequest`: it does not compose, or made no run; with the version's message. `KeyboardInterrupt` stops
        the run too; a repeated call resumes it.
        """
        store, log = self._store(words), self.log(words)
        store.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock.acquire(store.with_suffix(".lock"), timeout_s=math.inf)
        assert lock is not None
        with lock:
            if (done := self.done(words)) is not None:
                return done
            if self._call(words, store, log) == 2 or (run := self._found(words)) is None:
                raise self._refusal(log)
            self._sign(run)
            return run

    def log(self, words: Sequence[str]) -> Path:
        return self._store(words).with_suffix(".log")

    def _store(self, words: Sequence[str]) -> Path:
        return self._folder / "runs" / hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]

    def _found(self, words: Sequence[str]) -> Path | None:
        return next((path.parent for path in sorted(self._store(words).glob(f"*/*/{CONFIG}"))), None)

    def done(self, words: Sequence[str]) -> Path | None:
        run = self._found(words)
        state = None if run is None else status.effective(run)
        return run if state is not None and state.state is State.done else None

    def _call(self, words: Sequence[str], root: Path, log: Path) -> int:
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(self._files / "run.py"), *words, f"launch.root={quote(str(root))}"]
        with listening() as asked, log.open("wb") as output:
            started = subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            while started.poll() is None and not asked:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(TICK_S)
            if asked:
                started.send_signal(asked[0])
                started.wait()
                raise KeyboardInterrupt
        return started.returncode

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in (*FOREIGN, *OF_ANOTHER)}
        # The store may lie inside a repository: its commit is not the version's.
        return kept | {"PYTHONPATH": python_path(kept, self._files), "GIT_CEILING_DIRECTORIES": str(self._folder)}

    def _refusal(self, log: Path) -> BadRequest:
        return refuse(self.version.label, f"cannot do what is asked. {log} ends with:\n{log_tail(log)}")

    def _sign(self, run: Path) -> None:
        if not provenance.read(run).get("git"):
            held = {"sha": self.version.commit, "dirty": self.version.asked == WORKTREE}
            provenance.merge(run, {"git": held})
            checksums.renew(run)
