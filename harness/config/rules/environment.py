"""Rules on this machine before ranks start: scheduler, optional packages."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator

from harness.config.derived import wandb_mode
from harness.config.errors import Violation
from harness.config.rules.request import Request, refusal, rule
from harness.config.schema import Backend, WandbMode
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
    name, _, version = (request.can.package or "").partition("==")
    found = versions((name,)).get(name) if name else ""
    if found != version:
        problem = f"needs {request.can.package}; {name} {found or 'is not'} {'is ' * bool(found)}installed"
        fix = f"make peers, or pip install {request.can.package}"
        yield Violation(f"engine={request.config.engine.name.name}", problem, fix=fix)
