"""Habits around a step that were once silently wrong: what programs load, or change, between a forward and its update.

Checks as in `tests.fsdp.test_habits`, whose models and data these are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from harness.fsdp.guards.replicas import ReplicaCheck
from harness.fsdp.runtime import gradient_sync, program_hooks
from harness.fsdp.runtime.program_hooks import ProgramHook
from harness.fsdp.runtime.whole_weights import WholeWeights
from harness.fsdp.state.access import StateAccess
from harness.fsdp.storage.edits import LostEdits
from harness.fsdp.update.flat_step import FlatStep
from tests.fsdp.checked import ZERO3, Mutant, holds, is_found
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.test_habits import Net, data, differing, mean_square, said, sharded, train, trained_alike
from tests.support.mutants import Slip, each


def loading_before_a_step(rank: int, strategy: str) -> list[str]:
    """torch keeps gradients when state is loaded: an optimizer's between forward and backward, any before the step."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int]) -> None:
        train(model, optimizer, ranks, mean_square, 1)
        saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        train(model, optimizer, ranks, mean_square, 1)
        loss = mean_square(model, data(ranks, 2))
        optimizer.load_state_dict(saved)
        loss.backward()
        optimizer.load_state_dict(saved)
        model.load_state_dict(weights)
        optimizer.step()

    plain = Net()
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9), (0, 1))
    model, optimizer = sharded(Net(), strategy)
    run(model, optimizer, [rank])
    return differing(model, plain)


def changing_the_optimizer(rank: int, strategy: str) -> list[str]:
    """A second optimizer of the same parameters goes on where the first one ended."""

    def run(model: nn.Module, first: torch.optim.Optimizer, ranks: Sequence[int]) -> None:
        train(model, first, ranks, mean_square, 2)
        train(model, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4), ranks, mean_square, 2)

    plain = Net()
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9), (0, 1))
    model, optimizer = sharded(Net(), strategy)
    run(model, optimizer, [rank])
    return differing(model, plain)


def compiling_a_step(rank: int, strategy: str) -> list[str]:
    """`torch.compile` of what steps: the engine's part of it runs as it is. Where the least and the most is split."""
    if strategy not in ("no_shard", ZERO3):
        return []
    plain = Net()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9), (0, 1), mean_square, 2)
    model, optimizer = sharded(Net(), strategy)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(2):
        mean_square(model, data([rank], number)).backward()
        step()
        optimizer.zero_grad()
    return differing(model, plain)


# -- hooks of the program, inside a backward ---------------------------------------------------------------------------


def by_data(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.data.add_(param.grad, alpha=-0.2)
    param.grad = None


@torch.no_grad()
def in_place(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.sub_(0.2 * param.grad)


def by_optimizer(param: nn.Parameter) -> None:
    """torch's own recipe has an optimizer for each parameter, built beforehand."""
    torch.optim.SGD([param], lr=0.2).step()


def stepping_in_hooks(rank: int, strategy: str) -> list[str]:
    """ "Optimizer in backward", by hand and by optimizers, hung on the module or on the sharded model's parameters."""

    def hung(hook: Callable[[nn.Parameter], None], part: str, *, before: bool) -> Callable[[], None]:
        module = Net()
        for param in module.get_submodule(part).parameters() if before else ():
            param.register_post_accumulate_grad_hook(hook)
        model = fully_shard_model(module, zero_dp_strategy=strategy, fsdp_unit_modules=module.units)
        for param in module.get_submodule(part).parameters() if not before else ():
            param.register_post_accumulate_grad_hook(hook)
        return lambda: mean_square(model, data([rank], 0)).backward()

    told = "changed values of parameter {}.* inside the backward.*optimizer.step\\(\\) after backward"
    return [
        f"{hook.__name__} on {part}, before={before}: {each}"
        for hook in (by_data, in_place, by_optimizer)
        for part in ("head", "first")
        for before in (True, False)
        for each in said(hung(hook, part, before=before), told.format(part))
    ]


def watching_by_hooks(rank: int, strategy: str) -> list[str]:
    """Hooks that look alone change nothing."""
    seen: list[str] = []

    class Watched(Net):
        def __init__(self) -> None:
            super().__init__()
            for name, param in self.named_parameters():
                param.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))  # type: ignore[misc] # a default

    found = trained_alike(Watched, rank, strategy)
    names = [name for name, _ in Net().named_parameters()]
    return found + [f"{name} was not told" for name in names if seen.count(name) != 2 * 3]


# -- edits inside a forward that leave no trace ------------------------------------------------------------------------


class Clamping(Net):
    """Clamps a weight of a unit, and one of the root, in each of its forwards from some one on."""

    begin = 0

    def __init__(self) -> None:
        super().__init__()
        self.second.out = Clamped(6, 6)
        self.clamps = 0

    def forward(self, x: Tensor) -> Any:
        self.second.out.clamps = self.clamps >= self.begin
        self.clamps += 1
        return super().forward(x)


class Clamped(nn.Linear):
    clamps = False

    def forward(self, x: Tensor) -> Tensor:
        if self.clamps:
            self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampingRoot(Net):
    def forward(self, x: Tensor) -> Any:
        self.head.weight.data.clamp_(min=0)
        return super().forward(x)


class ClampingLate(Clamping):
    begin = 3


LOST = r"parameter {} was edited inside a forward .*unsharded\(\)"


