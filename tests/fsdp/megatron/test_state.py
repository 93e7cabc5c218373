"""The optimizer's state under megatron-fsdp's names is what torch has in one process, and goes where it fits."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.fsdp import binding
from harness.fsdp.update import flat_step
from tests.fsdp.checked import RANKS, Mutant, holds, is_found
from tests.fsdp.megatron.models import LR, adamw, differs, said, with_optimizer
from tests.fsdp.pairs import STRATEGIES, Model, data, loss_of
from tests.support.mutants import each

MOMENTS = ("exp_avg", "exp_avg_sq")


def grouped(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups, in another order than the model's, a frozen parameter among them."""
    named = dict(module.named_parameters())
    named["blocks.1.up.weight"].requires_grad_(False)
    last = [param for name, param in named.items() if name.startswith("blocks.2")]
    rest = [param for name, param in reversed(named.items()) if not name.startswith("blocks.2")]
    return torch.optim.AdamW([{"params": last, "lr": 0.01}, {"params": rest}], lr=LR, eps=1e-4)


def frozen() -> nn.Module:
    module = Model()
    module.blocks[1].up.weight.requires_grad_(False)
    return module


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As one process has it. *Collective.*"""
    found = optimizer.state_dict()
    state = {
        number: {entry: v.full_tensor() if isinstance(v, DTensor) else v for entry, v in entries.items()}
        for number, entries in found["state"].items()
    }
    return {"state": state, "param_groups": found["param_groups"]}


def saving(rank: int, strategy: str) -> list[str]:
    """Numbers, entries and settings are those of torch in one process, and go on in either from the other's."""
    model, optimizer = with_optimizer(strategy, grouped, frozen())
    plain = frozen()
    theirs = grouped(plain)

    def step(number: int) -> None:
        theirs.zero_grad()
        for index in range(RANKS):
            (loss_of(plain, data(number, index)) / RANKS).backward()
        theirs.step()
        optimizer.zero_grad()
        loss_of(model, data(number, rank)).backward()
        optimizer.step()

    blank = whole_state(optimizer)["state"].values()
    told = ["not blank at first"] if any(value.any() for entries in blank for value in entries.values()) else []
    step(0)
    right, found = theirs.state_dict(), whole_state(optimizer)
    if found["state"].keys() != right["state"].keys():
        return [f"numbers {list(found['state'])}"]
    for number, entries in right["state"].items():
        got = found["state"][number]
        if got.keys() != entries.keys() or got["step"] != 1:
            told.append(f"entries {list(got)}")
        told += [f"{number} {e}" for e in MOMENTS if not torch.allclose(got[e], entries[e], atol=1e-7)]
    for got, group in zip(found["param_groups"], right["param_groups"], strict=True):
        told += [key for key, value in group.items() if got[key] != value]
    model, optimizer = with_optimizer(strategy, grouped, frozen())
    model.load_state_dict({name: value.detach().clone() for name, value in plain.state_dict().items()})
    changed = deepcopy(right)
    changed["param_groups"][0]["lr"] = theirs.param_groups[0]["lr"] = 0.03
    optimizer.load_state_dict(changed)
    step(1)
    return told + [f"{name} afterwards" for name in differs(model, plain)]


def moving(rank: int, strategy: str) -> list[str]:
    """State goes from another strategy to this one, and the next update is the same."""
    source = STRATEGIES[STRATEGIES.index(strategy) - 1]
    first, its = with_optimizer(source, adamw)
    loss_of(first, data(0, rank)).backward()
    its.step()
    its.zero_grad()
    second, others = with_optimizer(strategy, adamw, Model(seed=8))
    second.load_state_dict(first.state_dict())
    others.load_state_dict(its.state_dict())
    for model, optimizer in ((first, its), (second, others)):
        loss_of(model, data(1, rank)).backward()
        optimizer.step()
    pairs = zip(first.full_weights(), second.full_weights(), strict=True)
    return [name for (name, one), (_, other) in pairs if not torch.allclose(one, other, atol=1e-7)]


def misfits(rank: int, strategy: str) -> list[str]:
    """Other numbers and shapes are refused; the right state goes on from there."""
    model, optimizer = with_optimizer(strategy, adamw)
    right_model, right = with_optimizer(strategy, adamw)
    for net, its in ((model, optimizer), (right_model, right)):
        loss_of(net, data(0, rank)).backward()
        its.step()
    before = deepcopy(whole_state(optimizer))
    few, other = deepcopy(before), deepcopy(before)
    few["param_groups"][0]["params"].pop()
    other["state"][0]["exp_avg"] = torch.zeros(3, 3)
    told = said(lambda: optimizer.load_state_dict(few), ValueError, "group")
    told += said(lambda: optimizer.load_state_dict(other), ValueError, "exp_avg", "load the state of this model")
    optimizer.load_state_dict(before)
    optimizer.step()
    right.step()
    pairs = zip(model.full_weights(), right_model.full_weights(), strict=True)
    return told + [name for (name, one), (_, other) in pairs if not torch.equal(one, other)]


CHECKS: dict[str, Callable[[int, str], list[str]]] = {check.__name__: check for check in (saving, moving, misfits)}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_name_of_megatron_fsdp_does_what_it_says(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


# -- mutants -----------------------------------------------------------------------------------------------------------


def trained_only(optimizer: torch.optim.Optimizer) -> None:
    _take_sharded(optimizer)
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param.requires_grad]


_take_sharded = binding._take_sharded
MUTANTS = {
    "numbers of trained parameters": Mutant(
        "Frozen parameters are not counted, so that numbers are not torch's",
        lambda: mock.patch.object(binding, "_take_sharded", trained_only),
        "saving",
    ),
    "kernels are saved": Mutant(
        "What is saved names kernels that the engine has chosen",
        lambda: mock.patch.object(flat_step, "KERNELS", ()),
        "saving",
        "optim",
    ),
    "loads share memory": Mutant(
        "What was loaded is the memory of the optimizer that gave it",
        lambda: mock.patch.object(flat_step.FlatStep, "take_loaded"),
        "moving",
    ),
    "moments are not filled": Mutant(
        "What is loaded brings no moments",
        lambda: mock.patch.object(flat_step, "fill"),
        "moving",
        "no_shard",
    ),
}


@pytest.mark.parametrize("name", each("megatron-fsdp's names: state", ((n, m.breaks) for n, m in MUTANTS.items())))
def test_a_wrong_name_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
