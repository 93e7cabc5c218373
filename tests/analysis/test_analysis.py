"""Tables, numbers and pictures, from runs whose content is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from harness.analysis import figures, judge, load, plot
from harness.parity import Outcome
from harness.store import labels, provenance
from harness.store.rundir import RunDir
from tests.parity.arms import Arm
from tests.parity.corpus import FP32, OURS
from tests.parity.edits import edit_config, edit_json, edit_lines
from tests.parity.lab import as_study, write
from tests.support.mutants import finds

pytestmark = pytest.mark.filterwarnings("ignore:constrained_layout not applied")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A control and two arms, made by this checkout's sources as far as anybody can tell."""
    root = tmp_path_factory.mktemp("store")
    arms = (FP32, OURS, replace(OURS, wire="bf16", strategy="optim_grads"))
    written = [write(root, arm) for arm in arms]
    as_study(root, dict(zip(written, (None, written[0], written[0]), strict=True)), "Is it the same?")
    for arm, run in zip(arms, written, strict=True):
        edit_config(run, "dtype", name="bf16_comm" if arm.wire == "bf16" else "fp32")
        edit_json(run / "provenance.json", sources_digest=provenance.sources_digest())
        edit_json(run / "summary.json", accounted_bytes={"main_weights": 2**20, "padding": 2**18}, loss=1.5)
    return root


def test_a_row_a_run(store: Path) -> None:
    runs = load.runs(store, "lab")
    assert len(runs) == 3
    assert set(runs["state"]) == {"done"}
    assert set(runs["microbatches"]) == {2}
    assert set(runs["accounted_bytes"]) == {2**20 + 2**18}
    assert load.runs(store).equals(runs)
    assert load.runs(store, "nothing").empty


def test_what_was_not_recorded_is_missing_and_not_zero(store: Path) -> None:
    runs = load.runs(store, "lab")
    steps = load.steps(runs["path"])
    assert list(steps.columns) == list(load.STEP_COLUMNS)
    assert len(steps) == 3 * FP32.steps
    assert steps["param_norm"].notna().sum() == 3 * 2
    assert set(steps["sent_bytes"]) == {1000}
    assert runs[["held_out_loss", "wall_s"]].isna().all(axis=None)


def test_differences_are_relative_signed_and_by_step() -> None:
    steps = pd.DataFrame(
        {"run": ["a", "a", "b", "b", "c"], "step": [1, 2, 1, 2, 2], "loss": [2.0, -4.0, 2.5, -5.0, -4.0]}
    )
    found = judge.against(steps, "a")
    assert list(found["run"]) == ["b", "b", "c"]
    assert list(found["difference"]) == [0.25, -0.25, 0.0]
    with pytest.raises(ValueError, match="'x' is none of the runs: a, b, c"):
        judge.against(steps, "x")
    zeros = pd.DataFrame({"run": ["c", "c", "a", "a"], "step": [1, 2, 1, 2], "loss": [0.0, 0.0, 0.0, 1.0]})
    assert list(judge.against(zeros, "c")["difference"]) == [0.0, float("inf")], "two losses of zero do not differ"


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        ([0.5, 0.5], {"data": 1.0, "optimizer": 2.0, "other": 0.5}),
        ([0.1, None], {"data": 1.0, "optimizer": 2.0, "other": 1.0}),
        (None, {"data": 1.0, "optimizer": 2.0, "other": 1.0}),
    ],
    ids=["recorded", "of a part of the steps", "not recorded"],
)
def test_parts_and_other_are_what_was_recorded(other: list[float | None] | None, wanted: dict[str, float]) -> None:
    nothing = [None, None]
    parts = {"data_s": [1.0, 1.0], "forward_s": nothing, "backward_s": nothing, "optimizer_s": [2.0, 2.0]}
    steps = pd.DataFrame({"run": ["a"] * 2, "step": [2, 3], "step_time_s": [4.0, 4.0], **parts})
    found = judge.parts(steps if other is None else steps.assign(other_s=other))
    assert dict(zip(found["part"], found["seconds"], strict=True)) == wanted
    exceeding = judge.parts(steps.assign(step_time_s=[2.0, 2.0])).to_dict("records")
    assert exceeding == [{"run": "a", "part": "other", "seconds": 2.0}]


test_a_hidden_excess_is_noticed = finds(
    "The pictures of a study",
    test_parts_and_other_are_what_was_recorded="""
        a rest below nothing: Parts that exceed a step are shown, and less than nothing
            analysis.judge.parts: elif other.median() < 0 => elif False
            (other=None, wanted={"data": 1.0, "optimizer": 2.0, "other": 1.0})
    """,
)


