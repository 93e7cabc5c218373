"""A verdict's time and memory grow with the number of steps, not with its square."""

from __future__ import annotations

import json
import math
import shutil
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.parity import Outcome, compare
from harness.store.check_stream import FOLDER, step_columns
from tests.parity.conftest import Bench
from tests.parity.corpus import FP32, OURS
from tests.parity.edits import edit_config
from tests.parity.lab import CLEAN
from tests.parity.streams import SKETCHES

ARM, CONTROL = (replace(each, checked=True, updates=()) for each in (replace(OURS, strategy="optim_grads"), FP32))


def lengthened(run: Path, path: Path, steps: int) -> Path:
    """A run with its last step repeated: so many lines and rows, and the row after the end."""
    shutil.copytree(run, path)
    edit_config(path, "train", steps=steps)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    lines += [json.dumps({**last, "step": step}) for step in range(len(lines) + 1, steps + 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    file = path / FOLDER / "steps.f64"
    rows = np.fromfile(file).reshape(-1, len(step_columns(SKETCHES)))
    np.concatenate((rows[:-1], np.repeat(rows[-2:-1], steps - len(rows) + 1, 0), rows[-1:])).tofile(file)
    return path


def pair(bench: Bench, root: Path, steps: int) -> tuple[Path, Path]:
    arm, control = (lengthened(bench.run(each), root / f"{steps}" / each.engine, steps) for each in (ARM, CONTROL))
    return arm, control


def seconds(runs: tuple[Path, Path]) -> float:
    """Processor seconds of a verdict."""
    began = time.process_time()
    assert compare(*runs, sources=CLEAN).outcome is Outcome.EQUIVALENT
    return time.process_time() - began


def fitted(bench: Bench, root: Path) -> float:
    """Exponent of the time above that of the shortest pair, which has captures and few steps."""
    sizes = (2_000, 16_000)
    shortest, *runs = (pair(bench, root, size) for size in (100, *sizes))
    seconds(shortest)  # imports
    least = seconds(shortest)
    times = [max(1e-3, seconds(each) - least) for each in runs]
    return math.log(times[1] / times[0]) / math.log(sizes[1] / sizes[0])


def test_time_grows_with_the_number_of_steps(bench: Bench, tmp_path: Path) -> None:
    """Eightfold steps within eightfold time; a quadratic one would take 64 times as long."""
    assert fitted(bench, tmp_path) <= 1.3


def test_a_quadratic_path_is_noticed(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.parity.tiers import trajectory

    growths = trajectory.growths

    def anew(rate: float, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        numbers = steps.tolist()
        for count in range(len(numbers)):
            math.fsum(numbers[:count])
        return growths(rate, steps)

    monkeypatch.setattr(trajectory, "growths", anew)
    assert fitted(bench, tmp_path) > 1.3


@pytest.mark.full
def test_a_hundred_thousand_steps_fit(bench: Bench, tmp_path: Path) -> None:
    runs = pair(bench, tmp_path, 100_000)
    assert seconds(runs) < 5.0
    tracemalloc.start()
    compare(*runs, sources=CLEAN)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 300e6
