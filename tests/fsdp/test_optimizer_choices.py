"""What the engine chooses for an optimizer, and what it can tell of one before its first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp import ShardedModel, create_state, fully_shard
from harness.fsdp.update import rules
from tests.fsdp.checked import RANKS, each_holds, each_is_found, of_slips, said
from tests.fsdp.pairs import Block, Model, Pair, arguments_of, take_step

FUSED, ONE_BY_ONE, AS_GIVEN = {"fused": True}, {"fused": False, "foreach": False}, dict[str, bool]()
"""Settings of a group while its rule runs."""


def sharded(strategy: str, made: Any, **more: Any) -> tuple[ShardedModel, torch.optim.Optimizer]:
    """made: an optimizer over a module's parameters, both new."""
    module = Model()
    return fully_shard(module, made(module), fsdp_unit_modules=[Block], **arguments_of(Pair(strategy, "")), **more)


def off(model: ShardedModel, plain: nn.Module, what: str) -> list[str]:
    right = dict(plain.named_parameters())
    return [f"{what}: {n}" for n, w in model.full_weights() if not torch.allclose(w, right[n], rtol=1e-5, atol=1e-6)]


# -- kernels -----------------------------------------------------------------------------------------------------------


def adam(kind: Any = torch.optim.AdamW, **more: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda module: kind(module.parameters(), lr=0.01, **more)


def choosing(rank: int, strategy: str) -> list[str]:
    """Adam and AdamW are fused where the user left that open and the bits allow it; nothing else is changed; what is
    saved has the user's setting."""
    told = []
    for made, more, right in (
        (adam(), {}, FUSED),
        (adam(torch.optim.Adam, amsgrad=True), {"numerics": "deterministic"}, FUSED),
        (adam(), {"numerics": "ordered"}, ONE_BY_ONE),  # odd rows
        (adam(), {"numerics": "exact"}, ONE_BY_ONE),
        (adam(foreach=False), {}, AS_GIVEN),
        (adam(foreach=True), {}, AS_GIVEN),
        (adam(fused=True), {}, AS_GIVEN),
        (adam(torch.optim.SGD, momentum=0.9), {}, AS_GIVEN),
        (adam(torch.optim.RMSprop), {}, AS_GIVEN),
    ):
        model, updates = sharded(strategy, made, **more)
        given = made(Model()).param_groups[0]
        saved = updates.state_dict()["param_groups"][0]
        (local,) = model.engine.local_steps
        found = rules.kernel_settings(updates, updates.param_groups[0], unfused=local.unfused)
        told += [] if found == right else [f"{more}: {found}, not {right}"]
        told += [f"{right}: saved as {saved[k]}" for k in ("fused", "foreach") if saved.get(k) != given.get(k)]
        model.close()
    return told


# -- dampening ---------------------------------------------------------------------------------------------------------


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


def dampening(rank: int, strategy: str) -> list[str]:
    """The first update is undampened, also after loading a state from before it; and one of other shapes is refused."""
    plain = Model()
    theirs = sgd(plain)
    model, updates = sharded(strategy, sgd)
    updates.load_state_dict(sharded(strategy, sgd)[1].state_dict())
    told = said(lambda: create_state(updates), NotImplementedError, "step once before")
    for number in range(2):
        take_step(plain, theirs, number, range(RANKS))
        take_step(model, updates, number, [rank])
    told += off(model, plain, "after a blank state")
    wrong = sgd(Model()).state_dict() | {"state": {0: {"momentum_buffer": torch.zeros(1)}}}
    return told + said(lambda: updates.load_state_dict(wrong), ValueError, "momentum_buffer of parameter")


def beginning(rank: int, strategy: str) -> list[str]:
    """State that is made before the first step is what torch would begin with."""
    told = []
    for kind in (torch.optim.Adagrad, torch.optim.ASGD, torch.optim.NAdam, torch.optim.Rprop):
        more = {"initial_accumulator_value": 0.5} if kind is torch.optim.Adagrad else {}
        plain, made = Model(), adam(kind, **more)
        theirs, (model, updates) = made(plain), sharded(strategy, made)
        updates.state.clear()  # Adagrad's constructor has made some
        create_state(updates)
        for number in range(2):
            take_step(plain, theirs, number, range(RANKS))
            take_step(model, updates, number, [rank])
        told += off(model, plain, kind.__name__)
        model.close()
    return told


# -- empty parameters --------------------------------------------------------------------------------------------------


class Hollow(Model):
    """One of its parameters has no rows, and gets a gradient of as many."""

    def __init__(self) -> None:
        super().__init__()
        self.hollow = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.hollow.sum()


def counting(rank: int, strategy: str) -> list[str]:
    """Updates of a parameter without rows, here or anywhere, are counted as torch counts them, also after loading."""
    plain, told = Hollow(), list[str]()
    theirs = adam()(plain)
    (model, updates), (other, resumed) = (
        fully_shard(module, adam()(module), fsdp_unit_modules=[Block], **arguments_of(Pair(strategy, "")))
        for module in (Hollow(), Hollow())
    )
    for number in range(4):
        if number == 3:
            other.load_state_dict(model.state_dict())
            resumed.load_state_dict(updates.state_dict())
            model, updates = other, resumed
        take_step(plain, theirs, number, range(RANKS))
        take_step(model, updates, number, [rank])
        right, found = (each.state_dict()["state"] for each in (theirs, updates))
        counts = [{place: float(entries["step"]) for place, entries in of.items()} for of in (right, found)]
        told += [] if counts[0] == counts[1] else [f"step {number + 1} is counted {counts[1]}, by torch {counts[0]}"]
        updates.load_state_dict(updates.state_dict())
    return told + off(model, plain, "with an empty parameter")


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    check.__name__: check for check in (choosing, dampening, beginning, counting)
}


test_an_optimizer_is_stepped_as_was_promised = each_holds(__name__, CHECKS)


MUTANTS = of_slips(
    """
    bits may change: Under numerics=ordered the fused kernel is chosen for segments that it cannot step bit by bit
        fsdp.storage.layout.Segment.fusable: True
        choosing
    momentum begins with zeros: A state of SGD's momentum with dampening is made before the first gradient
        fsdp.update.rules.begins_with_gradient: lambda *_, **__: False
        dampening / no_shard
    state begins at zero: Adagrad's sums and Rprop's steps begin with zero whatever their settings
        fsdp.update.rules.FIRST_OF_GROUP: {}
        beginning
    products begin at zero: NAdam's product begins with zero
        fsdp.update.rules.FIRST: {}
        beginning
    nobody's count: Parameters without a row on a rank are counted from one after a load
        fsdp.update.steps.LocalStep._give: if key in self._known
        => if key in self._known and (own.rows.numel() or key != 'step')
        counting
    """
)


test_a_wrong_choice_is_found = each_is_found(__name__, MUTANTS, "The engine, by what it chooses")
