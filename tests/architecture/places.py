"""A copy of what is shipped, to which a test adds something at the places it names, and runs it from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("run.py", "conf", "sweeps", "harness", "hydra_plugins")
"""Everything a run needs; no test and no page."""


class Copy:
    """The sources below a folder, as they are committed until `insert` or `add` changes them.

    places: the file of every insertion, in order; one that is changed twice stands there twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: list[str] = []
        for name in SHIPPED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)

    def insert(self, file: str, text: str, before: str = "") -> None:
        """Write text into a file, before the only place that says `before`; without one, at its end."""
        path = self.folder / file
        source = path.read_text(encoding="utf-8")
        assert source.count(before) == 1 or not before, (file, before)
        at = source.index(before) if before else len(source)
        path.write_text(source[:at] + text + source[at:], encoding="utf-8")
        self.places.append(file)

    def add(self, file: str, text: str) -> None:
        """Write a file that is not there yet: one place, as an insertion is."""
        with (self.folder / file).open("x", encoding="utf-8") as out:
            out.write(text)
        self.places.append(file)

    def changed(self) -> list[str]:
        """Files that are not as they were copied."""
        files = (path for path in self.folder.rglob("*") if path.is_file() and path.suffix in (".py", ".yaml"))
        names = (path.relative_to(self.folder).as_posix() for path in files)
        shipped = (name for name in names if name.partition("/")[0] in SHIPPED)
        return sorted(name for name in shipped if not _same(ROOT / name, self.folder / name))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python on the copy, from the copy; what it prints comes back."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=240
        )


def _same(old: Path, new: Path) -> bool:
    return old.exists() and old.read_bytes() == new.read_bytes()


SMALLEST = (
    "model.dim=32", "model.num_layers=1", "model.ffn_dim=48", "model.vocab_size=64", "model.max_seq_len=32",
    "data=synthetic", "data.seq_len=16", "train.global_batch_size=4", "train.microbatch_size=4", "debug=inline",
    "ckpt=none", "train.warmup_steps=0", "launch.root=runs", "measure.capture_steps=[]",
)  # fmt: skip
"""A run of a second: one rank, inside the process that composes it."""
