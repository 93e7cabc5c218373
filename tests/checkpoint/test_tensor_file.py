"""Headers that do not say what is in their file: hand-made, or put right by a tool that kept the sums."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from harness.checkpoint import storage, tensor_file
from harness.checkpoint.manifest import Chunk, Damaged
from harness.store import tensor_header
from tests.support.mutants import finds

Table = dict[str, Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Six numbers, of which `a` has four and `b` two."""
    tensor_file.write(tmp_path / "two.safetensors", {"a": torch.arange(4.0), "b": torch.tensor([4.0, 5.0])})
    return tmp_path / "two.safetensors"


def edited(path: Path, edit: Callable[[Table], object]) -> Path:
    """The file under a changed header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    table = edit(table) or table
    text = json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return path


EDITS: dict[str, Callable[[Table], object]] = {
    "over another": lambda table: table["b"].update(shape=[4], data_offsets=[8, 24]),
    "a hole": lambda table: table["b"].update(shape=[1], data_offsets=[20, 24]),
    "bytes of nobody": lambda table: table.pop("b") and None,
    "beyond the end": lambda table: table["b"].update(shape=[4], data_offsets=[16, 32]),
    "another shape": lambda table: table["a"].update(shape=[3]),
    "another width": lambda table: table["a"].update(dtype="F64"),
    "no dtype": lambda table: table["a"].update(dtype="F33"),
    "no offsets": lambda table: table["a"].pop("data_offsets") and None,
    "a list": lambda table: [table],
}


@pytest.mark.parametrize("how", EDITS)
def test_a_header_that_does_not_fit_is_damage(how: str, file: Path) -> None:
    with pytest.raises(ValueError, match="damaged header"):
        tensor_header.read(edited(file, EDITS[how]))


@pytest.mark.parametrize("length", [2**62, 2**63 + 1, 10_000])
def test_a_header_longer_than_its_file_is_not_read(length: int, file: Path) -> None:
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(ValueError, match=f"a header of {length} bytes"):
        tensor_header.read(file)


def chunk_of(file: Path, name: str, *sizes: int) -> torch.Tensor:
    with safe_open(file, framework="pt") as opened:
        return storage.held_chunk(opened, Chunk((0,), sizes, file.name, name), torch.float32).clone()


def test_a_file_of_another_dtype_than_its_manifest_says_is_damage(file: Path) -> None:
    """Cast without a word, int32 bits would be weights."""
    edited(file, lambda table: table["a"].update(dtype="I32"))
    with pytest.raises(Damaged, match=r"should be torch.float32 \[4\] and is torch.int32 \[4\]"):
        chunk_of(file, "a", 4)
    with pytest.raises(Damaged, match=r"should be torch.float32 \[3\] and is torch.float32 \[2\]"):
        chunk_of(file, "b", 3)
    with pytest.raises(Damaged, match=r"c should be .* and is none"):
        chunk_of(file, "c", 2)
    assert chunk_of(file, "b", 2).tolist() == [4.0, 5.0]


test_mutants_are_found = finds(
    "checkpoint files",
    test_a_header_that_does_not_fit_is_damage="""
        overlaps: Two tensors share bytes
            store.tensor_header._misplaced: begin != ends => False
            (how="over another")
    """,
    test_a_file_of_another_dtype_than_its_manifest_says_is_damage="""
        dtypes: What a file holds is cast to what the manifest says
            checkpoint.storage.held_chunk: (tuple(held.shape), held.dtype) != (chunk.sizes, dtype)
                => tuple(held.shape) != chunk.sizes
    """,
)
