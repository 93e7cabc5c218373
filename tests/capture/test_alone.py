"""`harness.capture` needs torch, numpy and safetensors, and nothing else: neither the front end nor the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.abc, sys

ABSENT = (
    "hydra", "omegaconf", "pydantic", "yaml", "xxhash", "psutil", "scipy", "submitit", "jinja2", "wandb",
    "harness.fsdp", "harness.config", "harness.engines", "harness.train", "harness.parity", "harness.cli",
)

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"{each}." for each in ABSENT)) or name in ABSENT:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch
from harness.capture import watch

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = watch(model, optimizer, sys.argv[1])
for _ in range(3):
    batch = torch.ones(4, 3)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss=loss, data=batch)
"""


def test_a_program_without_the_rest_of_this_package_is_watched(tmp_path: Path) -> None:
    """Its process ends the run, which needs no call."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "study" / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "incomplete" not in done.stderr
    assert '"state": "done"' in (tmp_path / "study" / "run" / "status.json").read_text()
