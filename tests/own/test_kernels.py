"""A program that moves one of torch's switches while it trains: its runs are not held against others'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.own.guide import ROOT, typed

pytestmark = pytest.mark.timeout(900)

CALLBACKS = """\
import torch
from harness.train.callbacks import Callback


class Quiet(Callback):
    def step(self, step, record, engine):
        return {}


class Switches(Callback):
    def step(self, step, record, engine):
        torch.backends.mkldnn.enabled = False
        return {}
"""
SMALL = ("model=tiny", "train.steps=2", "mesh=two", "train.global_batch_size=4", "train.microbatch_size=2")


def test_a_switch_that_a_callback_moves_is_no_fault_and_no_equivalence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CALLBACKS, encoding="utf-8")
    found = []
    for name in ("Quiet", "Switches"):
        root = f"launch.root={name}"
        done = typed(tmp_path, str(ROOT / "run.py"), *SMALL, f"measure.callbacks=[mine:{name}]", root)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(next((tmp_path / name / "adhoc").glob("*/provenance.json")).parent)
    seen = [json.loads((run / "provenance.json").read_text())["kernels"]["mkldnn"] for run in found]
    assert seen == ["True", "True, then False"]
    compared = typed(tmp_path, "-m", "harness", "compare", str(found[1]), str(found[0]))
    assert compared.returncode == 4, compared.stdout
    assert "torch's mkldnn is True, then False" in compared.stdout
