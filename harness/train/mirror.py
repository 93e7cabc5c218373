"""A copy of the record in Weights & Biases. The record is the truth; the mirror never stops or changes a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.config.schema import Config, WandbMode
from harness.store.fields import mirrored

log = logging.getLogger(__name__)

MAX_ID = 64
"""Longest run id the server takes."""


class Mirror:
    """Sends each line of the record. The first failure is logged once and ends the mirror, not the run."""

    def __init__(self, run: Any | None) -> None:
        """Wrap an open wandb run, or None for a mirror that does nothing."""
        self._run = run

    @classmethod
    def disabled(cls) -> Mirror:
        """A mirror that does nothing."""
        return cls(None)

    @classmethod
    def open(cls, config: Config, run_dir: Path) -> Mirror:
        """Open, or take up, the run with this cell's id; on any failure a mirror that does nothing."""
        if config.wandb.mode is WandbMode.disabled:
            return cls.disabled()
        try:
            return cls(_start(config, run_dir))
        except Exception as error:
            _warn("could not start", error)
            return cls.disabled()

    def log(self, record: Mapping[str, Any]) -> None:
        """Send the mirrored metrics of one line, nested ones as `train/time/data_s`; null ones are left out."""
        if self._run is None:
            return
        try:
            self._run.log({f"train/{path}": value for path, value in mirrored(record).items()})
        except Exception as error:
            _warn("stopped", error)
            self._run = None

    def close(self) -> None:
        """Finish the mirror's run; a second call does nothing."""
        run, self._run = self._run, None
        try:
            if run is not None:
                run.finish(quiet=True)
        except Exception as error:
            _warn("did not finish", error)


def mirror_id(study: str, signature: str) -> str:
    """`<study>-<signature>` in 64 characters: a long study name loses its end, the signature its second half."""
    return f"{study[: MAX_ID - 33]}-{signature}"[:MAX_ID]


def _start(config: Config, run_dir: Path) -> Any:
    import wandb

    from harness.store.identity import signature
    from harness.store.rundir import RunDir

    frozen = RunDir(run_dir).config()
    run = wandb.init(
        project=config.wandb.project,
        entity=config.wandb.entity,
        mode="online" if config.wandb.mode is WandbMode.online else "offline",
        id=mirror_id(config.study.name, signature(frozen)),
        name=run_dir.name,
        group=config.study.name,
        resume="allow",
        dir=str(run_dir),
        config=frozen,
        settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, init_timeout=30),
    )
    run.define_metric("train/step")
    run.define_metric("train/*", step_metric="train/step")
    return run


def _warn(what: str, error: Exception) -> None:
    log.warning("wandb mirror %s, training goes on: %s: %s", what, type(error).__name__, error)
