"""The record of steps: bits survive, kills and resumes leave whole lines."""

from __future__ import annotations

import json
import math
import os
import struct
from contextlib import closing

import pytest
from hypothesis import given, strategies as st

from harness.store import metrics
from harness.store.errors import StoreError
from harness.store.metrics import MetricsWriter, decode, encode, read_metrics, tail


@given(st.floats(allow_nan=False))
def test_floats_read_back_to_the_same_bits(value):
    assert struct.pack("d", decode(encode({"loss": value}))["loss"]) == struct.pack("d", value)


def test_non_finite_floats_are_strings_on_disk_wherever_they_stand():
    with pytest.raises(TypeError):
        encode({"loss": object()})
    line = encode({"loss": math.nan, "time": {"a_s": math.inf}, "losses": [-math.inf, 1.0], "mfu": None})
    assert json.loads(line) == {"loss": "nan", "time": {"a_s": "inf"}, "losses": ["-inf", 1.0], "mfu": None}
    back = decode(line)
    assert math.isnan(back["loss"])
    assert (back["time"]["a_s"], back["losses"][0], back["mfu"]) == (math.inf, -math.inf, None)


def write(path, steps):
    with closing(MetricsWriter(path)) as writer:
        for step in steps:
            writer.write({"step": step, "loss": step / 3})


def test_a_torn_last_line_is_left_out_and_cut_off_before_more_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    assert tail(path)[-1] == {"step": 2, "loss": 2 / 3}
    write(path, [3])
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


def test_a_torn_line_in_the_middle_is_damage_and_said_so(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(StoreError, match=r"metrics\.jsonl, line 2 is not a record"):
        list(metrics.iter_metrics(path))


def test_cut_back_keeps_bytes_up_to_the_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4])
    first = path.read_bytes().splitlines(keepends=True)[:2]
    assert metrics.cut_back(path, 2) == 2
    assert path.read_bytes() == b"".join(first)
    assert metrics.cut_back(path, 0) == 0
    assert path.read_bytes() == b""


@pytest.mark.parametrize("steps", [[1], [1, 3], []])
def test_a_checkpoint_the_record_does_not_reach_is_refused(tmp_path, steps):
    path = tmp_path / "metrics.jsonl"
    write(path, steps)
    with pytest.raises(StoreError, match=r"of the 3 steps the checkpoint stands on; remove ckpt/"):
        metrics.cut_back(path, 3)


def test_the_newest_records_of_a_long_file_are_found_without_reading_it_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        for step in range(1, 2001):
            writer.write({"step": step, "filler": "x" * 90})
    assert [record["step"] for record in tail(path)] == list(range(1951, 2001))


def test_a_hole_in_the_file_is_told_and_not_read(tmp_path):
    """A machine that went down leaves zeros; ten gigabytes of them are one line."""
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n')
    os.truncate(path, 10 * 2**30)
    for read in (read_metrics, lambda path: metrics.read_columns(path, ["step"])):
        with pytest.raises(StoreError, match="line 2 is longer than"):
            read(path)
    os.truncate(path, 12 + 3 * metrics.TAIL_BYTES)
    assert read_metrics(path) == [{"step": 1}], "a torn end, however long"
    with closing(MetricsWriter(path)) as writer:
        writer.write({"step": 2})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_keeps_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write(path, [1])
    before, real = path.read_bytes(), os.write

    def full(descriptor, data):
        if len(data) > 4:
            return real(descriptor, data[:4])
        raise OSError(28, "No space left on device")

    with closing(MetricsWriter(path)) as writer, monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            writer.write({"step": 2, "loss": float("nan")})
    assert path.read_bytes() == before
