"""Every report in docs/upstream still shows what it claims, on the release that is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron_fsdp")

FOLDER = Path(__file__).parents[2] / "docs" / "upstream"
SHOWS = {
    "adam_first_updates": r"step 1: distance moved, megatron-fsdp / torch = 0\.7350",
    "average_in_collective": r"AttributeError: 'NoneType' object has no attribute 'size'",
    "first_cycle_never_reduces": r"(?s)no_shard: .*by 2\.7e-02.*optim_grads: .*by \d\.\de(-0[678]|\+00)",
    "fp64_main_grads": r"KeyError: torch\.float64",
    "hfsdp_sums_gradients": r"(?s)outer no_shard, .* = 1\.0000.*outer optim, .* = 4\.0000",
    "hybrid_of_one_rescales": r"(?s)1 microbatches: .* = 1\.0000.*2 microbatches: .* = 0\.7500",
    "idle_parameters": r"in order: \[72, 72, 144\]",
    "lone_rank_doubles": r"(?s)optim, 3 .* = (0\.99|1\.0).*optim_grads, 1 .* = (1\.99|2\.0)",
    "no_overlap_grad_reduce": r"(?s)=True: losses off by \d\.\de(-0[678]|\+00).*=False: losses off by 1\.5e-02",
    "no_overlap_param_gather": r"(?s)=True: losses off by \d\.\de(-0[678]|\+00).*=False: losses off by 4\.2e-02",
    "no_units": r"ZeroDivisionError",
    "one_parameter_group": r"\[\(2, 0\.01, 0\.001\)\]",
    "rows_are_cut": r"shape '\[-1, 8\]' is invalid for input of size 30",
    "rowwise_tensor_parallel": r"(?s)ColwiseParallel: built.*RowwiseParallel: AssertionError",
    "wrapping_decays_weights": r"after / before wrapping the optimizer = 0\.99000",
}
"""What a script prints while the release has the fault; it exits with 1 then, but so would one that fails."""


def test_every_script_has_its_claim_and_its_report() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"cpu_stand_in"}
    mine = {name for name in scripts if "megatron_fsdp" in (FOLDER / f"{name}.py").read_text(encoding="utf-8")}
    assert mine == set(SHOWS)
    for name in mine:
        script = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        report = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert len(script.splitlines()) <= 60, name
        assert "harness" not in script
        assert f"`python {name}.py`" in report
        assert re.search(SHOWS[name], report), f"{name}.md does not show what the script shows"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHOWS)
def test_a_script_shows_its_fault(name: str) -> None:
    done = subprocess.run(
        [sys.executable, f"{name}.py"],
        cwd=FOLDER,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert re.search(SHOWS[name], done.stdout), done.stdout
    assert done.returncode == 1
