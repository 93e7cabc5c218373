"""Part of a run that one rank has seen, as files of its own; `harness.capture.merge` puts them together.

[Note: Parts] Ranks exchange nothing while they train: a collective of an observer could hang where ranks stop at
different steps, and would change the order of everybody's collectives. Each writes what it saw into its own folder, and
the last to end reads all of them. So a crash leaves what was seen until then.

    part.json               facts of the rank: its tensors with their places, its machine
    steps.jsonl             a line a step: losses, digests of the data, learning rate, seconds
    rows.f64                a row a step: for each tensor `WIDTHS`; not a number where nothing was seen
    step-000001.safetensors of chosen steps this rank's pieces: gradient/ local/ before/ moment/ after/
    final.safetensors       its pieces of the last weights
    end.json                steps, why it ended, and digests of the weights
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from harness.probe.step_checks.sketch import SKETCHES
from harness.store.files import private_folder, write_json
from harness.store.metrics import encode

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


class Part:
    """Files of one rank. Raises `OSError`: the disk is full, or the folder cannot be made."""

    def __init__(self, path: Path, rank: int) -> None:
        self.folder = folder_of(path, rank)
        private_folder(self.folder.parent)
        private_folder(self.folder)
        self._lines = open(self.folder / "steps.jsonl", "ab", buffering=0)  # noqa: SIM115 - kept open over the run
        self._rows = open(self.folder / "rows.f64", "ab", buffering=0)  # noqa: SIM115

    def facts(self, facts: Mapping[str, Any]) -> None:
        write_json(self.folder / FACTS, facts)

    def step(self, line: Mapping[str, Any], rows: Tensor) -> None:
        """Append a step; a line without its row, or half of one, is left out by whoever reads."""
        self._rows.write(rows.contiguous().numpy().astype("<f8").tobytes())
        self._lines.write((encode(line) + "\n").encode())

    def tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        held = {key: each.detach().to("cpu").contiguous() for key, each in tensors.items()}
        temporary = self.folder / f"{name}.tmp"
        save_file({key: each.clone() if _is_view(each) else each for key, each in held.items()}, temporary)
        temporary.replace(self.folder / f"{name}.safetensors")

    def end(self, facts: Mapping[str, Any]) -> None:
        write_json(self.folder / END, json.loads(encode(facts)))

    def close(self) -> None:
        self._lines.close()
        self._rows.close()


def _is_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
