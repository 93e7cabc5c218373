"""A study's figures, for its report and for wandb; one that there is nothing to draw of is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from harness.analysis import judge, load, plot, stats
from harness.analysis.judge import Study
from harness.analysis.plot import Style

PANELS, ROWS = 24, 48
"""Most arms that a picture shows: in panels of their own, in rows below each other."""


@dataclass(frozen=True)
class Drawn:
    """A figure of pyplot's, which whoever saved it closes, and what it shows."""

    title: str
    caption: str
    figure: Figure


def figures(study: Study) -> Iterator[Drawn]:
    """Everything that can be drawn of a study, in the order it is read."""
    steps = load.steps(study.runs["path"])
    yield from _curves(study, steps)
    yield from _gradients(study)
    yield from _costs(study, steps)


def _curves(study: Study, steps: pd.DataFrame) -> Iterator[Drawn]:
    if len(steps):
        styles = _some(study.styles, set(steps["run"]))
        figure, ax = plt.subplots(figsize=(8, 4 + 0.1 * len(styles)), layout="constrained")
        plot.losses(steps[steps["run"].isin(styles)], ax, styles)
        plot.legend(ax, columns=2)
        yield Drawn("Loss", f"Every run's loss.{_cut(study.styles, styles)}", figure)
    apart, bounds = judge.differences(study), judge.bounds(study)
    if len(apart):
        every = _some(study.styles, set(apart["run"]))
        shown = _some(study.styles, set(apart["run"]), PANELS)
        apart, bounds = (frame[frame["run"].isin(shown)] for frame in (apart, bounds))
        figure, panels = plot.panels(len(shown))
        plot.each_difference(apart, bounds, panels, study.styles)
        caption = f"Each arm's loss against its control's, and how far rounding may drive them.{_cut(every, shown)}"
        yield Drawn("Distance to the control", caption, figure)


def _gradients(study: Study) -> Iterator[Drawn]:
    gradients, allowed = judge.gradients(study)
    if len(gradients):
        every = _some(study.styles, set(gradients["run"]), len(study.styles))
        shown = _some(study.styles, set(gradients["run"]))
        figure, ax = plot.bars(len(shown))
        plot.gradient_distances(gradients, allowed, ax, shown)
        caption = f"Every parameter's gradient at step 1, before any update.{_cut(every, shown)}"
        yield Drawn("Gradients", caption, figure)


def _costs(study: Study, steps: pd.DataFrame) -> Iterator[Drawn]:
    parts = stats.parts(steps)
    if len(parts):
        warm = steps[steps["step"] > stats.WARM_UP]
        shown = _some(study.styles, set(parts["run"]))
        figure, ax = plot.bars(len(shown))
        plot.stacks(parts, ax, shown, part="part", value="seconds", scale=1e-3, unit="time of a step (ms)")
        exposed = (1e3 * warm.groupby("run")["exposed_comm_s"].median()).to_dict()
        plot.marks(exposed, ax, shown, "of which waiting for collectives")
        plot.legend(ax)
        yield Drawn(
            "Step time", "Medians over steps after the warm-up. Runs that were not interleaved rank no arms.", figure
        )
    kept = load.memory(study.runs["path"])
    if len(kept):
        shown = _some(study.styles, set(kept["run"]))
        figure, ax = plot.bars(len(shown))
        plot.stacks(kept, ax, shown, part="role", value="bytes", scale=plot.MIB, unit="kept by rank 0 (MiB)")
        peaks = (study.runs.set_index("run")["peak_bytes"].dropna().astype(float) / plot.MIB).to_dict()
        plot.marks(peaks, ax, shown, "most within a step")
        plot.legend(ax)
        yield Drawn("Memory", "What rank 0's engine keeps between steps, by its own account.", figure)
    sent = load.traffic(study.runs["path"])
    if len(sent):
        shown = _some(study.styles, set(steps["run"]))
        figure, ax = plot.bars(len(shown))
        plot.stacks(sent, ax, shown, part="kind", value="bytes", scale=plot.MIB, unit="sent by rank 0 in a step (MiB)")
        plot.legend(ax)
        yield Drawn("Traffic", "What rank 0 sends in a step, by kind of collective.", figure)


def _some(styles: Mapping[str, Style], runs: set[str], most: int = ROWS) -> dict[str, Style]:
    return dict(islice(((run, own) for run, own in styles.items() if run in runs), most))


def _cut(every: Mapping[str, Style], shown: Mapping[str, Style]) -> str:
    return f" The first {len(shown)} of {len(every)}." if len(shown) < len(every) else ""
