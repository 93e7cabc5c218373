"""The capture reader against the safetensors package, and against damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.parity.tensors import Capture
from harness.parity.tiers.gradients import compare_tensor, names
from harness.store.errors import StoreError
from tests.parity.network import bf16


def saved(path: Path, **tensors: np.ndarray) -> Capture:
    save_file({name.replace("__", "."): value for name, value in tensors.items()}, path)
    return Capture(path)


def by_hand(path: Path, header: dict[str, object], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_it_reads_what_safetensors_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal(7),
        "c": rng.standard_normal((2, 2)).astype(np.float16),
        "d": np.zeros((0, 4), np.float32),
        "e": np.array(2, np.float32),
    }
    capture = saved(tmp_path / "x.safetensors", **whole)
    assert set(capture.tensors) == set(whole)
    for name, value in whole.items():
        assert capture.values(name).dtype == np.float64
        np.testing.assert_array_equal(capture.values(name), value.astype(np.float64))


def test_bf16_is_read_exactly(tmp_path: Path) -> None:
    values = bf16(np.random.default_rng(0).standard_normal(6).astype(np.float32))
    data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    header = {"g": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, len(data)]}}
    capture = Capture(by_hand(tmp_path / "x", header, data))
    np.testing.assert_array_equal(capture.values("g"), values.astype(np.float64).reshape(2, 3))


@pytest.mark.parametrize(("dtype", "size", "says"), [("F32", 12, "asks for"), ("I64", 16, "dtype I64")])
def test_a_damaged_file_is_named(tmp_path: Path, dtype: str, size: int, says: str) -> None:
    header = {"g": {"dtype": dtype, "shape": [16 // (4 if dtype == "F32" else 8)], "data_offsets": [0, 16]}}
    with pytest.raises(StoreError, match=says):
        Capture(by_hand(tmp_path / "x", header, b"\0" * size))


@pytest.mark.parametrize("other", [np.array([-0.0]), np.zeros(1, np.float32)], ids=["minus zero", "another dtype"])
def test_equal_values_of_other_bits_are_not_equal(tmp_path: Path, other: np.ndarray) -> None:
    left, right = saved(tmp_path / "a", g=np.zeros(1)), saved(tmp_path / "c", g=other)
    assert not compare_tensor("g", left, right).bits_equal


def test_the_fit_finds_a_factor_and_its_uncertainty(tmp_path: Path) -> None:
    """Noise that is common to whole rows: the naive standard error would be eight times too small."""
    rng = np.random.default_rng(0)
    misses, naive_misses = 0, 0
    for trial in range(60):
        c = rng.standard_normal((32, 64))
        a = c * (1.1 + 0.05 * rng.standard_normal((32, 1)))
        left, right = saved(tmp_path / f"a{trial}", g=a), saved(tmp_path / f"c{trial}", g=c)
        pair = compare_tensor("g", left, right)
        misses += abs(pair.b - 0.1) > 2 * pair.standard_error
        naive_misses += abs(pair.b - 0.1) > 2 * pair.residual / np.sqrt(c.size)
    assert misses <= 9  # 3 expected of 60
    assert naive_misses > 40


def test_the_worst_piece_is_found(tmp_path: Path) -> None:
    c = np.random.default_rng(0).standard_normal((64, 10))
    a = c.copy()
    a[60:62] += 1.0
    pair = compare_tensor("g", saved(tmp_path / "a", g=a), saved(tmp_path / "c", g=c))
    assert (pair.block.start, pair.block.stop) == (600, 620)
    assert pair.block.distance > 4 * pair.distance


@pytest.mark.parametrize(("arm", "control", "distance"), [(0.0, 0.0, 0.0), (1.0, 0.0, np.inf), (0.0, 1.0, 1.0)])
def test_zero_gradients_are_no_special_luck(tmp_path: Path, arm: float, control: float, distance: float) -> None:
    left = saved(tmp_path / "a", g=np.full(8, arm))
    right = saved(tmp_path / "c", g=np.full(8, control))
    assert compare_tensor("g", left, right).distance == distance


def test_tensors_without_a_partner_are_listed(tmp_path: Path) -> None:
    left = saved(tmp_path / "a", same=np.zeros(2), tied=np.zeros(2), shape=np.zeros((2, 3)))
    right = saved(tmp_path / "c", same=np.zeros(2), shape=np.zeros((3, 2)))
    both, odd = names(left, right)
    assert both == ["same"]
    assert [(one.name, one.arm, one.control) for one in odd] == [
        ("shape", "[2, 3]", "[3, 2]"),
        ("tied", "[2]", "absent"),
    ]