def test_zero_is_drawn_as_zero_and_a_bound_in_the_colour_of_its_arm() -> None:
    frame = pd.DataFrame({"run": ["a"] * 4, "step": [1, 2, 3, 4], "difference": [0.0, -1e-6, 0.0, float("nan")]})
    bounds = pd.DataFrame({"run": ["a"] * 4, "step": [1, 2, 3, 4], "allowed": [1e-5] * 4})
    figure, ax = plt.subplots()
    plot.differences(frame, ax, plot.style({"a": "an arm"}), bounds)
    figure.canvas.draw()
    some, bound = ax.lines
    assert bound.get_linestyle() == "--"
    assert {line.get_color() for line in (bound, some)} == {plot.COLOURS[0]}
    assert [*some.get_ydata()[:3]] == [0.0, 1e-6, 0.0]
    assert ax.get_ylim()[0] == 0.0
    heights = ax.transData.transform([(1, 0.0), (1, 1e-6), (1, 1e-5)])[:, 1]
    assert heights[2] - heights[1] > 0.2 * ax.get_window_extent().height, "a decade has room above the smallest"


def test_names_that_look_like_mathematics_are_drawn_as_they_stand() -> None:
    frame = pd.DataFrame({"run": ["a", "b"], "step": [1, 1], "loss": [1.0, 2.0]})
    figure, ax = plt.subplots(layout="constrained")
    plot.losses(frame, ax, plot.style({"a": r"$\frac{$", "b": "_hid\nden"}))
    plot.legend(ax)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [r"\$\frac{\$", " _hid?den"]
    assert not legend.get_window_extent().overlaps(ax.get_window_extent()), "no legend stands over data"


LONG = "a_policy_with_a_name_that_nobody_would_type_" * 3


def test_long_names_stay_inside_and_apart() -> None:
    """They pushed the axes out of the figure, and lay over each other."""
    labels = {"a": f"optim, {LONG}1, seed 1", "b": f"optim, {LONG}2, seed 1", "c": "short"}
    styles = plot.style(labels)
    frame = pd.DataFrame({"run": list("abc"), "step": 1, "loss": 1.0, "part": "forward", "seconds": 1.0})
    figure, ax = plot.bars(3)
    plot.stacks(frame, ax, styles, part="part", value="seconds", scale=1.0, unit="s")
    figure.canvas.draw()
    texts = figure.axes[0].get_yticklabels()
    boxes = [text.get_window_extent() for text in texts]
    assert len({text.get_text() for text in texts}) == 3
    for place, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert not [other for other in boxes[place + 1 :] if box.overlaps(other)]
    assert figure.axes[0].get_window_extent().width > 0.2 * figure.bbox.width


def test_one_step_stands_on_a_whole_number_with_its_bound() -> None:
    frame = pd.DataFrame({"run": ["a", "c"], "step": [1, 1], "loss": [2.0, 2.0], "difference": [1e-6, 0.0]})
    styles = plot.style({"a": "arm", "c": "control"}, "c")
    figure, (above, below) = plt.subplots(2)
    plot.losses(frame, above, styles)
    plot.differences(frame[:1], below, styles, pd.DataFrame({"run": ["a"], "step": [1], "allowed": [1e-5]}))
    figure.canvas.draw()
    for ax in (above, below):
        low, high = ax.get_xlim()
        assert {place for place in ax.get_xticks() if low <= place <= high} <= {0, 1, 2}
        assert not [line for line in ax.lines if len(line.get_xdata()) == 1 and line.get_marker() in ("None", "")]


