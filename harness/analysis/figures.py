"""A study's figures, for its report and for wandb; empty ones are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from harness.analysis import judge, load, plot, stats
from harness.analysis.judge import Study
from harness.analysis.plot import COLOURS, CONTROL, MARKERS, MIB, Style
from harness.store.rundir import RunDir

LINES, ROWS = len(COLOURS) * len(MARKERS), 48


@dataclass(frozen=True)
class Drawn:
    title: str
    caption: str
    figure: Figure


def figures(study: Study) -> Iterator[Drawn]:
    steps = load.steps(study.runs["path"])
    yield from _curves(study, steps)
    yield from _costs(study, steps)


def _curves(study: Study, steps: pd.DataFrame) -> Iterator[Drawn]:
    if len(steps):
        every, styles = _every_and_some(study, steps, LINES)
        figure, ax = plt.subplots(figsize=(8, 4 + 0.1 * len(styles)), layout="constrained")
        plot.losses(steps[steps["run"].isin(styles)], ax, styles)
        plot.legend(ax, columns=2)
        yield Drawn("Loss", f"The loss of each run.{_gaps(steps['loss'])}{_cut(every, styles)}", figure)
    apart, bounds = judge.differences(study), judge.bounds(study)
    if len(apart):
        every, shown = _every_and_some(study, apart, LINES)
        apart, bounds = (frame[frame["run"].isin(shown)] for frame in (apart, bounds))
        figure, ax = plt.subplots(figsize=(8, 4 + 0.1 * len(shown)), layout="constrained")
        plot.differences(apart, ax, study.styles, bounds)
        plot.legend(ax, columns=2)
        caption = "Each arm's loss against its control's, and dashed how far rounding may drive them."
        caption += _gaps(apart["difference"]) + _cut(every, shown)
        yield Drawn("Distance to the control", caption, figure)


def _costs(study: Study, steps: pd.DataFrame) -> Iterator[Drawn]:
    paths, parts = study.runs["path"], stats.parts(steps)
    warm = steps[steps["step"] > stats.WARM_UP].groupby("run")["exposed_comm_s"]
    exposed = (1e3 * warm.median()).to_dict() if len(parts) else {}
    peaks = (study.runs.set_index("run")["peak_bytes"].dropna().astype(float) / MIB).to_dict()
    times = "Medians over steps after the warm-up. Runs that were not interleaved rank no arms."
    kept = "What rank 0's engine keeps between steps, by its own account."
    sent = "What rank 0 sends in a step, by kind of collective."
    unit = "by rank 0 (MiB)"
    for title, caption, frame, part, scale, axis, marked, mark in (
        ("Step time", times, parts, "part", 1e-3, "time of a step (ms)", exposed, "of which waiting for collectives"),
        ("Memory", kept, load.memory(paths), "role", MIB, f"kept {unit}", peaks, "most within a step"),
        ("Traffic", sent, load.traffic(paths), "kind", MIB, f"sent in a step {unit}", {}, ""),
    ):
        if not len(frame):
            continue
        every, shown = _every_and_some(study, steps if part == "kind" else frame, ROWS)
        figure, ax = plot.bars(len(shown))
        value = "seconds" if part == "part" else "bytes"
        plot.stacks(frame, ax, shown, part=part, value=value, scale=scale, unit=axis)
        plot.marks(marked, ax, shown, mark)
        plot.legend(ax)
        yield Drawn(title, f"{caption}{_cut(every, shown)}", figure)


def _every_and_some(study: Study, frame: pd.DataFrame, most: int) -> tuple[dict[str, Style], dict[str, Style]]:
    runs = set(frame["run"])
    every = {run: own for run, own in study.styles.items() if run in runs}
    arms = study.verdict.arms if study.verdict else ()
    failed = {RunDir(Path(arm.arm)).name for arm in arms if arm.exit_code}
    ranked = sorted(every, key=lambda run: (every[run].colour != CONTROL, run not in failed))
    kept = set(ranked[:most])
    return every, {run: own for run, own in every.items() if run in kept}


def _gaps(values: pd.Series) -> str:
    count = int((~np.isfinite(values.astype(float))).sum())
    return f" {count} values are no finite numbers and leave gaps." if count else ""


def _cut(every: Mapping[str, Style], shown: Mapping[str, Style]) -> str:
    few = f" {len(shown)} of {len(every)} runs are shown; those that did not pass come first."
    return few if len(shown) < len(every) else ""
