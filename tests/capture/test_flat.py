"""Programs that keep parameters in flat buffers (FSDP1, DeepSpeed, Megatron-FSDP): each tensor is put in its place."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter

from harness.parity.compare import compare
from harness.parity.outcome import Outcome
from harness.parity.record import load
from tests.capture import loops
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

AT = 10
SGD = ("megatron",)
"""Layouts whose optimizer takes a step before the first: under Adam they train otherwise, and say so."""


def _layout(name: str) -> Any:
    package = loops.FLAT[name].needs
    absent = bool(package) and find_spec(package) is None
    return pytest.param(name, marks=pytest.mark.skipif(absent, reason=f"needs {package}: make peers"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "study"
    for name, optimizer in (("adamw", torch.optim.AdamW), ("sgd", loops.sgd)):
        run_ranks(partial(loops.train, optimizer=optimizer), 1, "single", folder / name)
    return folder


def _pieces(model: nn.Module) -> list[Tensor]:
    """This rank's part of the second block's last weight, in the memory that an optimizer steps."""
    found = []
    for name, param in model.named_parameters():
        if isinstance(param, FlatParameter) and "blocks.1." in name:
            info = param._shard_param_infos[param._fqns.index("down.weight")]
            if info.in_shard:
                found.append(param[info.offset_in_shard :][: info.numel_in_shard])
        elif name.replace("_fsdp_wrapped_module.", "").endswith("blocks.1.down.weight"):
            found.append(_kept(param))
    return found


def _kept(param: Any) -> Tensor:
    if getattr(param, "_hp_mapping", None) is not None:
        return param._hp_mapping.get_hp_fragment()  # type: ignore[no-any-return] # of a package without types
    if hasattr(param, "ds_id"):
        from deepspeed.utils import safe_get_local_fp32_param

        return safe_get_local_fp32_param(param)  # type: ignore[no-any-return] # of a package without types
    return getattr(param, "_local_tensor", param)


def moved(step: int, model: nn.Module, optimizer: Any) -> None:
    if step == AT:
        with torch.no_grad():
            for piece in _pieces(model):
                piece.mul_(1.01)


@pytest.mark.parametrize("name", map(_layout, loops.FLAT))
def test_a_program_with_flat_buffers(name: str, single: Path, tmp_path: Path) -> None:
    """Watched it trains the same bits, is EQUIVALENT to one process, and a fault is named where it was put."""
    optimizer, control = (loops.sgd, "sgd") if name in SGD else (torch.optim.AdamW, "adamw")
    options = {"optimizer": optimizer}
    jobs = [
        (loops.train, (name, path), options | more)
        for path, more in (
            (tmp_path / "study" / "right", {}),
            (None, {}),
            (tmp_path / "study" / "faulty", {"after_update": moved}),
        )
    ]
    for watched, alone, _ in run_ranks(loops.everywhere, loops.FLAT[name].ranks, jobs):
        assert watched == alone
    record = load(tmp_path / "study" / "right")
    assert record.problems == ()
    assert record.summary["unplaced"] == {}
    assert record.captures[1].tensors.keys() == load(single / control).captures[1].tensors.keys()
    verdict = compare(record.path, single / control)
    assert verdict.outcome in (Outcome.EQUIVALENT, Outcome.EQUAL), verdict.sentence
    assert record.stream is not None
    local, reduced = record.stream.column("local_0"), record.stream.column("reduced_0")
    if name != "fsdp1_flat":  # a gradient of nobody's parameter
        assert abs(local - reduced).max() < 1e-5 * abs(reduced).max()
    wrong = compare(tmp_path / "study" / "faulty", single / control)
    assert wrong.outcome is Outcome.DIFFERENT, wrong.sentence
    for word in (f"at step {AT}, ", "blocks.1.down.weight", "optimizer"):
        assert word in wrong.sentence


MUTANTS = slips(
    """
    range of a flat parameter: Each rank's range begins at nought
        capture.shards._of_flat: start, stop + 1, begin => 0, stop + 1 - start, begin
    views of a flat parameter: A view is cut where the flat parameter is
        capture.shards._of_flat: begin if params is None else 0 => begin
    """
)


def mutated(rank: int, name: str, path: Path) -> None:
    with MUTANTS[name].patched():
        loops.train(rank, "fsdp1", path)


@pytest.mark.parametrize("name", each("Shards in flat buffers", MUTANTS))
def test_a_mutant_is_found(name: str, single: Path, tmp_path: Path) -> None:
    run_ranks(mutated, 2, name, tmp_path / "study" / "wrong")
    verdict = compare(tmp_path / "study" / "wrong", single / "adamw")
    assert verdict.outcome not in (Outcome.EQUIVALENT, Outcome.EQUAL)
