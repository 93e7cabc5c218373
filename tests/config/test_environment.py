"""What the machine must offer, found out before ranks start, and nothing left behind."""

from __future__ import annotations

import pytest

from harness.config.errors import BadRequest
from harness.config.rules import environment
from tests.support.composing import compose


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    with pytest.raises(BadRequest, match="no sbatch on PATH"):
        compose(["cluster=slurm"])
    compose(["cluster=slurm", "launch.dry_run=true"])
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BadRequest, match="wandb is not installed"):
        compose(["wandb=offline"])


def test_the_variable_of_a_copy_is_one_of_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(BadRequest, match="WANDB_MODE=sometimes is none of disabled, offline, online"):
        compose(["wandb=online"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    compose(["wandb=online"])
