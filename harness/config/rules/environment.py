"""Rules on this machine before ranks start: scheduler, optional packages."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator

from harness.config.errors import Violation
from harness.config.rules.request import Request, refusal, rule
from harness.config.schema import Backend, WandbMode
from harness.config.wandb_mode import wandb_mode
from harness.store.provenance import versions

scheduler_exists = refusal(
    lambda c: c.cluster.backend is Backend.slurm and shutil.which("sbatch") is None,
    "cluster.backend",
    "there is no sbatch on PATH",
    "cluster=local, or a login node",
)


@rule()
def wandb_can_start(request: Request) -> Iterator[Violation]:
    try:
        mode = wandb_mode(request.config.wandb.mode, os.environ)
    except ValueError as error:
        yield request.wrong("wandb.mode", str(error), fix="unset WANDB_MODE, or wandb=disabled")
        return
    if mode is not WandbMode.disabled and importlib.util.find_spec("wandb") is None:
        fix = "wandb=disabled, or pip install wandb"
        yield request.wrong("wandb.mode", "the package wandb is not installed", fix=fix)


@rule()
def engine_is_installed(request: Request) -> Iterator[Violation]:
    engine = request.config.engine.name
    can = request.can
    wanted = can.package
    if wanted is None:
        return
    name, _, version = wanted.partition("==")
    found = versions((name,)).get(name)
    if found != version:
        problem = f"needs {wanted}; " + (f"{name} {found} is installed" if found else f"{name} is not installed")
        yield Violation(f"engine={engine.name}", problem, fix=f"make peers, or {can.install}")
