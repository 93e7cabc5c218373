"""A study's figures, for its report and for wandb; empty ones are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from harness.analysis import judge, load, plot
from harness.analysis.judge import Study
from harness.analysis.plot import COLOURS, CONTROL, MARKERS, Style
from harness.store.rundir import RunDir

LINES = len(COLOURS) * len(MARKERS)


@dataclass(frozen=True)
class Drawn:
    title: str
    caption: str
    figure: Figure


def figures(study: Study) -> Iterator[Drawn]:
    steps = load.steps(study.runs["path"])
    if len(steps):
        every, styles = _every_and_some(study, steps)
        figure, ax = plt.subplots(figsize=(8, 4 + 0.1 * len(styles)), layout="constrained")
        plot.losses(steps[steps["run"].isin(styles)], ax, styles)
        plot.legend(ax, columns=2)
        yield Drawn("Loss", f"The loss of each run.{_gaps(steps['loss'])}{_cut(every, styles)}", figure)
    apart, bounds = judge.differences(study), judge.bounds(study)
    if len(apart):
        every, shown = _every_and_some(study, apart)
        apart, bounds = (frame[frame["run"].isin(shown)] for frame in (apart, bounds))
        figure, ax = plt.subplots(figsize=(8, 4 + 0.1 * len(shown)), layout="constrained")
        plot.differences(apart, ax, study.styles, bounds)
        plot.legend(ax, columns=2)
        caption = "Each arm's loss against its control's, and dashed how far rounding may drive them."
        caption += _gaps(apart["difference"]) + _cut(every, shown)
        yield Drawn("Distance to the control", caption, figure)


def _every_and_some(study: Study, frame: pd.DataFrame) -> tuple[dict[str, Style], dict[str, Style]]:
    runs = set(frame["run"])
    every = {run: own for run, own in study.styles.items() if run in runs}
    arms = study.verdict.arms if study.verdict else ()
    failed = {RunDir(Path(arm.arm)).name for arm in arms if arm.exit_code}
    ranked = sorted(every, key=lambda run: (every[run].colour != CONTROL, run not in failed))
    kept = set(ranked[:LINES])
    return every, {run: own for run, own in every.items() if run in kept}


def _gaps(values: pd.Series) -> str:
    count = int((~np.isfinite(values.astype(float))).sum())
    return f" {count} values are no finite numbers and leave gaps." if count else ""


def _cut(every: Mapping[str, Style], shown: Mapping[str, Style]) -> str:
    few = f" {len(shown)} of {len(every)} runs are shown; those that did not pass come first."
    return few if len(shown) < len(every) else ""
