"""Loops that do what they do in one process, of which each was once silently wrong, grew, or was refused."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fsdp.checked import each_holds, each_is_found, of_slips
from tests.fsdp.habits.world import (
    Habits,
    Net,
    Run,
    differing,
    mean_square,
    momentum,
    run_of,
)

CHECKS = Habits()


# -- loops -------------------------------------------------------------------------------------------------------------


@CHECKS.check
def evaluating_under_one_autocast(rank: int, strategy: str) -> list[str]:
    """Autocast keeps the copies of weights that an evaluation made for the forward after it."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                model(x)
            return F.mse_loss(model(x).float(), x)

    plain, run = Net(), run_of(Net, rank, strategy)
    Run(plain, plain, momentum(plain), (0, 1)).train(2, loss)
    run.train(2, loss)
    found, start = dict(run.model.full_weights()), dict(Net().named_parameters())
    moved = {name: (p - start[name]).norm() for name, p in plain.named_parameters()}
    return [f"{name} differs" for name, p in plain.named_parameters() if (found[name] - p).norm() > 0.1 * moved[name]]


@CHECKS.check
def evaluating_with_gradients(rank: int, strategy: str) -> list[str]:
    """A forward whose graph is never used costs no memory later."""
    run, peaks = run_of(Net, rank, strategy), []
    for steps in (1, 2):
        run.train(steps)
        peaks.append(run.model.engine.counters()["transient_peak_bytes"])
        run.model(run.data(0))
        run.optimizer.step()
    return [] if peaks[0] == peaks[1] else [f"peaks of {peaks} bytes"]


@CHECKS.right()
def stepping_on_zeros(run: Run) -> float:
    """A step without a backward does nothing, but where `set_to_none=False` has left gradients of zeros."""
    run.optimizer.step()
    for set_to_none in (False, True):
        mean_square(run.model, run.data(0)).backward()
        for _ in range(2):
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=set_to_none)
    return 0.0 if run.is_plain else float(run.model.grad_norm())


# -- optimizers, and what hangs on one ---------------------------------------------------------------------------------


@CHECKS.right()
def loading_before_a_step(run: Run) -> None:
    """torch keeps gradients when state is loaded: an optimizer's between forward and backward, any before the step."""
    run.train(1)
    saved, weights = copy.deepcopy((run.optimizer.state_dict(), run.model.state_dict()))
    run.train(1)
    loss = mean_square(run.model, run.data(2))
    run.optimizer.load_state_dict(saved)
    loss.backward()
    run.optimizer.load_state_dict(saved)
    run.model.load_state_dict(weights)
    run.optimizer.step()


def all_but_the_head(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(module.named_parameters())[:-2], lr=0.2, momentum=0.9)


@CHECKS.right(optimize=all_but_the_head)
def naming_what_is_added(run: Run) -> Any:
    """Groups with names of parameters, and hooks on the optimizer's state."""
    heard: list[int] = []
    run.train(1)
    run.model.zero_grad()  # in plain torch, what no optimizer has keeps its gradients
    optimizer = run.optimizer
    optimizer.add_param_group({"params": list(run.module.named_parameters())[-2:], "lr": 0.1})
    optimizer.register_state_dict_post_hook(lambda _, found: found | {"note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, given: heard.append(given.pop("note")))
    optimizer.register_load_state_dict_post_hook(lambda _: heard.append(2))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    run.train(1)
    return [group["param_names"] for group in saved["param_groups"]], heard


class CountingSGD(torch.optim.Optimizer):
    """One's own, whose state counts steps by an int."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                param.add_(mean, alpha=-group["lr"] / state["step"])


@CHECKS.check
def counting_by_an_int(rank: int, strategy: str) -> list[str]:
    """State of a plain optimizer is loaded, and its count goes on."""
    plain = Net()
    alone, run = Run(plain, plain, CountingSGD(plain.parameters()), (0, 1)), run_of(Net, rank, strategy, _counting)
    alone.train(2)
    run.train(1)
    run.model.load_state_dict(plain.state_dict())
    run.optimizer.load_state_dict(copy.deepcopy(alone.optimizer.state_dict()))
    alone.train(2)
    run.train(2)
    return differing(run.model, plain)


def _counting(module: nn.Module) -> torch.optim.Optimizer:
    return CountingSGD(module.parameters())


test_a_program_is_right = each_holds(__name__, CHECKS)


# -- mutants -----------------------------------------------------------------------------------------------------------

MUTANTS = of_slips(
    r"""
    [The engine, by habits of loops]
    zeros: Gradients of zeros that zero_grad has left are forgotten
        fsdp.runtime.gradient_sync.GradientSync.let_go: lambda self: self.forget()
        stepping_on_zeros / optim_grads
    [The engine, by habits around a step]
    loads of weights forget: Loading weights forgets the gradients of the step
        fsdp.build.Engine.settle: lambda self: was(self) or self.gradients.forget()
        loading_before_a_step / optim_grads
    """
)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS)