def test_bars_are_stacked_in_the_order_of_the_styles() -> None:
    frame = pd.DataFrame({"run": ["b", "b", "a"], "part": ["x", "y", "x"], "bytes": [1, 2, 4]})
    _, ax = plot.bars(3)
    styles = plot.style({"a": "A", "b": "B", "c": "C"})
    plot.stacks(frame, ax, styles, part="part", value="bytes", scale=2.0, unit="two")
    assert [text.get_text() for text in ax.get_yticklabels()] == ["A", "B", "C"]
    found = {(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in ax.patches}
    assert found == {(0, 0.0, 2.0), (0, 2.0, 0.0), (1, 0.0, 0.5), (1, 0.5, 1.0), (2, 0.0, 0.0)}


def test_what_is_not_a_number_is_counted_in_the_caption() -> None:
    values = pd.Series([float("nan"), 1.0, float("inf"), None])
    assert figures._gaps(values) == " 3 values are no finite numbers and leave gaps."
    assert figures._gaps(pd.Series([1.0])) == ""


def test_a_picture_of_some_runs_shows_the_control_and_what_failed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.analysis.figures.LINES", 2)
    study = judge.study(store, "lab")
    assert study.verdict is not None
    last = study.verdict.arms[-1]
    failed = replace(last, outcome=Outcome.DIFFERENT)
    object.__setattr__(study.verdict, "arms", (*study.verdict.arms[:-1], failed))
    wanted = {RunDir(Path(path)).name for path in (last.arm, last.control)}
    for drawn in figures.figures(study):
        if drawn.title == "Loss":
            shown = {line.get_label() for line in drawn.figure.axes[0].lines}
            assert shown == {study.styles[run].label for run in wanted}
        few = " 2 of 3 runs are shown; those that did not pass come first."
        assert drawn.caption.endswith(few) == (drawn.title != "Distance to the control")


def test_runs_are_labelled_by_what_differs_between_them() -> None:
    arms = [Arm(engine="single", ranks=1), Arm(wire="bf16"), Arm(strategy="optim"), Arm(seed=1)]
    configs = {str(number): arm.config() for number, arm in enumerate(arms)}
    found = labels.labels(configs)
    assert found["1"] == "native, optim_grads_params, fp32-bf16, seed 0, microbatch_size=4, 2 ranks", "it has both"
    assert found["2"] == "native, optim, fp32-fp32, seed 0, microbatch_size=4, 2 ranks"
    assert found["3"] == "native, optim_grads_params, fp32-fp32, seed 1, microbatch_size=4, 2 ranks"
    assert found["0"] == "single, optim_grads_params, fp32-fp32, seed 0, microbatch_size=8, 1 rank"
    assert labels.labels({"x": configs["0"]}) == {"x": "the only run"}
    again = {"a": Arm().config(), "b": Arm(replicate=1).config()}
    assert labels.labels(again) == {"a": "repetition 0", "b": "repetition 1"}


def test_memory_and_communication_are_read_from_where_they_were_measured(tmp_path: Path) -> None:
    followed, counted = (write(tmp_path, arm) for arm in (FP32, OURS))
    plan = {"kept": 5, "peak": 7, "sent": None}
    tensors = {"persistent": [5], "peak": [7, 9], "growth": [0]}
    edit_json(followed / "summary.json", tensor_bytes=tensors, planned=plan)

    def give(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line["time"] = {"exposed_comm_s": 0.5 + (line["step"] == 12)}
            line["memory"] |= {"peak_tensor_bytes": 100 + line["step"]}

    edit_lines(counted, give)
    runs = load.runs(tmp_path).set_index("path")
    assert runs.loc[str(followed), "peak_bytes"] == 9
    assert runs.loc[str(followed), "planned_peak_bytes"] == 7
    assert runs.loc[str(followed), "leaves_plan"].startswith("the measured peak leaves the plan by +14.3%")
    assert runs.loc[str(counted), "peak_bytes"] == 112
    assert pd.isna(runs.loc[str(counted), "planned_peak_bytes"])
    assert runs.loc[str(counted), "leaves_plan"] == ""
    assert runs.loc[str(counted), "exposed_comm_s"] == 0.5
    assert pd.isna(runs.loc[str(followed), "exposed_comm_s"])


def test_a_damaged_run_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    bad, good = (write(tmp_path, arm) for arm in (FP32, OURS))
    (bad / "config.yaml").write_text("model: [")
    runs = load.runs(tmp_path).set_index("path")
    assert runs.loc[str(bad), "state"] == "damaged"
    assert "not valid YAML" in runs.loc[str(bad), "reason"]
    assert runs.loc[str(good), "state"] == "done"
    assert runs.loc[str(good), "label"] == good.name, "one of two runs is not the only one"


test_a_mutant_is_found = finds(
    "The terminal",
    test_a_damaged_run_is_told_and_the_rest_is_read="""
        the only run: A run beside a damaged one is called the only run in tables and pictures
            analysis.load.runs:  if len(known) > 1 or len(mine) == 1 else {} =>
    """,
)
test_mutants_of_pictures_are_found = finds(
    "Pictures",
    test_long_names_stay_inside_and_apart="""
        names of any length: A long name pushes the axes out of the figure
            analysis.plot.LONGEST: 1000
    """,
    test_one_step_stands_on_a_whole_number_with_its_bound="""
        a step between numbers: Ticks stand between whole steps
            analysis.plot.over_steps: integer=True, min_n_ticks=1 =>
    """,
    test_what_is_not_a_number_is_counted_in_the_caption="""
        gaps of infinity: A loss of infinity is a gap unsaid
            analysis.figures._gaps: ~np.isfinite(values.astype(float)) => values.isna()
    """,
    test_bars_are_stacked_in_the_order_of_the_styles="""
        stacks in any order: A bar stands beside another run's name
            analysis.plot.stacks: .reindex(list(styles)) => .reindex([*styles][::-1])
    """,
    test_differences_are_relative_signed_and_by_step="""
        zero by zero: Two zeros differ by NaN
            analysis.judge.against: .mask((loss == 0) & (base == 0), 0.0) =>
    """,
    test_a_picture_of_some_runs_shows_the_control_and_what_failed="""
        the first ones: A picture of some runs shows the first ones, without the control and what failed
            analysis.figures._every_and_some: ranked[:LINES] => list(every)[:LINES]
    """,
)
