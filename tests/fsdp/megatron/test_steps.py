"""megatron-fsdp's names for the verbs of a step: each does what it says under every strategy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.fsdp import FlatPieceError
from harness.fsdp import binding as binding_module
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.step import TRANSITIONS, Call, Step
from tests.fsdp.checked import RANKS, Mutant, holds, is_found
from tests.fsdp.megatron.models import differs, plainly, said, sharded, with_optimizer
from tests.fsdp.pairs import STRATEGIES, close, data, loss_of, plain_gradients
from tests.support.mutants import each


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


def scaling(rank: int, strategy: str) -> list[str]:
    """Gradients are multiplied once for each call; without any nothing happens."""
    model = sharded(strategy)
    model.scale_gradients(100.0)
    loss_of(model, data(0, rank)).backward()
    model.scale_gradients(0.5)
    model.scale_gradients(0.5)
    right = plain_gradients([data(0, each) for each in range(RANKS)], 0.25 / RANKS)
    return close(dict(model.full_gradients()), right)


def attaching(rank: int, strategy: str) -> list[str]:
    """Gradients are the optimizer's before it steps, and are not before they are attached."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    told = [each for weight in weights for each in said(lambda: weight.grad, FlatPieceError, "inside the step alone")]  # noqa: B023 # called here
    model.attach_grad_to_optimizer_state()
    told += ["not there"] if any(weight.grad is None for weight in weights) else []
    squares = sum((weight.grad.double().square().sum() for weight in weights), torch.zeros((), dtype=torch.float64))
    if strategy != "no_shard":
        dist.all_reduce(squares)
    told += [] if abs(float(squares.sqrt()) / model.grad_norm() - 1) < 1e-5 else ["other gradients"]
    return told + said(sharded(strategy).attach_grad_to_optimizer_state, RuntimeError, "fully_shard_optimizer(optim")


def zeroing(rank: int, strategy: str) -> list[str]:
    """`zero_grad_buffer=False` takes gradients from the optimizer alone; the model's are forgotten by name."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    model.attach_grad_to_optimizer_state()
    optimizer.zero_grad(zero_grad_buffer=False)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    told = ["the optimizer has gradients"] if any(weight.grad is not None for weight in weights) else []
    told += [] if model.has_gradients else ["the model has none"]
    right = plain_gradients([data(0, each) for each in range(RANKS)], 1 / RANKS)
    told += close(dict(model.full_gradients()), right)
    model.zero_grad_buffer()
    return told + (["they are kept"] if model.has_gradients else [])


def postponing(rank: int, strategy: str) -> list[str]:
    """Weights that are updated and not installed are not computed with, whatever the strategy keeps."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    optimizer.step(install_optimized_model_weights=False)
    optimizer.zero_grad()
    told = said(lambda: model(data(0, rank)), RuntimeError, "model.install_optimized_model_weights()")
    told += said(lambda: model.gathered().__enter__(), RuntimeError, "model.install_optimized_model_weights()")
    model.install_optimized_model_weights()
    told += differs(model, plainly(1))
    return told + ([] if torch.allclose(model(data(9, 0)), plainly(1)(data(9, 0)), atol=1e-5) else ["the forward"])


def unsynced(rank: int, strategy: str) -> list[str]:
    """A step that is told not to finish gradients does not step with unfinished ones."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    told = said(
        lambda: optimizer.step(sync_grad_before_optimizer_step=False), RuntimeError, "call model.finish_grad_sync()"
    )
    model.finish_grad_sync()
    optimizer.step(sync_grad_before_optimizer_step=False)
    return told + differs(model, plainly(1))


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
                    told += said(verb, RuntimeError, "no_sync")
        right = plain_gradients([data(k, r) for k, r in itertools.product(range(3), range(RANKS))], 1 / RANKS / 3)
        told += close(dict(model.full_gradients()), right)
    return told


def ahead(rank: int, strategy: str) -> list[str]:
    """What is gathered ahead is dropped again by name; weights at rest stay unreadable or are counted."""
    model = sharded(strategy)
    loss = loss_of(model, data(0, rank))
    model.start_param_sync()
    model.synchronize_param_gather()
    whole = [unit.name for unit in model._parts.gather.order if model._parts.gather.is_whole(unit)]
    loss.backward()
    right = plain_gradients([data(0, each) for each in range(RANKS)], 1 / RANKS)
    return [f"{name} is whole" for name in whole] + close(dict(model.full_gradients()), right)


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    check.__name__: check
    for check in (every_verb, scaling, attaching, zeroing, postponing, unsynced, last_microbatch, ahead)
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_name_of_megatron_fsdp_does_what_it_says(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


# -- mutants -----------------------------------------------------------------------------------------------------------


def forgets_all(model: Any, sharded: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    sharded.detach()
    model.zero_grad()


MUTANTS = {
    "stale weights are computed with": Mutant(
        "A forward runs although the update was never installed",
        lambda: mock.patch.object(Step, "check_installed"),
        "postponing",
        "optim",
    ),
    "steps with what is there": Mutant(
        "A step that is told not to finish gradients steps all the same",
        lambda: mock.patch.dict(TRANSITIONS, {of: row | {Call.update: (of,)} for of, row in TRANSITIONS.items()}),
        "unsynced",
    ),
    "gradients are scaled in vain": Mutant(
        "scale_gradients changes nothing",
        lambda: mock.patch("harness.fsdp.megatron.clipping.scale_gradients"),
        "scaling",
    ),
    "the buffer is zeroed, too": Mutant(
        "zero_grad(zero_grad_buffer=False) forgets the model's gradients",
        lambda: mock.patch.object(binding_module, "_zero_grad", forgets_all),
        "zeroing",
    ),
    "gathers are left under way": Mutant(
        "synchronize_param_gather drops nothing of what was fetched ahead",
        lambda: mock.patch.object(GatherPipeline, "settle"),
        "ahead",
    ),
}


@pytest.mark.parametrize("name", each("megatron-fsdp's names: a step", ((n, m.breaks) for n, m in MUTANTS.items())))
def test_a_wrong_name_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
