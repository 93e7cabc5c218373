"""docs/foreign.md: its program runs as printed, and its commands read what that left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "foreign.md").read_text(encoding="utf-8")
PROGRAM, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
"""The first; the others are run by tests/capture, with what they need."""


def test_the_program_runs_and_its_runs_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("fsdp2", "ddp"):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(batch: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            loss: Tensor = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        loader = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))
        names = {"model": model, "optimizer": optimizer, "loader": loader, "train_step": train_step}
        exec(f"{PROGRAM.replace('/fsdp2', f'/{name}')}\nrun.close()", names)
    for command in re.findall(r"^python -m harness (.*)$", PAGE, re.MULTILINE):
        assert main(command.split()) == 0, command
    told = capsys.readouterr().out
    assert "EQUAL: mine/fsdp2 against mine/ddp" in told
    assert "another program" in told
