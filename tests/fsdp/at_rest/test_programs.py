"""Ordinary programs over parameters that are sharded at rest do what one process does, under every strategy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import build, fully_shard_model, fully_shard_optimizer
from harness.fsdp.ragged import RaggedTensor, operations, tensor
from harness.fsdp.runtime import gradient_sync, weights
from harness.fsdp.storage import at_rest, param_group
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.update import flat_step
from tests.fsdp.at_rest.programs import PROGRAMS
from tests.fsdp.flat_step.world import WORLD, Block, Net, data, run
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import once
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks

SLIPS = {
    "edits uncounted": Slip(operations, "_count_edit", "torch.autograd.graph.increment_version(", "len("),
    "never installed": Slip(weights.Weights, "bring_up_to_date", "if any(", "if not any("),
    "kept lost": Slip(gradient_sync.GradientSync, "_install", "shard.add_(flat)", "pass"),
    "kept overwritten": Slip(at_rest.ShardedParameters, "leave_kept_grads", "getrefcount(held) > _UNKEPT", "False"),
    "views overwritten": Slip(at_rest.ShardedParameters, "leave_kept_grads", "gradients.renew()", "pass"),
    "all have gradients": Slip(at_rest.ShardedParameters, "install_grads", "index in gradients.unused", "False"),
    "replaced lost": Slip(at_rest.ShardedParameters, "_take", "own.copy_(given)", "pass"),
    "edits of flat pieces uncounted": Slip(
        flat_step.FlatStep, "_put_state", "torch.autograd.graph.increment_version(piece.flat)", "pass"
    ),
    "one counter": Slip(flat_step.Counter, "tell_params", "self.of_pieces, 0", "self.of_pieces * 0, 0"),
    "state stays": Slip(flat_step.FlatStep, "_take_state", "fill(view, value)", "pass"),
    "own loss alone": Slip(tensor._IntoLoss, "backward", "dist.all_reduce(", "len("),
    "torch mixes": Slip(tensor.Replicated, "__torch_function__", "each.requires_grad", "False"),
    "loss alone": Slip(at_rest.ShardedParameters, "add_own_grads", "self._grad(index).add_(given)", "pass"),
    "kept by reference": Slip(gradient_sync.GradientSync, "_begin_backward", "shard.clone()", "shard"),
    "unshown": Slip(at_rest.ShardedParameters, "show", "held[name] = coming", "pass"),
    "hooks stay": Slip(at_rest._Hooked, "register_hook", "self._unsharded()", "self"),
    "never finished": Slip(gradient_sync.GradientSync, "_end_backward", "self.finish()", "pass"),
    "kept and shown": Slip(gradient_sync.GradientSync, "_begin_backward", "each.drop_grads()", "pass"),
    "pieces apart": Slip(flat_step.Piece, "__post_init__", ".detach().requires", ".detach().clone().requires"),
    "replaced unseen": Slip(flat_step.FlatStep, "_take_gradients", "given is not sharded.grads[place[1]]", "False"),
    "each rank's penalty": Slip(tensor._IntoLoss, "backward", "grad / ctx.mesh.size()", "grad"),
    "torch's DTensors": Slip(
        tensor.Replicated,
        "__torch_dispatch__",
        "tree_map_only(DTensor, cls.of, func(*args_, **kwargs_))",
        "func(*args_, **kwargs_)",
    ),
    "weights registered": Slip(
        param_group.ParamGroup,
        "_build_main_weights",
        "if kept is not None and is_sent and may_share",
        "if kept is not None and is_sent",
    ),
    "gradients registered": Slip(Gradients, "__init__", " or (SHARD in cuts.own and self.memory.registers)", ""),
    "flags stay": Slip(at_rest.ShardedParameters, "show", "coming.requires_grad_(leaving.requires_grad)", "pass"),
}
OF_REGISTERED = {
    "weights registered": "Sharded parameters view a user buffer",
    "gradients registered": "Gradients of sharded parameters view a user buffer",
}
OF_PROGRAMS = [
    ("edits uncounted", "An edit at rest is not counted", "clamped"),
    ("never installed", "Weights written at rest are installed where nothing was", "plain loop"),
    ("kept lost", "A further backward forgets what .grad held", "further backward"),
    ("kept overwritten", "A gradient that the program keeps is overwritten by the next one", "gradients kept"),
    ("views overwritten", "Views of gradients that the program keeps see the next ones", "gradients kept"),
    ("all have gradients", "An unused parameter has a gradient of zeros", "gradients read and edited"),
    ("loss alone", "The gradient of a penalty of sharded parameters is dropped", "penalties"),
    ("kept by reference", "What .grad held is what the next backward brings", "further backward"),
    ("unshown", "Modules keep the parameters that they had", "plain loop"),
    ("hooks stay", "Hooks of sharded parameters are never called", "hooked"),
    ("never finished", "A synchronising backward does not finish gradients", "plain loop"),
    ("kept and shown", "What .grad held counts twice in a further backward", "further backward"),
    ("pieces apart", "Flat pieces are copies of main weights", "bound loop"),
    ("replaced unseen", "A replaced gradient is not that of a flat piece", "gradients read and edited"),
    ("each rank's penalty", "A penalty in a loss counts once for each rank", "penalties"),
    ("torch's DTensors", "What is computed of a penalty is torch's own DTensor", "penalties"),
    ("own loss alone", "A penalty that is multiplied with a loss has that rank's gradient alone", "penalties"),
    ("torch mixes", "A penalty of sharded weights stays a DTensor in a loss", "penalties"),
    ("replaced lost", "A gradient that was replaced is not stepped", "gradients read and edited"),
    ("edits of flat pieces uncounted", "A flat step does not count as an edit", "bound loop"),
    ("one counter", "Counters of parameters stay behind those of pieces", "saved and loaded"),
    ("state stays", "State that was loaded is not stepped with", "saved and loaded"),
    ("flags stay", "Freezing a sharded parameter has no effect", "frozen for a while"),
]


Told = dict[tuple[str, str], list[str]]
"""Differences by strategy and program."""


def run_all(rank: int, names: tuple[str, ...], strategies: tuple[str, ...], slip: str = "") -> Told:
    with pytest.MonkeyPatch.context() as patch:
        if slip:
            SLIPS[slip].put(patch)
        return {
            (each, name): run(rank, STRATEGIES.index(each), PROGRAMS[name]) for each in strategies for name in names
        }


@once
def ran(strategy: str) -> list[Told]:
    return run_ranks(run_all, WORLD, tuple(PROGRAMS), (strategy,))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_one_process_does(name: str, strategy: str) -> None:
    assert [told[strategy, name] for told in ran(strategy)] == [[], []]


@pytest.mark.parametrize("slip", each("sharded parameters", [(name, told) for name, told, _ in OF_PROGRAMS]))
def test_a_slip_is_found(slip: str) -> None:
    program = next(program for name, _, program in OF_PROGRAMS if name == slip)
    found = run_ranks(run_all, WORLD, (program,), ("optim", "optim_grads_params"), slip)
    assert any(told for of_rank in found for told in of_rank.values())


def moving(rank: int, strategy: str) -> tuple[int, int]:
    """How often main gradients find other memory in loops that keep none, and in one that does."""
    with mock.patch.object(Gradients, "renew", autospec=True, side_effect=Gradients.renew) as renew:
        for name in ("clipped", "gradients read and edited", "accumulated"):
            run(rank, STRATEGIES.index(strategy), PROGRAMS[name])
        usual = renew.call_count
        run(rank, STRATEGIES.index(strategy), PROGRAMS["gradients kept"])
    return usual, renew.call_count


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_main_gradients_stay_where_they_are_unless_views_of_them_are_kept(strategy: str) -> None:
    for usual, kept in run_ranks(moving, WORLD, strategy):
        assert usual == 0
        assert kept > 0


def registering(rank: int, strategy: str, slip: str = "") -> list[str]:
    """What views memory that collectives move, where that is registered; and programs that are not right."""
    made: list[Tensor] = []

    class Registered(BucketMemory):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more | {"registers": True})

        def persistent(self, numel: int, dtype: torch.dtype) -> Tensor:
            made.append(super().persistent(numel, dtype))
            return made[-1]

        def sums(self, numel: int, dtype: torch.dtype) -> Tensor:
            made.append(super().sums(numel, dtype))
            return made[-1]

        def transient(self, numel: int, dtype: torch.dtype) -> Tensor:
            made.append(super().transient(numel, dtype))
            return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "BucketMemory", Registered)
        if slip:
            SLIPS[slip].put(patch)
        found = [name for name in ("clipped", "averaged") if run(rank, STRATEGIES.index(strategy), PROGRAMS[name])]
        made.clear()
        model = fully_shard_model(Net(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
        model(data(1, rank).float()).sum().backward()
        moved = {each.untyped_storage()._cdata for each in made}
        shown = [(n, t) for n, p in model.named_parameters() for t in (p, p.grad) if isinstance(t, RaggedTensor)]
        found += [name for name, each in shown if each.to_local().untyped_storage()._cdata in moved]
        model.close()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_sharded_parameter_views_a_user_buffer(strategy: str) -> None:
    assert run_ranks(registering, WORLD, strategy) == [[], []]


@pytest.mark.parametrize("slip", each("sharded parameters beside user buffers", OF_REGISTERED.items()))
def test_a_slip_in_user_buffers_is_found(slip: str) -> None:
    assert all(run_ranks(registering, WORLD, "optim", slip))


def refused(rank: int, strategy: str) -> dict[str, str]:
    """What is told of programs that cannot be right."""
    found: dict[str, str] = {}
    module = Net()
    early, kept = torch.optim.SGD(module.parameters(), lr=0.1), list(module.parameters())
    model = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    second = fully_shard_model(Net(), fsdp_unit_modules=[Block])
    model(data(1, rank).float()).sum().backward()
    muon = torch.optim.Muon([p for p in module.parameters() if p.dim() == 2])
    acts = {
        "early": early.step,
        "kept": lambda: kept[0].sum(),
        "elsewhere": lambda: nn.functional.linear(torch.ones(2, 7), module.blocks[0].up.weight),  # type: ignore[union-attr]
        "muon": lambda: fully_shard_optimizer(model, muon),
        "none": lambda: fully_shard_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters())),
        "two": lambda: fully_shard_optimizer(torch.optim.SGD([*module.parameters(), *second.parameters()])),
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
        assert "parameter gain" in found["early"]
        assert "fully_shard_optimizer(model, optimizer)" in found["early"]
        assert "parameter gain" in found["kept"]
        assert "model.unsharded()" in found["kept"]
        assert "blocks.0.up.weight" in found["elsewhere"]
        assert "`fully_shard` both together" in found["elsewhere"]
        assert "Muon cannot step sharded parameters" in found["muon"]
        assert "zero_dp_strategy=0" in found["muon"]
        assert "no parameter of SGD belongs to a sharded model" in found["none"]
        assert "2 sharded models: call fully_shard_optimizer(model, optimizer) once with each" in found["two"]
