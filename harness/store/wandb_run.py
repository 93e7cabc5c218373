"""One run of the store as one run of wandb, while it trains and afterwards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.store import provenance
from harness.store.errors import StoreError
from harness.store.fields import synced
from harness.store.files import private_folder
from harness.store.reading import checked
from harness.store.results import results
from harness.store.rundir import CONFIG, RunDir, read_summary
from harness.store.shapes import Maybe, Shape

VARIABLE = "WANDB_MODE"
MAX_ID = 64
LOGIN_TIMEOUT_S = 30


SENT: Shape = {
    **{group: {"name": str} for group in ("study", "engine", "dtype")},
    "wandb": {"entity": Maybe(str), "project": str},
    "sharding": {"strategy": str},
}
ORIGIN = ("sources_digest", "versions", "git", "cpu_model", "device", "hosts")
Log = Callable[..., None]
"""Takes a line of the record, and further numbers of its step under their own names."""


class WandbFailed(Exception):
    """wandb did not take a run; the message is its own."""


@contextmanager
def opened(folder: Path, mode: Any, *, live: bool = False, **arguments: Any) -> Iterator[Any]:
    """A run of wandb, with its files under `folder`; it must be finished within. `settle` waits for what it sends.

    Offline, its file then replaces those of earlier times. Args: live: the run trains now, so that the machine's load
    is relevant. Raises `OSError`: the folder is not writable. `WandbFailed` in place of any error of wandb: no network,
    a refused key, an invalid name.
    """
    import wandb

    private_folder(folder / "wandb")
    asked = os.environ.pop(VARIABLE, None)  # `mode` has been made of it; wandb would read it again, and refuse OFFLINE
    try:
        quiet: Any = {"console": "off", "silent": True, "disable_git": True, "save_code": False}
        settings = wandb.Settings(**quiet, init_timeout=LOGIN_TIMEOUT_S, x_disable_stats=not live)
        run = wandb.init(**arguments, mode=mode, dir=str(folder), resume="allow", settings=settings)
    except Exception as error:
        raise WandbFailed(_told(error)) from error
    finally:
        if asked is not None:
            os.environ[VARIABLE] = asked
    own = Path(run.dir).parent
    try:
        yield run
    except BaseException as error:
        run.finish(exit_code=1)
        if isinstance(error, StoreError) or not isinstance(error, Exception):
            raise
        raise WandbFailed(_told(error)) from error
    if mode == "offline":
        for other in (folder / "wandb").glob("offline-run-*"):
            if other.resolve() != own.resolve():
                shutil.rmtree(other, ignore_errors=True)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def copying(run: RunDir, mode: str, *, live: bool, more: Mapping[str, Any]) -> Iterator[Log]:
    """Open, or online resume, the run with this signature's id; at the end, send its results and `more`.

    Raises `WandbFailed`: wandb did not take it. `StoreError`: a file of the run is damaged.
    """
    config = checked(run.config(), SENT, str(run.path / CONFIG))
    facts, study = provenance.read(run.path), config["study"]
    with opened(
        run.path,
        mode,
        live=live,
        id=wandb_id(study["name"], run.signature()),
        name=run.path.name,
        group=study["name"],
        tags=[config["engine"]["name"], config["sharding"]["strategy"], config["dtype"]["name"]],
        notes=config.get("notes") or study.get("question") or None,
        config={**config, "provenance": {key: facts[key] for key in ORIGIN if key in facts}},
        entity=config["wandb"]["entity"],
        project=config["wandb"]["project"],
    ) as sent:
        for prefix in ("train", "parity"):
            sent.define_metric(f"{prefix}/*", step_metric="train/step")

        def log(record: Mapping[str, Any], beside: Mapping[str, float] | None = None) -> None:
            values = {f"train/{path}": value for path, value in synced(record).items()}
            sent.log({**values, **(beside or {})}, step=record["step"])

        yield log
        found = outcome(run)
        sent.summary.update({**found, **more})
        if found["result/state"] == "preempted":
            sent.mark_preempting()
        sent.finish(exit_code=int(found["result/state"] != "done"))


def settle() -> None:
    """Wait until wandb's service has written and sent everything: `finish` returns earlier."""
    import wandb

    wandb.teardown()


def wandb_id(study: str, signature: str) -> str:
    """`<study>-<signature>` in 64 characters: a long study name loses its end, the signature its second half."""
    return f"{study[: MAX_ID - 33]}-{signature}"[:MAX_ID]


def outcome(run: RunDir) -> dict[str, Any]:
    """`result/state` (`done`, `preempted` or `unfinished`) and the run's results, as `harness.store.results` has them.

    Unrecorded values are left out.
    """
    found, summary = results(run), read_summary(run) or {}
    ended = summary.get("step") == found["steps_done"]
    state = summary.get("status", "unfinished") if ended else "unfinished"
    return {f"result/{key}": value for key, value in {"state": state, **found}.items() if value not in (None, "")}
