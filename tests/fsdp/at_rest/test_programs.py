"""Ordinary programs over parameters that are sharded at rest do what one process does, under every strategy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import fully_shard_model, fully_shard_optimizer
from harness.fsdp.ragged import operations
from harness.fsdp.runtime import gradient_sync, installation
from harness.fsdp.storage import at_rest
from harness.fsdp.update import flat_step
from tests.fsdp.at_rest.programs import PROGRAMS, WORLD, Block, Net, data, run_plain, run_sharded
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import once
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks

SLIPS = {
    "edits uncounted": Slip(operations, "_count_edit", "torch.autograd.graph.increment_version(", "len("),
    "never installed": Slip(installation.WeightInstaller, "bring_up_to_date", "if any(", "if not any("),
    "kept lost": Slip(gradient_sync.GradientSync, "_install", "shard.add_(flat)", "pass"),
    "all have gradients": Slip(at_rest.ShardedParameters, "install_grads", "index in gradients.unused", "False"),
    "replaced lost": Slip(at_rest.ShardedParameters, "take_grad", "own.copy_(given)", "pass"),
    "edits of flat pieces uncounted": Slip(
        flat_step.FlatStep, "_put_state", "torch.autograd.graph.increment_version(piece.flat)", "pass"
    ),
    "one counter": Slip(flat_step.FlatStep, "_put_state", "number.fill_(held[key])", "number.zero_()"),
    "state stays": Slip(flat_step.FlatStep, "_take_state", "fill(view, value)", "pass"),
    "flags stay": Slip(at_rest.ShardedParameters, "show", "coming.requires_grad_(leaving.requires_grad)", "pass"),
}
OF_PROGRAMS = [
    ("edits uncounted", "An edit at rest is not counted", "clamped"),
    ("never installed", "Weights written at rest are installed where nothing was", "plain loop"),
    ("kept lost", "A further backward forgets what .grad held", "further backward"),
    ("all have gradients", "An unused parameter has a gradient of zeros", "gradients read and edited"),
    ("replaced lost", "A gradient that was replaced is not stepped", "gradients read and edited"),
    ("edits of flat pieces uncounted", "A flat step does not count as an edit", "bound loop"),
    ("one counter", "Counters of parameters stay behind those of pieces", "saved and loaded"),
    ("state stays", "State that was loaded is not stepped with", "saved and loaded"),
    ("flags stay", "Freezing a sharded parameter has no effect", "frozen for a while"),
]


def run_all(rank: int, names: tuple[str, ...], strategies: tuple[str, ...], slip: str = "") -> dict[str, str]:
    """Differences by strategy and program."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, mock.patch.object(at_rest, "ENABLED", True):
        if slip:
            SLIPS[slip].put(patch)
        for strategy in strategies:
            for name in names:
                try:
                    found[f"{strategy} {name}"] = differs(run_sharded(rank, name, strategy), run_plain(name))
                except Exception as error:
                    found[f"{strategy} {name}"] = f"{type(error).__name__}: {error}"
    return found


def differs(ours: tuple[list[Any], list[Tensor]], right: tuple[list[Any], list[Tensor]]) -> str:
    for which, (a, b) in enumerate(zip(ours, right, strict=True)):
        if len(a) != len(b):
            return f"{len(a)} and {len(b)} things"
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            same = torch.allclose(one, other, atol=2e-5) if isinstance(one, Tensor) else one == other
            if not same:
                return f"{('seen', 'weight')[which]} {place}: {one} and {other}"[:300]
    return ""


@once
def ran(strategy: str) -> list[dict[str, str]]:
    return run_ranks(run_all, WORLD, tuple(PROGRAMS), (strategy,))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_one_process_does(name: str, strategy: str) -> None:
    assert [each[f"{strategy} {name}"] for each in ran(strategy)] == ["", ""]


@pytest.mark.parametrize("slip", each("sharded parameters", [(name, told) for name, told, _ in OF_PROGRAMS]))
def test_a_slip_is_found(slip: str) -> None:
    program = next(program for name, _, program in OF_PROGRAMS if name == slip)
    found = run_ranks(run_all, WORLD, (program,), ("optim", "optim_grads_params"), slip)
    assert any(told for of_rank in found for told in of_rank.values())


def refused(rank: int, strategy: str) -> dict[str, str]:
    """What is told of programs that cannot be right."""
    found: dict[str, str] = {}
    with mock.patch.object(at_rest, "ENABLED", True):
        module = Net()
        early, kept = torch.optim.SGD(module.parameters(), lr=0.1), list(module.parameters())
        model = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
        model(data(rank, 1)).sum().backward()
        muon = torch.optim.Muon([p for p in module.parameters() if p.dim() == 2])
        acts = {
            "early": early.step,
            "kept": lambda: kept[0].sum(),
            "elsewhere": lambda: nn.functional.linear(torch.ones(2, 7), module.blocks[0].up.weight),  # type: ignore[union-attr]
            "muon": lambda: fully_shard_optimizer(model, muon),
        }
        for name, act in acts.items():
            try:
                act()
                found[name] = ""
            except Exception as error:
                found[name] = str(error)
        model.close()
    return found


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_what_cannot_be_right_is_refused_by_name(strategy: str) -> None:
    for found in run_ranks(refused, WORLD, strategy):
        assert "parameter scale" in found["early"]
        assert "fully_shard_optimizer(model, optimizer)" in found["early"]
        assert "parameter scale" in found["kept"]
        assert "model.unsharded()" in found["kept"]
        assert "blocks.0.up.weight" in found["elsewhere"]
        assert "`fully_shard` both together" in found["elsewhere"]
        assert "Muon cannot step sharded parameters" in found["muon"]
        assert "zero_dp_strategy=0" in found["muon"]
