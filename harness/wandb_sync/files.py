"""Metrics of stored runs in files that others read: TensorBoard's events, and CSV. Their libraries write them."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

from harness.store.fields import synced
from harness.store.files import private_folder
from harness.store.metrics import read_metrics
from harness.store.rundir import RunDir

FORMATS = {"tensorboard": "tensorboard", "csv": "metrics.csv"}
"""Folder or file in a run's directory, by format; one of an earlier time is replaced."""


def write(run: RunDir, kind: str) -> Path:
    """Write the record of a run so far, under the names that wandb has. Raises `StoreError`: it cannot be read."""
    rows = [
        (each["step"], {f"train/{path}": value for path, value in synced(each).items()})
        for each in read_metrics(run.metrics)
    ]
    place = run.path / FORMATS[kind]
    (_write_events if kind == "tensorboard" else _write_csv)(place, rows)
    return place


def _write_events(folder: Path, rows: list[tuple[int, dict[str, Any]]]) -> None:
    from tensorboard.summary import Writer

    shutil.rmtree(folder, ignore_errors=True)
    private_folder(folder)
    writer = Writer(str(folder))
    for step, values in rows:
        for name, value in values.items():
            writer.add_scalar(name, float(value), step)
    writer.close()


def _write_csv(path: Path, rows: list[tuple[int, dict[str, Any]]]) -> None:
    columns = dict.fromkeys(name for _, values in rows for name in values)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["train/step", *(name for name in columns if name != "train/step")])
        writer.writeheader()
        writer.writerows(values for _, values in rows)
