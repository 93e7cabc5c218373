"""Runs of another version of the code: its own `run.py` composes and trains, under this interpreter, in a store of its
own.

A request stays words, read with the version's own schema, `conf/` and rules. Across versions only `run.py`,
`launch.root`, `launch.dry_run` and the run directory are shared.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.bisect.revisions import WORKTREE, Repository, Version
from harness.config.errors import refuse
from harness.config.words import quote
from harness.launch.local.pool import listening
from harness.launch.local.ranks import log_tail
from harness.store import checksums, provenance, status
from harness.store.files import Lock
from harness.store.provenance import OF_ANOTHER, python_path
from harness.store.rank_place import FOREIGN
from harness.store.rundir import CONFIG
from harness.store.status import State

TICK_S = 0.2
OURS = {
    "launch.root": "trials lie in stores of their own, under --root",
    "launch.dry_run": "a verdict needs runs",
    "launch.inline": "trials run in processes of their own",
}


def check_words(words: Sequence[str]) -> None:
    """Raises `BadRequest`: a setting of `OURS` in a request."""
    for word in words:
        if why := OURS.get(word.partition("=")[0]):
            raise refuse(word, why, fix="leave it out")


class Snapshot:
    def __init__(self, repository: Repository, version: Version) -> None:
        """Write the version's files, unless present.

        Raises `BadRequest`: it has no `run.py`, or Python would import another copy of the package.
        """
        self.version = version
        self._folder = repository.folder(version)
        self._files = repository.files(version)
        if not (self._files / "run.py").is_file():
            fix = "git log --diff-filter=A --format=%h -- run.py names the first commit that has it"
            raise refuse(version.label, "has no run.py: it is older than this command line", fix=fix)
        self._check_import()

    def check(self, words: Sequence[str]) -> None:
        """Compose the request, and start nothing. Raises `BadRequest` with the version's message."""
        if self.done(words) is not None:
            return
        log = self._store(words).with_suffix(".check.log")
        if self._call([*words, "launch.dry_run=true"], self._store(words), log):
            raise self._refusal(log)

    def run(self, words: Sequence[str]) -> Path:
        """Run directory of the request, run if not done; its state tells the outcome.

        Raises `BadRequest`: it does not compose, or made no run; with the version's message. `KeyboardInterrupt` stops
        the run too; a repeated call resumes it.
        """
        with self._alone(words):
            if (done := self.done(words)) is not None:
                return done
            log = self.log(words)
            code = self._call(words, self._store(words), log)
            run = self._found(words)
            if code == 2 or run is None:
                raise self._refusal(log)
            self._sign(run)
            return run

    @contextmanager
    def _alone(self, words: Sequence[str]) -> Iterator[None]:
        path = self._store(words).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock.acquire(path, timeout_s=math.inf)
        assert lock is not None
        with lock:
            yield

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
            announced = False
            while _is_running(started):
                if asked.stops and not announced:
                    announced = True
                    started.send_signal(asked.stops[0])
        if announced:
            raise KeyboardInterrupt
        return started.returncode

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in (*FOREIGN, *OF_ANOTHER)}
        # The store may lie inside a repository: its commit is not the version's.
        return kept | {"PYTHONPATH": python_path(kept, self._files), "GIT_CEILING_DIRECTORIES": str(self._folder)}

    def _check_import(self) -> None:
        command = [sys.executable, "-P", "-c", "import harness; print(list(harness.__path__)[0])"]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=False)
        found = done.stdout.strip()
        if not found or Path(found).resolve() != (self._files / "harness").resolve():
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            problem = f"is not what Python imports from its own files: it finds {found or last}"
            raise refuse(self.version.label, problem, fix="leave -I, -E and import hooks out of the environment")

    def _refusal(self, log: Path) -> Exception:
        return refuse(self.version.label, f"cannot do what is asked. {_own_words(log)}")

    def _sign(self, run: Path) -> None:
        if not provenance.read(run).get("git"):
            held = {"sha": self.version.commit, "branch": "", "dirty": self.version.asked == WORKTREE, "changed": []}
            provenance.merge(run, {"git": held})
            checksums.renew(run)


def _own_words(log: Path) -> str:
    tail = log_tail(log)
    if (at := max(tail.rfind("bad request"), tail.rfind("refused:\n"))) >= 0:
        return f"Its own words:\n{tail[at:]}"
    return f"It ends with: {tail.splitlines()[-1] if tail else 'nothing'} ({log})"


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(TICK_S)
    except subprocess.TimeoutExpired:
        return True
    return False
