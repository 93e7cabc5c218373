"""megatron-fsdp's names for the verbs of a step, and the optimizer's state under them, under every strategy."""

from __future__ import annotations

import itertools
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.fsdp import StepError, megatron, sharding
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.step import TRANSITIONS, Call, Step
from harness.fsdp.update import flat_step
from tests.fsdp.checked import RANKS, Mutant, each_holds, each_is_found, patched, said
from tests.fsdp.habits.world import Habits
from tests.fsdp.megatron.test_calls import LR, adamw, differs, plainly, sharded, with_optimizer
from tests.fsdp.pairs import STRATEGIES, Model, close, data, loss_of, plain_gradients

MOMENTS = ("exp_avg", "exp_avg_sq")
CHECKS = Habits()


@CHECKS.check
def every_verb(rank: int, strategy: str) -> list[str]:
    """A loop that calls everything itself trains as one process does."""
    model, optimizer = with_optimizer(strategy)
    for step in range(3):
        optimizer.zero_grad(zero_grad_buffer=False)
        model.zero_grad_buffer()
        model.start_param_sync()
        loss = loss_of(model, data(step, rank))
        if step == 1:
            model.synchronize_param_gather()
        loss.backward()
        model.start_grad_sync()
        model.synchronize_gradient_reduce()
        model.finish_grad_sync(force_all_reduce=False)
        model.attach_grad_to_optimizer_state()
        model.scale_gradients(0.25)
        optimizer.step(sync_grad_before_optimizer_step=False, install_optimized_model_weights=False)
        model.install_optimized_model_weights()
        model.synchronize_param_gather()
    told = differs(model, plainly(3, 0.25))
    right = plainly(3, 0.25)(data(9, 0))
    return told + ([] if torch.allclose(model(data(9, 0)), right, rtol=1e-4, atol=1e-5) else ["the forward"])


@CHECKS.check
def scaling(rank: int, strategy: str) -> list[str]:
    """Gradients are multiplied once for each call; without any nothing happens."""
    model = sharded(strategy)
    model.scale_gradients(100.0)
    loss_of(model, data(0, rank)).backward()
    model.scale_gradients(0.5)
    model.scale_gradients(0.5)
    right = plain_gradients([data(0, each) for each in range(RANKS)], 0.25 / RANKS)
    return close(dict(model.full_gradients()), right)


@CHECKS.check
def attaching(rank: int, strategy: str) -> list[str]:
    """Gradients are the parameters' own; without a backward there are none."""
    model, optimizer = with_optimizer(strategy)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    model.attach_grad_to_optimizer_state()
    told = ["there before a backward"] if any(weight.grad is not None for weight in weights) else []
    loss_of(model, data(0, rank)).backward()
    model.attach_grad_to_optimizer_state()
    return told + gradients_differ(model, 0)


def gradients_differ(model: nn.Module, *numbers: int) -> list[str]:
    """Names of parameters whose `.grad` is another than that of these batches' losses. *Collective.*"""
    right = plain_gradients([data(k, r) for k, r in itertools.product(numbers, range(RANKS))], 1 / RANKS)
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return close({n: grad.full_tensor() if isinstance(grad, DTensor) else grad for n, grad in grads.items()}, right)


@CHECKS.check
def zeroing(rank: int, strategy: str) -> list[str]:
    """`zero_grad_buffer=False` takes `.grad` from parameters alone; what is unfinished is forgotten by name."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    optimizer.zero_grad(zero_grad_buffer=False)
    told = ["parameters have gradients"] if any(param.grad is not None for param in model.parameters()) else []
    with model.no_sync():
        loss_of(model, data(1, rank)).backward()
    optimizer.zero_grad(zero_grad_buffer=False)
    loss_of(model, data(2, rank)).backward()
    told += gradients_differ(model, 1, 2)
    model.zero_grad_buffer()
    return told + (["they are kept"] if model.has_gradients else [])


@CHECKS.check
def postponing(rank: int, strategy: str) -> list[str]:
    """Weights that are updated and not installed are not computed with, whatever the strategy keeps."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    optimizer.step(install_optimized_model_weights=False)
    optimizer.zero_grad()
    told = said(lambda: model(data(0, rank)), StepError, "model.install_optimized_model_weights()")
    told += said(lambda: model.unsharded().__enter__(), StepError, "model.install_optimized_model_weights()")
    model.install_optimized_model_weights()
    told += differs(model, plainly(1))
    return told + ([] if torch.allclose(model(data(9, 0)), plainly(1)(data(9, 0)), atol=1e-5) else ["the forward"])


