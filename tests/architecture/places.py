"""A copy of what is shipped, to which a test adds something at the places it names, and runs it from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from filecmp import cmp
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("run.py", "conf", "sweeps", "harness", "hydra_plugins")
"""Everything a run needs; no test and no page."""


class Copy:
    """The sources below a folder, as they are committed until `insert` changes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in SHIPPED:
            copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copied(ROOT / name, folder / name)

    def insert(self, file: str, text: str, before: str) -> None:
        """Write text into a file, before the only place that says `before`; without one, as a new file."""
        path = self.folder / file
        if not before:
            assert not path.exists()
            path.write_text(text)
            return
        source = path.read_text()
        assert source.count(before) == 1, (file, before)
        path.write_text(source.replace(before, text + before))

    def changed(self) -> list[str]:
        paths = [path for suffix in ("py", "yaml") for path in self.folder.rglob(f"*.{suffix}")]
        files = sorted(path.relative_to(self.folder).as_posix() for path in paths)
        shipped = [file for file in files if file.partition("/")[0] in SHIPPED]
        return [
            file for file in shipped if not (ROOT / file).exists() or not cmp(ROOT / file, self.folder / file, False)
        ]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=240
        )


SMALLEST = (
    "model.dim=32", "model.num_layers=1", "model.ffn_dim=48", "model.vocab_size=64", "model.max_seq_len=32",
    "data=synthetic", "data.seq_len=16", "train.global_batch_size=4", "train.microbatch_size=4", "debug=inline",
    "ckpt=none", "train.warmup_steps=0", "launch.root=runs", "measure.capture_steps=[]",
)  # fmt: skip
"""A run of a second: one rank, inside the process that composes it."""
