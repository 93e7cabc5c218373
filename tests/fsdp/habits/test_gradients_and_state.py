"""Hooks that edit gradients, gradients of what no optimizer has, and states of other models: right or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from harness.fsdp import StepError, fully_shard_model
from tests.fsdp.checked import each_holds, each_is_found, of_slips, said
from tests.fsdp.habits.world import Habits, Net, Run, differing, mean_square, plain_sgd
from tests.fsdp.pairs import STRATEGIES

CHECKS = Habits()
CHANGED = "has changed .grad of parameter .* inside the backward.*between the last backward and optimizer.step"


def in_place(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def by_data(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.data.mul_(0.5)


def replacing(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def hung(rank: int, strategy: str, edit: Callable[[nn.Parameter], None], *, before: bool) -> tuple[Net, Run]:
    """A plain net, and a rank's, on whose parameters a hook is hung before or after sharding."""
    plain, module = Net(), Net()
    for param in (*plain.parameters(), *(module.parameters() if before else ())):
        param.register_post_accumulate_grad_hook(edit)
    model = fully_shard_model(module, zero_dp_strategy=strategy, fsdp_unit_modules=module.units)
    for param in () if before else module.parameters():
        param.register_post_accumulate_grad_hook(edit)
    return plain, Run(module, model, plain_sgd(model), (rank,))


def accumulating(run: Run, microbatches: int, *, synchronising: bool = False) -> None:
    """Two steps; the plain one's backwards are of both ranks' data, as these are averaged."""
    for step, last in itertools.product(range(2), range(microbatches)):
        waits = not run.is_plain and not synchronising and last < microbatches - 1
        run.model.set_model_auto_sync(not waits) if not run.is_plain else None
        mean_square(run.model, run.data(10 * step + last)).backward()
        if last == microbatches - 1:
            run.optimizer.step()
            run.optimizer.zero_grad()


@CHECKS.check
def editing_gradients_in_hooks(rank: int, strategy: str) -> list[str]:
    """torch scales what has been accumulated each time. Right where a rank has that, and refused elsewhere."""
    found = []
    for edit, before, count in itertools.product((in_place, by_data, replacing), (True, False), (1, 2, 3)):
        plain, run = hung(rank, strategy, edit, before=before)
        accumulating(Run(plain, plain, plain_sgd(plain), (0, 1)), count)
        train = partial(accumulating, run, count)
        if count == 1 or strategy in STRATEGIES[:2]:
            train()
            told = differing(run.model, plain)
        else:
            told = said(train, StepError, CHANGED)
        found += [f"{edit.__name__}, before={before}, {count} microbatches: {each}" for each in told]
    return found


@CHECKS.check
def editing_sums_that_are_finished(rank: int, strategy: str) -> list[str]:
    """Of two backwards that both synchronise, the second shows its own gradients."""
    _, run = hung(rank, strategy, in_place, before=False)
    return said(partial(accumulating, run, 2, synchronising=True), StepError, CHANGED)


@CHECKS.check
def dropping_gradients_in_hooks(rank: int, strategy: str) -> list[str]:
    def drop(param: nn.Parameter) -> None:
        param.grad = None

    _, run = hung(rank, strategy, drop, before=False)
    return said(partial(accumulating, run, 1), StepError, "has dropped .grad of parameter")


@CHECKS.check
def reading_gradients_in_hooks(rank: int, strategy: str) -> list[str]:
    """What a hook reads and does not edit is nothing to refuse."""
    seen: list[float] = []
    plain, run = hung(rank, strategy, lambda param: seen.append(float(param.grad.norm())), before=False)
    accumulating(Run(plain, plain, plain_sgd(plain), (0, 1)), 2)
    accumulating(run, 2)
    return differing(run.model, plain) + ([] if all(seen) else ["a gradient of zeros"])


def of_the_head(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(module.parameters())[-2:], lr=0.2)


@CHECKS.right(optimize=of_the_head)
def clipping_what_no_optimizer_has(run: Run) -> list[float]:
    """`optimizer.zero_grad` leaves their gradients, which go on growing, and clipping counts them."""
    norms = []
    for step in range(3):
        mean_square(run.model, run.data(step)).backward()
        clip = partial(clip_grad_norm_, run.model.parameters()) if run.is_plain else run.model.clip_grad_norm_
        norms.append(round(float(clip(0.05)), 4))
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=step == 1)
    return norms


test_it_is_right_or_refused = each_holds(__name__, CHECKS)


MUTANTS = of_slips(
    r"""
    [The engine, by gradients that hooks edit]
    parts of a sum: A hook may scale this backward's gradient for the sum
        fsdp.runtime.gradient_sync.GradientSync._sums_elsewhere: lambda *_: False
        editing_gradients_in_hooks
    finished sums: Sums that are finished count as shown to a hook
        fsdp.runtime.gradient_sync.GradientSync._sums_elsewhere: lambda *_: False
        editing_sums_that_are_finished / no_shard
    replaced gradients: A gradient that a hook has replaced is added to the one it replaces
        fsdp.runtime.gradient_sync.ProgramHook.__call__: shown.copy_(left) => pass
        editing_gradients_in_hooks / no_shard
    hidden sums: Sums that are hidden between backwards stay hidden from hooks
        fsdp.storage.gradients.Gradients.prepare: if not self.is_prepared:
            => if self.is_prepared:\n        return\n    else:
        editing_gradients_in_hooks / no_shard
    [The engine, by habits around a step]
    what no optimizer has: An optimizer forgets gradients of what it does not hold
        fsdp.runtime.gradient_sync.GradientSync.let_go: lambda self: self.forget()
        clipping_what_no_optimizer_has
    """
)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS)
