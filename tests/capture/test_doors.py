"""Guides of docs/foreign.md on released packages, run as they are printed: on one process, and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.parity.compare import compare
from harness.parity.outcome import Outcome
from harness.parity.record import load

ROOT = Path(__file__).parents[2]
GUIDES = {
    found.group(1): block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "foreign.md").read_text(encoding="utf-8"), re.S)
    if (found := re.search(r'f"runs/(\w+)/', block))
}
WEIGHTS = """
import hashlib
digest = hashlib.sha256()
for param in locals().get("net", locals().get("model")).parameters():
    digest.update(param.detach().numpy().tobytes())
print(digest.hexdigest())
"""


def _door(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: make models"))


def run(script: str, folder: Path, ranks: int) -> str:
    (folder / "script.py").write_text(script, encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    if "deepspeed" in script and ranks == 1:
        env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    command = [sys.executable, *torchrun, "script.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_door_has_a_guide() -> None:
    assert GUIDES.keys() == {"transformers", "lightning", "accelerate", "deepspeed"}


@pytest.mark.parametrize("name", map(_door, GUIDES))
def test_a_guide_runs_as_printed(name: str, tmp_path: Path) -> None:
    """Two ranks are EQUIVALENT to one, and the program trains the same bits without its watch."""
    run(GUIDES[name], tmp_path, 2)
    watched = run(GUIDES[name] + WEIGHTS, tmp_path, 1)
    off = re.sub(r"^run = watch\(.*$", "from unittest.mock import Mock; run = Mock()", GUIDES[name], flags=re.M)
    off = re.sub(r"callbacks=\[.*?\]", "callbacks=[]", off)
    assert run(off + WEIGHTS, tmp_path, 1).split()[-1] == watched.split()[-1]
    one, two = (load(tmp_path / "runs" / name / ranks) for ranks in ("1", "2"))
    assert one.problems == two.problems == ()
    assert one.length == two.length == 12
    assert one.captures.keys() == {1, 10}
    verdict = compare(two.path, one.path)
    assert verdict.outcome in (Outcome.EQUIVALENT, Outcome.EQUAL), verdict.sentence
    assert "not known" not in verdict.sentence
