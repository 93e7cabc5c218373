"""Numbers from tables: pure functions of data frames."""

from __future__ import annotations

import pandas as pd


def against(steps: pd.DataFrame, control: str, column: str = "loss") -> pd.DataFrame:
    """Relative difference of a column to the control's at the same step.

    Args:
        steps: as `load.steps` makes it.
        control: the `run` all others are compared with.
        column: what is compared.

    Returns:
        Columns `run`, `step`, `difference` = (arm - control) / |control|, for every run but the control and every step
        that both have.

    Raises:
        ValueError: the control is not in the table.
    """
    held = steps.loc[steps["run"] == control, ["step", column]]
    if held.empty:
        raise ValueError(f"control {control!r} is none of the runs: {', '.join(sorted(steps['run'].unique()))}")
    arms = steps.loc[steps["run"] != control, ["run", "step", column]]
    joined = arms.merge(held, on="step", suffixes=("", "_control"))
    base = joined[f"{column}_control"]
    return joined[["run", "step"]].assign(difference=(joined[column] - base) / base.abs())


def costs(steps: pd.DataFrame, warm_up: int = 2) -> pd.DataFrame:
    """What a step costs each run.

    Args:
        steps: as `load.steps` makes it.
        warm_up: first steps left out: a declared number, never chosen by looking.

    Returns:
        One row a run: `run`, `step_time_s` (median), `sent_bytes` (median; bytes rank 0 sends a step), `rss_bytes`
        (largest). The unit of repetition is the run: steps within one are not independent, so there is no interval.
    """
    warm = steps[steps["step"] > warm_up].groupby("run", sort=False)
    columns = {
        "step_time_s": ("step_time_s", "median"),
        "sent_bytes": ("sent_bytes", "median"),
        "rss_bytes": ("rss_bytes", "max"),
    }
    return warm.agg(**columns).reset_index()
