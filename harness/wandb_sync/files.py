"""Metrics of stored runs in files that others read: TensorBoard's events, and CSV. Their libraries write them."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

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
    if kind == "csv":
        columns = dict.fromkeys(("train/step", *(name for _, values in rows for name in values)))
        with place.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, [*columns])
            table.writeheader()
            table.writerows(values for _, values in rows)
        return place
    from tensorboard.summary import Writer

    shutil.rmtree(place, ignore_errors=True)
    private_folder(place)
    events = Writer(str(place))
    for step, values in rows:
        for name, value in values.items():
            events.add_scalar(name, float(value), step)
    events.close()
    return place
