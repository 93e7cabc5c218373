"""A process that is asked to look at requests, or refuses them.

Each request begins in an empty folder; `torch` is replaced by a package that leaves a mark and fails when imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What a request did."""

    code: int
    out: str
    err: str
    torch_imported: bool
    left_behind: tuple[str, ...]
    """Files below the folder it was started in."""


def poison_torch(folder: Path) -> None:
    """A package `torch` that leaves a mark where it is imported, and fails."""
    package = folder / "poison" / "torch"
    package.mkdir(parents=True)
    mark = folder / "torch-was-imported"
    (package / "__init__.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nraise ImportError('torch on the front end')\n"
    )


class Asker:
    """A process that has imported `run.py`, and forks one for each request: what is asked of it costs no imports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKING, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(folder),
            text=True,
        )

    def ask(self, words: Sequence[str]) -> Outcome:
        """Ask in an empty working folder. Args: words: of the request, `{tmp}` for the asker's folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        mark = self._folder / "torch-was-imported"
        mark.unlink(missing_ok=True)
        told = self._folder / "out", self._folder / "err"
        with tempfile.TemporaryDirectory() as cwd:
            asked = [word.replace("{tmp}", str(self._folder)) for word in words]
            self._process.stdin.write(json.dumps([cwd, *map(str, told), asked]) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            left = tuple(sorted(str(p.relative_to(cwd)) for p in Path(cwd).rglob("*")))
        return Outcome(code, *(each.read_text() for each in told), mark.exists(), left)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


FORKING = """
import json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
import run
for line in sys.stdin:
    folder, out, err, words = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    for number, path in enumerate((out, err), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv[:] = [os.path.join(sys.argv[1], "run.py"), *words]
    try:
        code = run.main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code or 0)
"""


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "sbatch").exists())
    return os.environ | {"PYTHONPATH": str(folder / "poison"), "PATH": path}
