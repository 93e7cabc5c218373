"""One run of the store as one run of wandb."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.config.schema import OuterStrategy, WandbMode
from harness.config.wandb_mode import VARIABLE
from harness.store import provenance
from harness.store.errors import StoreError
from harness.store.fields import synced
from harness.store.reading import checked
from harness.store.results import results
from harness.store.rundir import CONFIG, RunDir, read_summary
from harness.store.shapes import Maybe, Shape
from harness.store.study import read_study

MAX_ID = 64

LOGIN_TIMEOUT_S = 30

SUMMARIES = {
    "train/loss": "min,last",
    "train/grad_norm": "last",
    "train/step_time_s": "mean",
    "train/time/exposed_comm_s": "mean",
    "train/memory/allocated": "max",
    "train/memory/peak_tensor_bytes": "max",
    "train/memory/rss": "max",
}

SENT: Shape = {
    **{group: {"name": str} for group in ("study", "engine", "dtype", "fault")},
    "wandb": {"entity": Maybe(str), "project": str},
    "sharding": {"strategy": str, "outer": str},
    "mesh": {"dp_outer": int},
    "numerics": {"mode": str},
    "nccl_ub": {"mode": str},
    "sharp": {"group": str},
}

ORIGIN = ("sources_digest", "versions", "git", "cpu_model", "device", "hosts")


MAX_TAG = 64


class WandbFailed(Exception):
    """wandb did not open a run; the message is its own."""


class WandbRun:
    """An open run of wandb. Offline, a new file replaces those of earlier attempts."""

    def __init__(self, run: RunDir, mode: WandbMode, *, live: bool) -> None:
        """Open, or online resume, the run with this signature's id.

        Args: live: the run trains now, so that the machine's load is relevant.

        Raises `WandbFailed`: wandb did not open it.
        """
        self._run_dir, self._mode = run, mode
        config = checked(run.config(), SENT, str(run.path / CONFIG))
        self._run = opened(
            **identity(run, config),
            entity=config["wandb"]["entity"],
            project=config["wandb"]["project"],
            mode=mode.value,
            resume="allow",
            dir=str(run.path),
            settings=quiet_settings(stats=live),
        )
        for prefix in ("train", "parity"):
            self._run.define_metric(f"{prefix}/*", step_metric="train/step")
        for metric, summary in SUMMARIES.items():
            self._run.define_metric(metric, step_metric="train/step", summary=summary)

    def log(self, record: Mapping[str, Any], more: Mapping[str, float] | None = None) -> None:
        """Send the synced metrics of one line, nested ones as `train/time/data_s`, and `more` under its own names."""
        values = {f"train/{path}": value for path, value in synced(record).items()}
        self._run.log({**values, **(more or {})}, step=record["step"])

    def finish(self, more: Mapping[str, Any] | None = None) -> None:
        results = outcome(self._run_dir)
        self._run.summary.update({**results, **(more or {})})
        if results["result/state"] == "preempted":
            self._run.mark_preempting()
        own = Path(self._run.dir).parent
        self._run.finish(exit_code=int(results["result/state"] != "done"))
        if self._mode is WandbMode.offline:
            drop_others(self._run_dir.path / "wandb", own)

    def abandon(self) -> None:
        own = Path(self._run.dir).parent
        self._run.finish(exit_code=1)
        if self._mode is WandbMode.offline:
            settle()
            shutil.rmtree(own, ignore_errors=True)


def opened(**arguments: Any) -> Any:
    """Raises `WandbFailed` in place of any error of wandb: no network, a refused key, an invalid name."""
    import wandb

    asked = os.environ.pop(VARIABLE, None)  # `mode` has been made of it; wandb would read it again, and refuse OFFLINE
    try:
        return wandb.init(**arguments)
    except Exception as error:
        raise WandbFailed(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    finally:
        if asked is not None:
            os.environ[VARIABLE] = asked


def check_place(folder: Path) -> None:
    """Raises `StoreError`: wandb would silently write elsewhere."""
    if not os.access(folder, os.W_OK):
        raise StoreError(f"{folder} is not writable, and what wandb keeps offline lies there; copy the store")
    if (folder / "wandb").exists() and not (folder / "wandb").is_dir():
        raise StoreError(f"{folder / 'wandb'} is no folder, and what wandb keeps offline lies there; remove it")


def settle() -> None:
    """Wait until wandb's service has written and sent everything: `finish` returns earlier."""
    import wandb

    wandb.teardown()


def quiet_settings(*, stats: bool) -> Any:
    import wandb

    return wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,
        save_code=False,
        init_timeout=LOGIN_TIMEOUT_S,
        x_disable_stats=not stats,
    )


def drop_others(folder: Path, own: Path) -> None:
    for other in folder.glob("offline-run-*"):
        if other.resolve() != own.resolve():
            shutil.rmtree(other, ignore_errors=True)


def identity(run: RunDir, config: Mapping[str, Any]) -> dict[str, Any]:
    study = config["study"]
    return {
        "id": wandb_id(study["name"], run.signature()),
        "name": run.path.name,
        "group": study["name"],
        "job_type": job_type(run),
        "tags": tags(config),
        "notes": config.get("notes") or study.get("question") or None,
        "config": {**config, "provenance": _origin(run)},
    }


def wandb_id(study: str, signature: str) -> str:
    """`<study>-<signature>` in 64 characters: a long study name loses its end, the signature its second half."""
    return f"{study[: MAX_ID - 33]}-{signature}"[:MAX_ID]


def job_type(run: RunDir) -> str:
    """`control` or `arm` in a study that has a control, else `train`."""
    record = read_study(run.path.parent.parent, run.path.parent.name)
    controls = {cell["directory"]: cell["control"] for cell in (record or {"cells": []})["cells"]}
    if run.path.name not in controls or not any(controls.values()):
        return "train"
    return "arm" if controls[run.path.name] else "control"


def tags(config: Mapping[str, Any]) -> list[str]:
    found = [config["engine"]["name"], config["sharding"]["strategy"], config["dtype"]["name"]]
    if config["mesh"]["dp_outer"] > 1:
        found.append(OuterStrategy[config["sharding"]["outer"]].hybrid)
    for group, key, rest in (
        ("numerics", "mode", "fast"),
        ("nccl_ub", "mode", "none"),
        ("sharp", "group", "default"),
        ("fault", "name", "none"),
    ):
        if config[group][key] != rest:
            found.append(f"{group}={config[group][key]}")
    return list(dict.fromkeys(tag if len(tag) <= MAX_TAG else f"{tag[: MAX_TAG - 3]}..." for tag in found))


def _origin(run: RunDir) -> dict[str, Any]:
    facts = provenance.read(run.path)
    return {key: facts[key] for key in ORIGIN if key in facts}


def outcome(run: RunDir) -> dict[str, Any]:
    """`result/state` (`done`, `preempted` or `unfinished`) and the run's results, as `harness.store.results` has them.

    Unrecorded values are left out.
    """
    found, summary = results(run), read_summary(run) or {}
    ended = summary.get("step") == found["steps_done"]
    state = summary.get("status", "unfinished") if ended else "unfinished"
    return {f"result/{key}": value for key, value in {"state": state, **found}.items() if value not in (None, "")}