@CHECKS.check
def unsynced(rank: int, strategy: str) -> list[str]:
    """A step that is told not to finish gradients does not step with unfinished ones."""
    model, optimizer = with_optimizer(strategy)
    waits = strategy in STRATEGIES[:2]
    word = "last backward ran inside no_sync()" if waits else "call model.finish_grad_sync()"
    with model.no_sync():
        loss_of(model, data(0, rank)).backward()
    told = said(lambda: optimizer.step(sync_grad_before_optimizer_step=False), StepError, word)
    if waits:
        optimizer.zero_grad()
        loss_of(model, data(0, rank)).backward()
    else:
        model.finish_grad_sync()
    optimizer.step(sync_grad_before_optimizer_step=False)
    return told + differs(model, plainly(1))


@CHECKS.check
def last_microbatch(rank: int, strategy: str) -> list[str]:
    """`is_last_microbatch` and `model_auto_sync` may be set; a step that nobody ended is refused by every verb."""
    told = []
    for name in ("is_last_microbatch", "model_auto_sync"):
        model = sharded(strategy)
        for index in range(3):
            setattr(model, name, index == 2)
            told += [] if getattr(model, name) is (index == 2) else [f"{name} is another"]
            (loss_of(model, data(index, rank)) / 3).backward()
            if index == 0 and strategy in STRATEGIES[:2]:
                for verb in (model.start_grad_sync, model.synchronize_gradient_reduce, model.finish_grad_sync):
                    told += said(verb, StepError, "no_sync")
        right = plain_gradients([data(k, r) for k, r in itertools.product(range(3), range(RANKS))], 1 / RANKS / 3)
        told += close(dict(model.full_gradients()), right)
    return told


@CHECKS.check
def ahead(rank: int, strategy: str) -> list[str]:
    """What is gathered ahead is dropped again by name; the next backward is right."""
    model = sharded(strategy)
    loss = loss_of(model, data(0, rank))
    model.start_param_sync()
    model.synchronize_param_gather()
    whole = [unit.name for unit in model._parts.gather.order if model._parts.gather.is_whole(unit)]
    loss.backward()
    right = plain_gradients([data(0, each) for each in range(RANKS)], 1 / RANKS)
    return [f"{name} is whole" for name in whole] + close(dict(model.full_gradients()), right)


# -- the optimizer's state ---------------------------------------------------------------------------------------------


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


@CHECKS.check
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


@CHECKS.check
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


@CHECKS.check
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


test_a_name_of_megatron_fsdp_does_what_it_says = each_holds(__name__, CHECKS)


# -- mutants -----------------------------------------------------------------------------------------------------------


def forgets_all(model: Any, optimizer: Any, **more: Any) -> None:
    _bind(model, optimizer, **more)
    forget = optimizer.zero_grad
    optimizer.zero_grad = lambda *, zero_grad_buffer=True: forget()


_bind = megatron.bind


def trained_only(optimizer: torch.optim.Optimizer) -> None:
    _take_sharded(optimizer)
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param.requires_grad]


_take_sharded = sharding._take_sharded
_of_steps = partial(Mutant, area="megatron-fsdp's names: a step")
_of_state = partial(Mutant, area="megatron-fsdp's names: state")
MUTANTS = {
    "stale weights are computed with": _of_steps(
        "A forward runs although the update was never installed",
        patched(Step, "check_installed"),
        "postponing",
        "optim",
    ),
    "steps with what is there": _of_steps(
        "A step that is told not to finish gradients steps all the same",
        lambda: mock.patch.dict(TRANSITIONS, {of: row | {Call.update: (of,)} for of, row in TRANSITIONS.items()}),
        "unsynced",
    ),
    "gradients are scaled in vain": _of_steps(
        "scale_gradients changes nothing",
        lambda: mock.patch("harness.fsdp.megatron.norms.scale_gradients"),
        "scaling",
    ),
    "the buffer is zeroed, too": _of_steps(
        "zero_grad(zero_grad_buffer=False) forgets microbatches that are not finished",
        patched(megatron, "bind", forgets_all),
        "zeroing",
    ),
    "gathers are left under way": _of_steps(
        "synchronize_param_gather drops nothing of what was fetched ahead",
        patched(GatherPipeline, "settle"),
        "ahead",
    ),
    "numbers of trained parameters": _of_state(
        "Frozen parameters are not counted, so that numbers are not torch's",
        patched(sharding, "_take_sharded", trained_only),
        "saving",
    ),
    "kernels are saved": _of_state(
        "What is saved names kernels that the engine has chosen",
        patched(flat_step, "KERNELS", ()),
        "saving",
        "optim",
    ),
    "loads share memory": _of_state(
        "What was loaded is the memory of the optimizer that gave it",
        patched(flat_step.FlatStep, "take_loaded"),
        "moving",
    ),
    "moments are not filled": _of_state(
        "What is loaded brings no moments",
        patched(flat_step, "fill"),
        "moving",
        "no_shard",
    ),
}


test_a_wrong_name_is_found = each_is_found(__name__, MUTANTS)
