"""Dashboard of a parity study as code: its charts on W&B, made anew by every push.

One section shows parity of the arms, one their cost; an arm's bound of rounding is dashed around the signed difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace


MOST_RUNS = 100
STEP = "train/step"
BAND = ("parity/loss_allowed", "parity/loss_allowed_below")
VERDICTS = "verdicts"
CURVES = (
    ("Loss", ("train/loss",), "nats a token"),
    (
        "Signed difference of the loss to the control; dashed: what rounding explains",
        ("parity/loss_difference", *BAND),
        "relative to the control",
    ),
    ("Gradient norm, ratio to the control", ("parity/grad_norm_ratio",), "1 is the control"),
)
COSTS = (
    ("Step time", ("train/step_time_s",), "seconds, rank 0"),
    ("Exposed communication", ("train/time/exposed_comm_s",), "seconds a step, rank 0"),
    ("Memory: CUDA's allocator, peak of the step", ("train/memory/allocated",), "bytes, rank 0"),
    ("Memory: resident set", ("train/memory/rss",), "bytes, rank 0"),
)
COLUMNS = ("parity/verdict", "parity/tier", "parity/margin", "result/state", "result/peak_bytes", "result/sent_bytes")


def dashboard(entity: str, project: str, study: str, arms: Mapping[str, str | None]) -> Workspace:
    """Workspace of a study; nothing is sent.

    Args: entity: owner; may be empty offline. arms: W&B's id of every run -> that of its control; None for a control.
    """
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports.v2.interface import Layout, WeavePanelSummaryTable

    band = [f"{arm}:{name}" for arm, control in arms.items() if control is not None for name in BAND]
    parity = [_curve(each, band if set(BAND) <= set(each[1]) else []) for each in CURVES]
    parity.append(WeavePanelSummaryTable(table_name=VERDICTS, layout=Layout(w=24, h=10)))
    controls = list(dict.fromkeys(control for control in arms.values() if control is not None))
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"Parity of {study}",
        sections=[
            ws.Section(name="Is it still the same run?", panels=parity, is_open=True, pinned=True),
            ws.Section(name="What did it cost?", panels=[_curve(each, []) for each in COSTS], is_open=True),
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=max(1, min(MOST_RUNS, len(arms)))),
        runset_settings=ws.RunsetSettings(
            filters=ws.And(ws.Metric("Group") == study),
            pinned_columns=[f"summary:{each}" for each in COLUMNS],
            baseline_run=controls[0] if len(controls) == 1 else None,
        ),
    )


def _curve(chart: tuple[str, Sequence[str], str], band: Sequence[str]) -> Any:
    from wandb_workspaces.reports.v2.interface import LinePlot

    title, metrics, unit = chart
    return LinePlot(
        title=title,
        x=STEP,
        y=list(metrics),
        title_x="step",
        title_y=unit,
        max_runs_to_show=MOST_RUNS,
        line_marks=dict.fromkeys(band, "dashed") or None,
    )


def as_json(board: Workspace) -> str:
    text: str = board._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=1)
    return text
