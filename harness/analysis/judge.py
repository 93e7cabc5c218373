"""A study's verdicts as tables, finished or not, and numbers from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from harness.analysis import judge, load, plot
from harness.analysis.plot import Style
from harness.config.errors import BadRequest, Violation
from harness.parity import CHECKOUT, StudyVerdict, Verdict, loss_bounds, so_far
from harness.parity.study import absence
from harness.parity.telling.render import used
from harness.store.errors import StoreError
from harness.store.rundir import RunDir, Store
from harness.store.study import read_study

PARTS = {"data_s": "data", "forward_s": "forward", "backward_s": "backward", "optimizer_s": "optimizer"}
WARM_UP = 1


def against(steps: pd.DataFrame, control: str) -> pd.DataFrame:
    """Columns `run`, `step`, `difference` of losses, (arm - control) / |control|, for common steps; 0 for two zeros.

    Raises `ValueError`: the control is not in the table.
    """
    held = steps.loc[steps["run"] == control, ["step", "loss"]]
    if held.empty:
        raise ValueError(f"control {control!r} is none of the runs: {', '.join(sorted(steps['run'].unique()))}")
    arms = steps.loc[steps["run"] != control, ["run", "step", "loss"]]
    joined = arms.merge(held, on="step", suffixes=("", "_control"))
    loss, base = joined["loss"], joined["loss_control"]
    found = ((loss - base) / base.abs()).mask((loss == 0) & (base == 0), 0.0)
    return joined[["run", "step"]].assign(difference=found)


def parts(steps: pd.DataFrame) -> pd.DataFrame:
    """One row a run and part of a step's time: `run`, `part`, `seconds` (median over steps).

    `other` is the rest of the step, and includes forward and backward where a run does not separate them. Parts of runs
    without `other_s` may exceed the step, and are left out.
    """
    rows: list[tuple[str, str, float]] = []
    for run, own in steps[steps["step"] > WARM_UP].groupby("run", sort=False):
        known = {name: own[column].astype(float).median() for column, name in PARTS.items()}
        known = {name: value for name, value in known.items() if value == value}
        other = own["step_time_s"] - own[list(PARTS)].astype(float).sum(axis=1)
        if "other_s" in own and own["other_s"].notna().all():
            other = own["other_s"].astype(float)
        elif other.median() < 0:
            known, other = {}, own["step_time_s"]
        rows += [(str(run), name, value) for name, value in (*known.items(), ("other", float(other.median())))]
    return pd.DataFrame(rows, columns=["run", "part", "seconds"])


def interval(hits: int, of: int, outside: float = 0.05) -> Sequence[float]:
    """Two-sided interval of a share (Clopper and Pearson, Biometrika 26, 1934)."""
    from scipy.stats import binomtest

    found = binomtest(hits, of).proportion_ci(1 - outside, "exact")
    return float(found.low), float(found.high)


NO_STUDY = "these runs were not asked for as a study, so that none is held against another; --control RUN says which"


@dataclass(frozen=True, eq=False)
class Study:
    name: str
    question: str
    runs: pd.DataFrame
    verdict: StudyVerdict | None
    missing: str

    @cached_property
    def compared(self) -> list[Verdict]:
        return [arm for arm in (self.verdict.arms if self.verdict else ()) if arm.tier != "T0"]

    @cached_property
    def incomplete(self) -> str:
        states = self.runs["state"].value_counts()
        counts = ", ".join(f"{count} {state}" for state, count in states.items() if state != "done")
        found = [f"Not every run is done: {counts}."] if counts else []
        if self.missing:
            found.append(f"{self.missing[0].upper()}{self.missing[1:]}.".replace("..", "."))
        if self.verdict is not None and not self.compared:
            found.append("No arm could be held against its control.")
        return " ".join(found)

    @cached_property
    def labels(self) -> dict[str, str]:
        """Label by `run`."""
        return {str(row.run): str(row.label) for row in self.runs.itertuples()}

    def label(self, path: Path | str) -> str:
        return self.labels.get(RunDir(Path(path)).name, Path(path).name)

    @cached_property
    def styles(self) -> dict[str, Style]:
        controls = {RunDir(Path(arm.control)).name for arm in (self.verdict.arms if self.verdict else ())}
        ordered = sorted(self.labels, key=controls.__contains__)
        only = next(iter(controls)) if len(controls) == 1 else None
        return plot.style({run: self.labels[run] for run in ordered}, only)


def study(root: Path | str, name: str, *, sources: str | None = CHECKOUT, verdict: StudyVerdict | None = None) -> Study:
    """Read and judge a study, as far as it has come.

    Args: sources: as in `harness.parity.compare`; None for runs of other sources. verdict: on the whole study, if it
    was judged already.
    """
    runs, found, missing = load.runs(root, name), None, ""
    record = None
    try:
        record = read_study(Store(root).root, name)
        if record is not None:
            order = [cell["directory"] for cell in record["cells"]]
            places = runs["path"].map(lambda path: order.index(Path(path).name) if Path(path).name in order else -1)
            runs = runs[places >= 0].iloc[places[places >= 0].argsort(kind="stable")].reset_index(drop=True)
        found, absent = (verdict, []) if verdict else so_far(Store(root).root, name, sources=sources)
        if absent:
            missing = absence(absent, len(order))
    except BadRequest as error:
        alone = record is None and len(runs)
        missing = NO_STUDY if alone else "; ".join(_sentence(each) for each in error.violations)
    except StoreError as error:
        missing = str(error)
    return Study(name, str((record or {}).get("question", "")), runs, found, missing)


def _sentence(refused: Violation) -> str:
    of_setting = "" if refused.subject.startswith("verdict ") else f"the setting {refused.subject} "
    return f"{of_setting}{refused.problem}" + (f" ({refused.fix})" if refused.fix else "")


def verdicts(of: Study) -> pd.DataFrame:
    """One row an arm: `run`, `label`, `control` (label), `verdict`, `tier`, `used`, `check`, `resolution`, `sentence`.

    `check` is the check that is farthest out beside what clean pairs show of it (`harness.parity.telling.render`),
    `used` its share of its bound (1 is the bound). `resolution` is the smallest
    detectable relative error in the scale of all gradients.
    """
    names = ["run", "label", "control", "verdict", "tier", "used", "check", "resolution", "sentence"]
    rows = [
        {
            **vars(arm),
            "run": RunDir(Path(arm.arm)).name,
            "label": of.label(arm.arm),
            "control": of.label(arm.control),
            "verdict": arm.outcome.value,
            **dict(zip(("used", "check"), used(arm), strict=True)),
        }
        for arm in (of.verdict.arms if of.verdict else ())
    ]
    return pd.DataFrame(rows, columns=names)


def evidence(of: Study) -> pd.DataFrame:
    """One row an arm and kind of measuring check, the worst of its kind.

    Columns `run`, `tier`, `check`, `step`, `tensor`, `observed`, `allowed`, `used` (observed / allowed), `count` of
    such checks, `grade`.
    """
    names = ["run", "tier", "check", "step", "tensor", "observed", "allowed", "used", "count", "grade"]
    rows = [
        {**vars(each), "run": RunDir(Path(arm.arm)).name, "used": each.ratio, "grade": each.grade.value}
        for arm in of.compared
        for each in arm.evidence
        if not isinstance(each.observed, str) and not isinstance(each.allowed, str)
    ]
    return pd.DataFrame(rows, columns=names)


def bounds(of: Study) -> pd.DataFrame:
    """Bound of rounding on each step's loss: `run`, `step`, `allowed` (relative to the control)."""
    rows = [
        (RunDir(Path(arm.arm)).name, each.step, each.allowed)
        for arm in of.compared
        for each in loss_bounds(Path(arm.arm), Path(arm.control))
    ]
    return pd.DataFrame(rows, columns=["run", "step", "allowed"])


def differences(of: Study) -> pd.DataFrame:
    """Loss of every compared arm against its control: `run`, `step`, `difference` (signed, relative)."""
    found = [judge.against(load.steps([arm.control, arm.arm]), RunDir(Path(arm.control)).name) for arm in of.compared]
    return pd.concat(found) if found else pd.DataFrame(columns=["run", "step", "difference"])
