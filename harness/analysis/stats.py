"""Numbers from tables: pure functions of data frames."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

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
