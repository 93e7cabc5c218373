"""What reads, scales or sets `.grad` of a sharded parameter is right, or raises and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import GradientAccessError, ShardedModel
from harness.fsdp.runtime import readiness
from harness.fsdp.runtime.gradient_answer import Answer
from tests.fsdp.pairs import STRATEGIES, Block, Model, Pair, data, loss_of, plain_gradients, shard
from tests.support.covering import once
from tests.support.mutants import each
from tests.support.spawn import run_ranks

READS: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.1),
    "get_total_norm": lambda m: nn.utils.get_total_norm([p.grad for p in m.parameters()]),
    "scaled": lambda m: [p.grad.mul_(0.5) for p in m.parameters()],
    "of the module": lambda m: nn.utils.clip_grad_norm_(m.module.parameters(), 0.1),
    "set": lambda m: [setattr(p, "grad", torch.zeros_like(p)) for p in m.parameters()],
}


def built(strategy: str) -> tuple[ShardedModel, torch.optim.Optimizer]:
    return shard(Pair(strategy, ""), Model(), fsdp_unit_modules=[Block])


def backward(model: ShardedModel, rank: int, step: int = 0) -> None:
    loss_of(model, data(step, rank)).backward()


def told_by(rank: int, model: ShardedModel) -> dict[str, str]:
    found = {}
    for name, read in READS.items():
        try:
            found[name] = f"nothing: {read(model)}"
        except GradientAccessError as error:
            found[name] = str(error)
        except Exception as error:
            found[name] = f"nothing that says what to do: {error}"
    return found


def read_all(rank: int) -> dict[str, list[dict[str, str]]]:
    """After a backward, after the gradients are finished, and after the update."""
    found: dict[str, list[dict[str, str]]] = {}
    for strategy in STRATEGIES:
        model, optimizer = built(strategy)
        assert all(p.grad is None for p in model.parameters())
        backward(model, rank)
        before = told_by(rank, model)
        norm = model.grad_norm()
        found[strategy] = [before, told_by(rank, model)]
        assert model.grad_norm() == norm, "nothing was clipped"
        optimizer.step()
        found[strategy].append(told_by(rank, model))
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        model.close()
    return found


reads = once(lambda: run_ranks(read_all, 2))


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reading_a_gradient_raises_with_the_way_to_it(strategy: str, name: str) -> None:
    for ran in reads():
        for moment in ran[strategy]:
            assert moment[name].startswith(".grad of entry.weight")
            assert ("flat buffers" if name == "set" else "model.clip_grad_norm_(max_norm") in moment[name]


def forgetting(rank: int, strategy: str) -> list[Any]:
    """Gradient norms of one step: alone, and after forgetting another step's in three ways; and what is refused."""
    norms: list[Any] = []
    for forget in (lambda m: None, lambda m: m.module.zero_grad(), lambda m: m.zero_grad(), set_to_none):
        model, _ = built(strategy)
        if norms:
            backward(model, rank, 1)
            forget(model)
        backward(model, rank)
        norms.append(model.grad_norm())
        model.close()
    model, optimizer = built(strategy)
    backward(model, rank)
    next(model.parameters()).grad = None
    try:
        optimizer.step()
        norms.append("stepped")
    except RuntimeError as error:
        norms.append(str(error))
    model.zero_grad()
    model.close()
    return norms


def set_to_none(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_forgotten_all_or_none(strategy: str) -> None:
    for right, *others, refusal in run_ranks(forgetting, 2, strategy):
        assert others == [right] * 3
        assert ".grad of entry.weight was set to None, and of other parameters it was not" in refusal


def asking(rank: int, strategy: str) -> tuple[str, float, float]:
    """What torch.autograd.grad() of parameters says, then the step's norm; and the norm without having asked."""
    model, _ = built(strategy)
    found = grad_of_parameters(rank, model)
    backward(model, rank)
    norm = model.grad_norm()
    model.close()
    model, _ = built(strategy)
    backward(model, rank)
    right = model.grad_norm()
    model.close()
    return found, norm, right


def grad_of_parameters(rank: int, model: ShardedModel) -> str:
    try:
        given = torch.autograd.grad(loss_of(model, data(1, rank)), list(model.parameters()))
        return f"nothing: {len(given)} tensors"
    except GradientAccessError as error:
        return str(error)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autograd_is_not_asked_for_gradients_of_parameters(strategy: str) -> None:
    for told, norm, right in run_ranks(asking, 2, strategy):
        assert told.startswith("torch.autograd.grad() was asked for the gradient of ")
        assert "model.full_gradients()" in told
        assert norm == right


CHOSEN = ("blocks.0.up.weight", "blocks.1.down.bias")


def choosing(rank: int, strategy: str) -> dict[str, Tensor]:
    """Gradients of a backward that is asked for two parameters, of units that are released between uses."""
    model, optimizer = built(strategy)
    params = dict(model.named_parameters())
    loss_of(model, data(0, rank)).backward(inputs=[params[name] for name in CHOSEN])
    found = dict(model.full_gradients())
    before = dict(model.full_weights())
    optimizer.step()
    moved = {name for name, now in model.full_weights() if not torch.equal(now, before[name])}
    assert moved == set(CHOSEN)
    model.close()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_may_be_asked_for_some_parameters(strategy: str) -> None:
    plain = plain_gradients([data(0, rank) for rank in range(2)], 0.5)
    for found in run_ranks(choosing, 2, strategy):
        for name, gradient in found.items():
            right = plain[name] if name in CHOSEN else torch.zeros_like(plain[name])
            assert torch.allclose(gradient.double(), right, atol=1e-6), name


MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "reading": (
        "torch's clipping finds what happens to lie in `.grad`",
        lambda: mock.patch.object(Answer, "read", lambda self, held: held),
    ),
    "setting": (
        "A gradient that is set is not seen by the step, and nobody says so",
        lambda: mock.patch.object(Answer, "assign"),
    ),
    "asking autograd": (
        "torch.autograd.grad() gives what comes of this rank's data alone",
        lambda: mock.patch.object(readiness, "_will_come", return_value=False),
    ),
}


def visit(rank: int) -> dict[str, dict[str, str]]:
    found = {}
    for name, (_, patch) in MUTANTS.items():
        with patch():
            model, _ = built("optim_grads")
            asked = grad_of_parameters(rank, model) if name == "asking autograd" else ""
            backward(model, rank)
            found[name] = {"asked": asked} if asked else told_by(rank, model)
            model.finish_grad_sync()
            model.close()
    return found


mutated = once(lambda: run_ranks(visit, 2))


@pytest.mark.parametrize("name", each("The engine, by who reads gradients", ((n, m[0]) for n, m in MUTANTS.items())))
def test_a_mutant_is_found(name: str) -> None:
    assert any(told.startswith("nothing") for told in mutated()[0][name].values())
