"""Tables, numbers and pictures, from runs whose content is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import matplotlib
import pandas as pd
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from analysis import load, plot, stats
from benchmarks.pages import readme_figure
from harness.store import provenance
from tests.parity.corpus import FP32, OURS
from tests.parity.lab import as_study, edit_config, edit_json, write


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


def named(runs: pd.DataFrame, engine: str) -> str:
    return str(runs.loc[runs["engine"] == engine, "run"].iloc[0])


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
    assert runs["step_time_s"].isna().all()


def test_differences_are_relative_signed_and_by_step(store: Path) -> None:
    steps = pd.DataFrame(
        {"run": ["a", "a", "b", "b", "c"], "step": [1, 2, 1, 2, 2], "loss": [2.0, -4.0, 2.5, -5.0, -4.0]}
    )
    found = stats.against(steps, "a")
    assert list(found["run"]) == ["b", "b", "c"]
    assert list(found["difference"]) == [0.25, -0.25, 0.0]
    with pytest.raises(ValueError, match="'x' is none of the runs: a, b, c"):
        stats.against(steps, "x")


def test_costs_leave_the_warm_up_out() -> None:
    steps = pd.DataFrame({"run": ["a"] * 4, "step": [1, 2, 3, 4], "step_time_s": [9.0, 9.0, 1.0, 3.0]})
    found = stats.costs(steps.assign(sent_bytes=10, rss_bytes=[5, 5, 1, 2]))
    assert found.to_dict("records") == [{"run": "a", "step_time_s": 2.0, "sent_bytes": 10.0, "rss_bytes": 2}]


def test_gradients_are_held_against_the_control(store: Path) -> None:
    runs = load.runs(store, "lab").set_index("dtype")
    control = load.runs(store, "lab").query("engine == 'ddp'")["path"].iloc[0]
    table = load.gradients(runs.loc["bf16_comm", "path"], control)
    assert len(table) == 8
    assert table["distance"].between(1e-4, 1e-2).all()
    assert load.gradients(runs.loc["bf16_comm", "path"], control, step=2).empty


def test_plots_draw_what_they_are_given(store: Path) -> None:
    runs = load.runs(store, "lab")
    steps = load.steps(runs["path"])
    figure, (left, right) = plt.subplots(1, 2)
    assert plot.losses(steps, left) is left
    assert len(left.lines) == 3
    assert left.lines[0].get_ydata()[0] == steps["loss"].iloc[0]
    plot.differences(stats.against(steps, named(runs, "ddp")), right)
    assert (len(right.lines), right.get_yscale()) == (2, "log")
    plt.close(figure)


def test_the_readme_is_drawn_from_a_study(store: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{readme_figure.BEGIN}\nold\n{readme_figure.END}\nafter\n")
    command = ["--root", str(store), "--study", "lab", "--out", str(tmp_path)]
    assert readme_figure.main(command) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| optim_grads | bf16_comm | EQUIVALENT |" in text
    assert (tmp_path / "docs/parity.png").stat().st_size > 10_000
    shown = json.loads((tmp_path / "docs/parity.json").read_text())
    assert [arm["dtype"] for arm in shown["arms"]] == ["fp32", "bf16_comm"]
    readme_figure.main(command)
    assert readme.read_text() == text


def test_the_readme_is_not_drawn_from_stale_runs(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.parity.study.sources_digest", lambda: "changed since")
    assert readme_figure.main(["--root", str(store), "--study", "lab", "--out", str(tmp_path)]) == 2
    assert "it is stale" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()
