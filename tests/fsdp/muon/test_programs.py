"""Programs with matrix optimizers: state goes from any layout to any other; what cannot be right is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from harness.fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from harness.muon import MuonWithAdamW
from tests.fsdp.muon import nets
from tests.fsdp.muon.nets import STEPS, Case, sharded, train, trained
from tests.support.spawn import run_ranks

# -- another layout goes on --------------------------------------------------------------------------------------------

LAYOUTS = [
    Case(4, maker="one"),
    Case(4, "optim", 2, "optim", maker="one"),
    Case(2, "no_shard", tp=2, maker="one"),
    Case(4, "optim_grads_params", 2, maker="one", policy="bf16"),
]


def moved(rank: int, folder: str, pairs: list[tuple[Case, Case]]) -> list[list[str]]:
    """Differences from one process of trainings that are saved under one layout and go on under another."""
    found = []
    for place, (before, after) in enumerate(pairs):
        path = Path(folder) / str(place)
        model, (optimizer,) = sharded(before)
        train(model, [optimizer], range(2))
        save({"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
        model.close()
        model, (optimizer,) = sharded(after)
        held = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        load(held, checkpoint_id=path)
        model.load_state_dict(held["model"])
        set_optimizer_state_dict(model, optimizer, held["optimizer"])
        train(model, [optimizer], range(2, STEPS))
        found.append(nets.differences(trained(model, [optimizer]), nets.plain(after)))
        model.close()
    return found


def test_state_goes_from_any_layout_to_any_other(tmp_path: Path) -> None:
    pairs = list(itertools.permutations(LAYOUTS, 2))
    others = [replace(each, maker=maker) for maker in ("Shampoo", "Adafactor") for each in LAYOUTS[:3]]
    pairs += [(one, other) for one, other in itertools.permutations(others, 2) if one.maker == other.maker]
    told = run_ranks(moved, 4, str(tmp_path), pairs)
    assert [rank[place] for place in range(len(pairs)) for rank in told] == [[]] * 4 * len(pairs)


# -- misuse ------------------------------------------------------------------------------------------------------------


class Lbfgs(torch.optim.LBFGS):
    """Another class with a `step` of its own, for one vector of all parameters."""


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6)
        self.conv, self.stack = nn.Conv2d(2, 3, 3), nn.Parameter(torch.ones(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x)).sum() + self.conv.weight.sum() + self.stack.sum()
        return found


def with_group(group: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda model: MuonWithAdamW([{"muon": True, **group, "params": [model.get_parameter(group["params"])]}])


def later(model: Any, name: str) -> Any:
    optimizer = torch.optim.Muon([model.first.weight])
    fully_shard_optimizer(model, optimizer)
    optimizer.add_param_group({"params": [model.get_parameter(name)]})
    model(torch.ones(2, 6)).backward()
    optimizer.step()


def unbound(model: Any) -> torch.optim.Muon:
    model(torch.ones(2, 6)).backward()
    return torch.optim.Muon([model.first.weight])


def narrow() -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=None, allow_low_precision_grads=True)
    model = fully_shard_model(nn.Linear(4, 4).bfloat16(), mixed_precision_policy=policy, numerics="exact")
    fully_shard_optimizer(model, torch.optim.Muon([model.weight]))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a vector in torch's Muon": (lambda m: torch.optim.Muon([m.first.bias]), "Muon only supports 2D parameters"),
    "a kernel in torch's Muon": (lambda m: torch.optim.Muon([m.conv.weight]), "Muon only supports 2D parameters"),
    "a vector with muon=True": (with_group({"params": "first.bias"}), "put vectors, scalars and kernels"),
    "a kernel with muon=True": (with_group({"params": "conv.weight"}), "[3, 2, 3, 3] is in a group with muon=True"),
    "blocks that do not divide": (
        with_group({"params": "first.weight", "blocks": 4}), "9 rows in a matrix, which blocks=4",
    ),
    "blocks that are no number": (with_group({"params": "first.weight", "blocks": 1.5}), "which blocks=1.5 does not"),
    "blocks for torch's Muon": (
        lambda m: fully_shard_optimizer(m, torch.optim.Muon([{"params": [m.first.weight], "blocks": 3}])),
        "parameter first.weight with blocks=3 is in a group of torch.optim.Muon",
    ),
    "a vector that is added later": (lambda m: later(m, "first.bias"), "parameter first.bias with blocks=1"),
    "a stack that is added later": (lambda m: later(m, "stack"), "parameter stack with blocks=1"),
    "one vector of all parameters": (
        lambda m: fully_shard_optimizer(m, Lbfgs([m.first.weight])), "Lbfgs cannot step sharded parameters",
    ),
    "a tall matrix in a Muon that was not handed over": (
        lambda m: unbound(m).step(), "would be lost: an optimizer that does this, as torch.optim.Muon, goes to fully_",
    ),
    "a compiled step of a Muon that was not handed over": (
        lambda m: torch.compile(unbound(m).step)(), "first.weight has this rank's rows only: give the optimizer to",
    ),
    "exact bits of 16-bit main weights": (lambda m: narrow(), "needs AdamW"),
}  # fmt: skip
"""By what is wrong: the program, and words of its error."""


def refused(rank: int) -> dict[str, str]:
    found = {}
    for name, (program, _) in REFUSED.items():
        model = fully_shard_model(Mixed())
        try:
            program(model)
            found[name] = ""
        except (ValueError, TypeError, RuntimeError) as error:
            found[name] = str(error).partition("\n\nfrom user code")[0]  # torch.compile goes on
        model.close()
    return found


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str]]:
    return run_ranks(refused, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused_in_one_sentence(name: str, errors: list[dict[str, str]]) -> None:
    for found in errors:
        assert REFUSED[name][1] in found[name]
        assert "\n" not in found[name]


def without_gradient(rank: int, on: Sequence[int]) -> tuple[str, bool, bool]:
    """The error of a step before which some ranks drop a gradient; whether that weight moved, and another one."""
    model = fully_shard_model(Mixed(), fsdp_unit_modules=[nn.Linear])
    optimizer = fully_shard_optimizer(model, torch.optim.Muon([model.first.weight, model.second.weight], lr=0.1))
    before = dict(model.full_weights())
    model(torch.ones(2, 6)).backward()
    model.finish_grad_sync()
    if rank in on:
        model.first.weight.grad = None
    try:
        optimizer.step()
        said = ""
    except RuntimeError as error:
        said = str(error)
    after = dict(model.full_weights())
    model.close()
    first, second = (torch.equal(before[name], after[name]) for name in ("first.weight", "second.weight"))
    return said, not first, not second


def test_a_gradient_that_one_rank_drops_is_refused_on_all_ranks_and_one_that_all_drop_is_left_alone() -> None:
    told = run_ranks(without_gradient, 3, [1])
    assert len(set(told)) == 1
    assert "parameter first.weight is given one on ranks 0, 2, without a gradient on rank 1. Set grad" in told[0][0]
    assert told[0][1:] == (False, False)
    assert run_ranks(without_gradient, 3, [0, 1, 2]) == [("", False, True)] * 3


def twice(rank: int | None) -> list[torch.Tensor]:
    """Two optimizers with one matrix; and a parameter of no model beside those of one."""
    torch.manual_seed(0)
    model: Any = Mixed()
    model.conv.weight.requires_grad_(False)
    if rank is not None:
        model = fully_shard_model(model)
    loose = nn.Parameter(torch.arange(12.0).view(3, 4))
    optimizers = [
        torch.optim.Muon([model.first.weight, loose]),
        torch.optim.Muon([model.first.weight, model.second.weight]),
    ]
    for optimizer in optimizers if rank is not None else ():
        fully_shard_optimizer(model, optimizer)
    for _ in range(2):

        def closure() -> torch.Tensor:
            loss: torch.Tensor = model(torch.ones(2, 6))
            loss.backward()
            return loss

        loose.grad = torch.ones(3, 4)
        optimizers[0].step(closure)
        optimizers[1].step()
        model.zero_grad()
    weights = dict(getattr(model, "full_weights", model.named_parameters)())
    return [weights["first.weight"].detach(), weights["second.weight"].detach(), loose.detach()]


def test_two_optimizers_step_one_matrix_as_on_one_process() -> None:
    expected = twice(None)
    for found in run_ranks(twice, 2):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-6)
