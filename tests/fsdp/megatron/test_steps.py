"""megatron-fsdp's names for the verbs of a step, under every strategy."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.fsdp import StepError
from tests.fsdp.checked import RANKS, each_holds, each_is_found, of_slips, said
from tests.fsdp.habits.world import Habits
from tests.fsdp.megatron.test_calls import differs, plainly, sharded, with_optimizer
from tests.fsdp.pairs import STRATEGIES, close, data, loss_of, plain_gradients

CHECKS = Habits()


@CHECKS.check
def every_verb(rank: int, strategy: str) -> list[str]:
    """A loop that calls everything itself trains as one process does."""
    model, optimizer = with_optimizer(strategy)
    model.scale_gradients(100.0)  # of which there are none
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
        model.scale_gradients(0.5)
        model.scale_gradients(0.5)
        optimizer.step(sync_grad_before_optimizer_step=False, install_optimized_model_weights=False)
        model.install_optimized_model_weights()
        model.synchronize_param_gather()
    told = differs(model, plainly(3, 0.25))
    right = plainly(3, 0.25)(data(9, 0))
    return told + ([] if torch.allclose(model(data(9, 0)), right, rtol=1e-4, atol=1e-5) else ["the forward"])


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
    return told + (["they are kept"] if model.engine.step.has_gradients else [])


@CHECKS.check
def postponing(rank: int, strategy: str) -> list[str]:
    """Weights that were not installed at once are installed by the next forward."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    optimizer.step(install_optimized_model_weights=False)
    optimizer.zero_grad()
    right = torch.allclose(model(data(9, 0)), plainly(1)(data(9, 0)), atol=1e-5)
    return differs(model, plainly(1)) + ([] if right else ["the forward"])


@CHECKS.check
def unsynced(rank: int, strategy: str) -> list[str]:
    """Nor does a step that is told not to finish gradients step with unfinished ones."""
    model, optimizer = with_optimizer(strategy)
    with nullcontext() if strategy in STRATEGIES[:2] else model.no_sync():
        loss_of(model, data(0, rank)).backward()
    optimizer.step(sync_grad_before_optimizer_step=False)
    return differs(model, plainly(1))


@CHECKS.check
def last_microbatch(rank: int, strategy: str) -> list[str]:
    """`is_last_microbatch` and `model_auto_sync` may be set; a step that nobody ended is refused."""
    told = []
    for name in ("is_last_microbatch", "model_auto_sync"):
        model = sharded(strategy)
        for index in range(3):
            setattr(model, name, index == 2)
            told += [] if getattr(model, name) is (index == 2) else [f"{name} is another"]
            (loss_of(model, data(index, rank)) / 3).backward()
            if index == 0 and strategy in STRATEGIES[:2]:
                told += said(model.finish_grad_sync, StepError, "no_sync")
        right = plain_gradients([data(k, r) for k, r in itertools.product(range(3), range(RANKS))], 1 / RANKS / 3)
        told += close(dict(model.full_gradients()), right)
    return told


test_a_name_of_megatron_fsdp_does_what_it_says = each_holds(__name__, CHECKS)


# -- mutants -----------------------------------------------------------------------------------------------------------


MUTANTS = of_slips(
    r"""
    stale weights are computed with: A forward runs although the update was never installed
        fsdp.runtime.hooks.Hooks._begin_forward: self.before_forward() => pass
        postponing / optim
    steps with what is there: A step that is told not to finish gradients leaves them unscaled
        fsdp.sharding.bind: engine.gradients.finish() => pass
        unsynced / optim_grads
    gradients are scaled in vain: scale_gradients changes nothing
        fsdp.update.norms.scale_gradients: lambda *_, **__: None
        every_verb
    the buffer is zeroed, too: zero_grad(zero_grad_buffer=False) forgets microbatches that are not finished
        fsdp.megatron.bind: bool = True, *, zero_grad_buffer: bool = True) -> None:
            => bool = True, *, zero_grad_buffer: bool = True) -> None:\n        zero_grad_buffer = True
        zeroing
    """
)


test_a_wrong_name_is_found = each_is_found(__name__, MUTANTS, "megatron-fsdp's names: a step")