def clamping_in_a_forward(rank: int, strategy: str) -> list[str]:
    """It counts where it is an edit of main weights, and is refused where it would be lost, from whenever on."""
    told = []
    for make, name in (
        (Clamping, "second.out.weight"),
        (ClampingRoot, "head.weight"),
        (ClampingLate, "second.out.weight"),
    ):
        if strategy == ZERO3:
            told += said(lambda make=make: trained_alike(make, rank, strategy, steps=11), LOST.format(name))  # type: ignore[misc] # a default
        else:
            told += trained_alike(make, rank, strategy)
    return told


def clamping_narrow_weights_in_a_forward(rank: int, strategy: str) -> list[str]:
    """Main weights of their own do not know of it, whatever the strategy."""
    told = []
    for make, name in ((Clamping, "second.out.weight"), (ClampingRoot, "head.weight")):
        module = make().bfloat16()
        policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
        model = fully_shard_model(
            module, zero_dp_strategy=strategy, fsdp_unit_modules=module.units, mixed_precision_policy=policy
        )
        told += said(lambda model=model: model(data([rank], 0).bfloat16()), LOST.format(name))  # type: ignore[misc] # a default
    return told


def initialising_unseeded(rank: int, strategy: str) -> list[str]:
    """Each rank draws its own numbers: refused where edits are compared, and named where replicas are."""

    def unsharded() -> None:
        model, _ = sharded(Net(), strategy)
        torch.manual_seed(rank)
        with model.unsharded():
            nn.init.normal_(model.module.head.weight)

    def compared() -> None:
        module = Net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
        model, optimizer = fully_shard(module, optimizer, zero_dp_strategy=strategy, check_replicas_every=1)
        torch.manual_seed(rank)
        nn.init.normal_(module.head.weight)
        train(model, optimizer, [rank], mean_square, 2)

    told = said(unsharded, "head.weight.*All ranks must make the same edit inside unsharded")
    if strategy == "no_shard":
        return told + said(compared, "replicas differ after update 1: head.weight")
    return told  # each rank updates a part, and all take that


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    each.__name__: each
    for each in (
        loading_before_a_step,
        changing_the_optimizer,
        compiling_a_step,
        stepping_in_hooks,
        watching_by_hooks,
        clamping_in_a_forward,
        clamping_narrow_weights_in_a_forward,
        initialising_unseeded,
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_habit_is_right_or_refused(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


_begin, _load_weights = LostEdits.begin, StateAccess.load_state_dict


def _looks_once(self: LostEdits, buckets: Any, num_updates: int, *, may_look: bool) -> None:
    _begin(self, buckets, num_updates, may_look=may_look and not num_updates)


def _forgets_too(self: StateAccess, *args: Any, **named: Any) -> Any:
    found = _load_weights(self, *args, **named)
    self.gradients.forget()
    return found


RESIDENT = Slip(LostEdits, "note", "bucket.computes_with_main_weights", "bucket.is_resident")
MUTANTS = {
    "loads of weights forget": Mutant(
        "Loading weights forgets the gradients of the step",
        lambda: mock.patch.object(StateAccess, "load_state_dict", _forgets_too),
        "loading_before_a_step",
        "optim_grads",
    ),
    "steps in hooks": Mutant(
        "A hook may change weights by the gradient of one rank",
        lambda: mock.patch.object(ProgramHook, "__call__", lambda self, param: self.hook(param)),
        "stepping_in_hooks",
        "optim_grads",
    ),
    "edits through data in a hook": Mutant(
        "A hook's parameter counts no edits through `data`",
        lambda: mock.patch.object(program_hooks, "counting", lambda own: own),
        "stepping_in_hooks",
        "optim_grads",
    ),
    "hooks hung before": Mutant(
        "What was hung on a parameter before it was sharded is not watched",
        lambda: mock.patch.object(gradient_sync, "watch"),
        "stepping_in_hooks",
        "optim_grads",
    ),
    "edits without a trace": Mutant(
        "What a forward does to `weight.data` in place is lost with the gathered weights",
        lambda: mock.patch.object(LostEdits, "begin"),
        "clamping_in_a_forward",
    ),
    "edits of the first step alone": Mutant(
        "Edits without a trace are looked for in the first step alone",
        lambda: mock.patch.object(LostEdits, "begin", _looks_once),
        "clamping_in_a_forward",
    ),
    "kept where they are whole": Mutant(
        "Whole weights are taken for main weights, also narrow ones",
        lambda: mock.patch.object(LostEdits, "note", RESIDENT.made()),
        "clamping_narrow_weights_in_a_forward",
        "optim",
    ),
    "edits are not compared": Mutant(
        "Each rank keeps the numbers it has drawn inside unsharded()",
        lambda: mock.patch.object(WholeWeights, "_compare"),
        "initialising_unseeded",
    ),
    "replicas are not compared": Mutant(
        "Ranks part by the numbers they have drawn, whatever check_replicas_every says",
        lambda: mock.patch.object(ReplicaCheck, "is_due", False),
        "initialising_unseeded",
        "no_shard",
    ),
    "steps are traced": Mutant(
        "torch.compile traces what the engine does around a step",
        lambda: mock.patch.object(FlatStep, "_begin", vars(FlatStep._begin)["__wrapped__"]),
        "compiling_a_step",
    ),
}


@pytest.mark.parametrize(
    "name", each("The engine, by habits around a step", [(n, m.breaks) for n, m in MUTANTS.items()])
)
def test_a_mutant_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
