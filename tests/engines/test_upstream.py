"""Every report in docs/records/upstream still shows what it claims, on the release that is installed."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.support.forking import fork_ranks

pytest.importorskip("megatron_fsdp")

FOLDER = Path(__file__).parents[2] / "docs" / "records" / "upstream"
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
WORKERS = 3
"""Scripts that run side by side: their ranks wait for each other more than they work."""


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


def run_scripts(worker: int, folder: Path) -> None:
    """In a fork: a share of the scripts, each in a fork of this one, which has imported what they import."""
    import_module("megatron_fsdp")
    context = multiprocessing.get_context("fork")
    for name in list(SHOWS)[worker::WORKERS]:
        process = context.Process(target=run_script, args=(name, folder))
        process.start()
        process.join()


def run_script(name: str, folder: Path) -> None:
    """The script as it stands, but for its ranks, which are forks too."""
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{stream}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(FOLDER)
    sys.path.insert(0, str(FOLDER))
    torch.multiprocessing.spawn = partial(torch.multiprocessing.start_processes, start_method="fork")
    try:
        runpy.run_path(f"{name}.py", run_name="__main__")
    except SystemExit as end:
        (folder / f"{name}.code").write_text(str(end.code))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every script printed, and its exit code, if it came to its end."""
    folder = tmp_path_factory.mktemp("upstream")
    fork_ranks(run_scripts, WORKERS, folder, seconds=800)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHOWS)
def test_a_script_shows_its_fault(shown: Path, name: str) -> None:
    told = [shown / f"{name}.{what}" for what in ("out", "err", "code")]
    check(name, *(path.read_text() if path.exists() else "" for path in told))


def check(name: str, out: str, err: str, code: str) -> None:
    assert "Traceback" not in err, err[-2000:]
    assert re.search(SHOWS[name], out), out
    assert code == "1", err[-2000:]
