"""The stream on disk: written, cut back, read, and refused where it is damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from harness.store import check_stream
from harness.store.check_stream import DENSE, CheckedTensor, StreamWriter, numbered, step_columns, tensor_columns
from harness.store.errors import StoreError
from tests.support.mutants import finds

TENSORS = [CheckedTensor("a", (3, 2)), CheckedTensor("b", ())]
M = 4
AFTER = numbered("after", M)


def write(run_dir: Path, steps: range, *, every: int = 1, done: int = 0) -> None:
    writer = StreamWriter(run_dir, TENSORS, M, every, done)
    for step in steps:
        row = [float(step)] * len(step_columns(M))
        writer.write(step, row, np.full((2, len(tensor_columns(M))), float(step)))
    writer.sync()
    writer.close()


def read(run_dir: Path) -> check_stream.Stream:
    found = check_stream.read(run_dir)
    assert found is not None
    return found


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    found = read(tmp_path)
    assert found.tensors == tuple(TENSORS)
    assert found.column("rule").tolist() == [1, 2, 3, 4, 5, 6, 7]
    steps, rows = found.kept
    assert steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert rows.shape == (7, 2, len(tensor_columns(M)))
    assert rows[4, 1, 0] == 5.0
    assert check_stream.read(tmp_path / "nowhere") is None


def test_a_resumed_run_goes_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    with open(tmp_path / "step_checks" / "steps.f64", "ab") as file:
        file.write(b"torn")
    write(tmp_path, range(5, 7), done=4)
    found = read(tmp_path)
    assert found.column("sum").tolist() == [1, 2, 3, 4, 5, 6]
    assert found.kept[0].tolist() == [1, 2, 3, 4, 5, 6]


def test_steps_that_nobody_saw_are_no_numbers(tmp_path: Path) -> None:
    write(tmp_path, range(4, 6), done=3)
    found = read(tmp_path)
    assert [math.isnan(value) for value in found.column("sum")] == [True, True, True, False, False]
    assert check_stream.last(tmp_path, 3, ["a", "b"], AFTER) is None
    there = check_stream.last(tmp_path, 5, ["a", "b"], AFTER)
    assert there is not None
    assert there.tolist() == [[5.0] * M] * 2
    assert check_stream.last(tmp_path, 5, ["a", "c"], AFTER) is None


def test_tensors_are_kept_as_often_as_fits(tmp_path: Path) -> None:
    every = 100
    write(tmp_path, range(1, DENSE + 350), every=every)
    steps, rows = read(tmp_path).kept
    assert steps.tolist() == [*range(1, DENSE + 1), 600, 700, 800]
    assert rows[-1, 0, 0] == 800.0
    row = 2 * len(tensor_columns(M)) * 8
    assert check_stream.cadence(100_000, 2, M, row * 100_000) == 1
    assert check_stream.cadence(100_000, 2, M, row * (DENSE + 100)) == math.ceil((100_000 - DENSE) / 100)
    assert check_stream.cadence(400, 2, M, 1) == 1


@pytest.mark.parametrize(("version", "made"), [(1, "older"), (99, "newer")])
def test_another_format_is_no_damage(tmp_path: Path, version: int, made: str) -> None:
    """It was `damaged: StoreError('... has version 1 ...')`; its shape is another one too, and is not spoken of."""
    (tmp_path / "step_checks").mkdir()
    facts = {"version": version, "modules": 3}
    for said, read in ((facts, check_stream.read), ({"forward": facts}, check_stream.read_forward)):
        (tmp_path / "step_checks" / "stream.json").write_text(json.dumps(said))
        with pytest.raises(StoreError, match=rf"stream.json has format {version}, .*: {made} code made") as caught:
            read(tmp_path)
        assert "damaged" not in str(caught.value)


ENDLESS = '{"version": 4, "tensors": [], "sketches": 4, "every": Infinity}'
UNSAID = '{"tensors": [], "sketches": 4, "every": 1}'


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"version": 2}', '{"version": 4}', '{"version": 4, "tensors": 3}', ENDLESS, UNSAID]
)
def test_a_damaged_description_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, range(1, 3))
    (tmp_path / "step_checks" / "stream.json").write_text(text)
    with pytest.raises(StoreError, match="stream"):
        check_stream.read(tmp_path)


test_a_mutant_is_found = finds(
    "The store",
    test_another_format_is_no_damage="""
        format after shape: A run of another version of the code is called damaged
            store.reading.of_format: facts["version"] != version => False
            (version=99, made="newer")
    """,
    test_a_damaged_description_is_named="""
        a stream of no version: A stream that does not say its format is read as one of today's
            store.check_stream.read: facts["version"] != => facts.get("version", VERSION) !=
            (text=UNSAID)
    """,
)
