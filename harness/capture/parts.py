"""Part of a run that one rank has seen, as files of its own; `harness.capture.merge` puts them together.

[Note: Parts] Ranks exchange nothing while they train: a collective of an observer could hang where ranks stop at
different steps, and would change the order of everybody's collectives. Each writes what it saw into its own folder, and
the last to end reads all of them. So a crash leaves what was seen until then.

    part.json               facts of the rank: its tensors with their places and first digests, its machine
    steps.jsonl             a line a step: losses, digests of the data, learning rate, seconds
    rows.f64                a row a step that was looked at: of each tensor `WIDTHS`, NaN where nothing was seen
    step-000001.safetensors of chosen steps this rank's pieces: gradient/ local/ before/ moment/ after/
    end.json                why it ended early, if it did, and digests of the last weights
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from harness.probe.step_checks.sketch import SKETCHES
from harness.store.files import private_folder, write_json
from harness.store.metrics import encode
from harness.store.reading import read_json

FOLDER = ".parts"
END = "end.json"
FACTS = "part.json"


WIDTHS = {
    **dict.fromkeys(("local", "reduced", "begin", "after"), SKETCHES),
    **dict.fromkeys(("local_squares", "reduced_squares", "after_squares"), 1),
}
"""Columns of a tensor: sketches, and squares of each local gradient, of reduced ones and of weights."""


def folder_of(path: Path, rank: int) -> Path:
    return path / FOLDER / f"rank-{rank:05d}"


def captures_of(folder: Path) -> list[Path]:
    """Files of whole tensors, in the order of their steps."""
    return sorted(folder.glob("step-*.safetensors"), key=lambda path: int(path.stem[5:]))


class Part:
    """Files of one rank. Raises `OSError`: the disk is full, or the folder cannot be made."""

    def __init__(self, path: Path, rank: int, keep_last: int) -> None:
        """keep_last: steps whose whole tensors stay beside the first one's; 0: all."""
        self.folder, self._keep_last = folder_of(path, rank), keep_last
        private_folder(self.folder.parent)
        private_folder(self.folder)
        self._lines = open(self.folder / "steps.jsonl", "ab", buffering=0)  # noqa: SIM115 - kept open over the run
        self._rows = open(self.folder / "rows.f64", "ab", buffering=0)  # noqa: SIM115
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self._rows.tell()

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Keep facts, or hold them to those with which a run began that goes on. Raises `ValueError`: they differ."""
        before = read_json(self.folder / FACTS)
        if before is None:
            write_json(self.folder / FACTS, facts)
            return
        now = json.loads(json.dumps(facts))
        odd = [key for key in SAME if before[key] != now[key]]
        odd += ["tensors"] if _places(before) != _places(now) else []
        if odd:
            raise ValueError(f"goes on with other {', '.join(odd)} than it began with")

    def step(self, line: Mapping[str, Any], rows: Tensor | None) -> None:
        """Append a step; a line without its row, or half of one, is left out by whoever reads."""
        if rows is not None:
            self._rows.write(rows.contiguous().numpy().astype("<f8").tobytes())
        self._lines.write((encode(line) + "\n").encode())

    def tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors that nobody changes any more, beside the training. Raises what the last writing raised."""
        held = {key: each.detach().to("cpu").contiguous() for key, each in tensors.items()}
        self._await()
        self._writing = self._writer.submit(self._write, name, held)

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        temporary = self.folder / f"{name}.tmp"
        views = {key for key, each in tensors.items() if each.untyped_storage().nbytes() != each.nbytes}
        save_file({key: each.clone() if key in views else each for key, each in tensors.items()}, temporary)
        temporary.replace(self.folder / f"{name}.safetensors")
        for old in captures_of(self.folder)[1 : -self._keep_last] if self._keep_last else ():
            old.unlink()

    def _await(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def end(self, facts: Mapping[str, Any]) -> None:
        """Write the last file. Raises what writing tensors raised."""
        self._await()
        write_json(self.folder / END, json.loads(encode(facts)))


SAME = ("world_size", "versions", "machine")
"""Facts that a run has once."""


def _places(facts: Mapping[str, Any]) -> list[Any]:
    return [(each["name"], each["shape"], each["places"]) for each in facts["tensors"]]
