"""The state of a step: its table is the docs', and no sequence of calls gives a wrong number silently.

Random sequences of calls are made on one rank and on plain torch side by side. Each call either does on both what it
says, or is refused by the engine with a documented error, and then plain torch leaves it out. Gradients and weights are
compared whenever they can be read.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from harness.fsdp import StepError, Strategy, fully_shard
from harness.fsdp.runtime.step import REFUSALS, Call, Step, StepState
from tests.fsdp.habits.world import Boom, same_gradients
from tests.fsdp.test_api import Block, make
from tests.support.mutants import each

STRATEGIES = [strategy.name for strategy in Strategy]
DIVISOR = 2.0
"""Not 1, so that a gradient that is scaled twice, or not at all, shows on a single rank."""
CALLS = (
    "forward", "forward_that_raises", "evaluate", "microbatch", "microbatch_no_sync", "backward", "backward_no_sync",
    "backward_again", "backward_that_raises", "finish_inside", "zero_grad_inside", "gradients", "drop", "step",
    "zero_grad", "load",
)  # fmt: skip
ENGINE = Path(__file__).parents[2] / "harness" / "fsdp"


pytestmark = pytest.mark.usefixtures("group_of_one")


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_refusal_says_which_call_is_missing_and_the_docs_have_the_table() -> None:
    missing = ("zero_grad()", "no_sync()", "after backward() has returned")
    assert all(any(call in text for call in missing) for text in REFUSALS.values())
    docs = (ENGINE.parents[1] / "docs" / "engine.md").read_text(encoding="utf-8").splitlines()
    assert f"| state of the step | of its gradients | {' | '.join(f'`{call}`' for call in get_args(Call))} |" in docs
    for state in StepState:
        (row,) = (line for line in docs if line.startswith(f"| `{state.name}` | {state.value} |"))
        refused = {call for call, cell in zip(get_args(Call), row.split(" | ")[2:], strict=True) if "refused" in cell}
        nested = {"backward()"} if state is StepState.BACKWARD else set()  # all hooks of one say that it began
        assert refused - nested == {call for call in get_args(Call) if (state, call) in REFUSALS}


# -- sequences of calls ------------------------------------------------------------------------------------------------


class Pair:
    """A sharded model and the same in plain torch, each with its optimizer, and losses that were not differentiated."""

    def __init__(self, strategy: str, **options: Any) -> None:
        model, self.plain = make(), make()
        kwargs = {"lr": 0.05, "momentum": 0.9}
        self.model, self.optimizer = fully_shard(
            model,
            torch.optim.SGD(model.parameters(), **kwargs),
            fsdp_unit_modules=[Block],
            zero_dp_strategy=strategy,
            grad_divisor=DIVISOR,
            **options,
        )
        self.other = torch.optim.SGD(self.plain.parameters(), **kwargs)
        self.losses: list[tuple[Tensor, Tensor]] = []
        self.number = 0

    def run(self, call: str) -> None:
        """Make a call on both, or find it refused."""
        try:
            getattr(self, call)()
        except RuntimeError as error:
            told = str(error)
            known = "run the forward again" in told or "modified by an inplace operation" in told  # torch's own words
            assert told in REFUSALS.values() or known, told

    def data(self) -> Tensor:
        self.number += 1
        return torch.randn(3, 6, generator=torch.Generator().manual_seed(self.number))

    def forward(self) -> None:
        x = self.data()
        self.losses.append((self.model(x).square().mean(), self.plain(x).square().mean() / DIVISOR))

    def forward_that_raises(self) -> None:
        with pytest.raises(RuntimeError, match="shapes"):
            self.model(torch.ones(3, 5))

    def evaluate(self) -> None:
        x = self.data()
        with torch.no_grad():
            torch.testing.assert_close(self.model(x), self.plain(x))

    def microbatch(self, *, sync: bool = True) -> None:
        self.forward()
        self._differentiate(*self.losses.pop(), sync=sync)

    def microbatch_no_sync(self) -> None:
        self.microbatch(sync=False)

    def backward(self, *, sync: bool = True) -> None:
        if self.losses:
            self._differentiate(*self.losses.pop(0), sync=sync)

    def backward_no_sync(self) -> None:
        self.backward(sync=False)

    def backward_again(self) -> None:
        if self.losses:
            self._differentiate(*self.losses[0], sync=False, retain_graph=True)

    def _differentiate(self, loss: Tensor, plain: Tensor, *, sync: bool, **kwargs: Any) -> None:
        with nullcontext() if sync else self.model.no_sync():
            loss.backward(**kwargs)
        plain.backward(**kwargs)

    def backward_that_raises(self) -> None:
        x = self.data().requires_grad_()
        loss = self.model(Boom.apply(x)).square().mean()  # raises when all units are done
        with pytest.raises((ArithmeticError, StepError)):
            loss.backward()

    def finish_inside(self) -> None:
        self._inside(self.model.finish_grad_sync)

    def zero_grad_inside(self) -> None:
        self._inside(self.optimizer.zero_grad)

    def _inside(self, call: Any) -> None:
        x = self.data().requires_grad_()
        x.register_hook(lambda _: call())
        with pytest.raises(StepError):
            self.model(x).square().mean().backward()

    def gradients(self) -> None:
        same_gradients(self.model, self.plain)

    def drop(self) -> None:
        """`.grad` of one parameter is set to None, and of the others not."""
        for module in (self.model, self.plain):
            next(module.parameters()).grad = None

    def step(self) -> None:
        self.optimizer.step()
        self.other.step()
        found = dict(self.model.full_weights())
        for name, param in self.plain.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), msg=f"weight {name}")

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.other.zero_grad()

    def load(self) -> None:
        """The weights of another seed; gradients stay, as in torch."""
        values = make(self.number).state_dict()
        self.model.load_state_dict(values)
        self.plain.load_state_dict(values)

    def close(self) -> None:
        self.model.close()


def run_all(strategy: str, calls: list[str], **options: Any) -> None:
    pair = Pair(strategy, **options)
    for call in [*calls, "gradients", "zero_grad", "microbatch_no_sync", "microbatch", "gradients", "step", "evaluate"]:
        pair.run(call)
    pair.close()


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((strategy, {}) for strategy in STRATEGIES),
    ("no_shard", {"grad_buffer": "concat"}),
    ("optim", {"numerics": "exact"}),
    ("optim_grads", {"numerics": "exact"}),
]
sequences = st.lists(st.sampled_from(CALLS), min_size=2, max_size=12)


@pytest.mark.parametrize(("strategy", "options"), VARIANTS, ids=str)
@settings(max_examples=25, deadline=None)
@given(calls=sequences)
@example(calls=["forward", "microbatch", "step", "zero_grad", "backward"])
@example(calls=["microbatch_no_sync", "step", "backward_that_raises", "microbatch", "zero_grad", "microbatch", "step"])
@example(calls=["gradients", "microbatch", "gradients", "microbatch", "step"])
@example(calls=["forward", "backward_that_raises", "backward"])
@example(calls=["forward", "microbatch_no_sync", "load", "backward", "microbatch"])
@example(calls=["forward", "microbatch", "load", "backward", "backward", "microbatch"])
@example(calls=["microbatch", "gradients", "zero_grad"])
@example(calls=["microbatch", "forward", "step", "evaluate"])
@example(calls=["microbatch_no_sync", "drop", "microbatch", "gradients", "step"])
@example(calls=["forward_that_raises", "microbatch", "gradients", "step"])
@example(calls=["forward", "forward_that_raises", "backward", "gradients"])
@example(calls=["microbatch", "drop", "step", "microbatch", "zero_grad", "microbatch", "step", "drop", "evaluate"])
@example(calls=["microbatch", "step", "load", "step"])
@example(calls=["microbatch", "step", "microbatch_no_sync", "microbatch", "step", "zero_grad", "microbatch", "step"])
def test_no_sequence_of_calls_is_silently_wrong(strategy: str, options: dict[str, Any], calls: list[str]) -> None:
    run_all(strategy, calls, **options)


def hole(state: StepState, call: Call) -> Any:
    """The table without a refusal."""
    left = {pair: text for pair, text in REFUSALS.items() if pair != (state, call)}
    return mock.patch.dict(REFUSALS, left, clear=True)


HOLES = {
    "never reduced": (
        "Gradients of a backward inside no_sync() are finished without a reduction",
        lambda: hole(StepState.ACCUMULATED, "finish_grad_sync()"),
        "optim",
        ["microbatch_no_sync"],
    ),
    "half a backward": (
        "Gradients of a backward that raised are finished",
        lambda: hole(StepState.FAILED, "finish_grad_sync()"),
        "no_shard",
        ["backward_that_raises"],
    ),
    "earlier graphs": (
        "A backward mixes old activations with new weights",
        lambda: mock.patch.object(Step, "check_forward"),
        "optim_grads_params",
        ["forward", "microbatch", "step", "zero_grad", "backward"],
    ),
}


@pytest.mark.parametrize("name", each("The engine, by what it cannot take", ((n, h[0]) for n, h in HOLES.items())))
def test_a_hole_in_the_table_shows(name: str) -> None:
    _, opened, strategy, calls = HOLES[name]
    with opened(), pytest.raises((AssertionError, RuntimeError)):
        run_all(strategy, calls)
    run_all(strategy, calls)
