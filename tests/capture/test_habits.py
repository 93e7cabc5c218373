"""Habits of training loops under a watch: each trains the same bits, and is recorded as the plain loop is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.capture import watch
from harness.parity.compare import compare
from harness.parity.outcome import Outcome
from harness.parity.record import load
from tests.capture import loops
from tests.support.mutants import finds

STEPS = 4


def lowers(step: int, net: nn.Module, optimizer: Any) -> None:
    """As a schedule that moves the rate before the step is told of."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def clips(step: int, net: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def checkpointed(net: loops.Net) -> None:
    for block in net.blocks:
        again = partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = again  # type: ignore[method-assign] # of this one block


def compiled(net: loops.Net) -> None:
    for block in net.blocks:
        block.compile(backend="eager")


HABITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "closure": {"by_closure": True},
    "schedule": {"after_update": lowers},
    "clipping": {"before_update": clips},
    "checkpointing": {"build": checkpointed},
    "compile": {"build": compiled},
}


def train(path: Path | None, name: str) -> list[bytes]:
    return loops.train(0, "single", path, steps=STEPS, **HABITS[name])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "study" / "plain"
    train(path, "plain")
    return path


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_recorded_and_changes_no_bit(name: str, tmp_path: Path) -> None:
    path = tmp_path / "study" / "run"
    assert train(path, name) == train(None, name)
    record = load(path)
    assert record.problems == ()
    assert record.length == STEPS
    assert record.captures.keys() == {1}
    train(tmp_path / "study" / "again", name)
    verdict = compare(path, tmp_path / "study" / "again")
    assert verdict.outcome is Outcome.EQUAL, verdict.sentence


@pytest.mark.parametrize("name", ["closure", "checkpointing", "compile"])
def test_a_habit_that_changes_no_arithmetic_is_the_plain_loop(name: str, plain: Path, tmp_path: Path) -> None:
    train(tmp_path / "study" / "run", name)
    verdict = compare(tmp_path / "study" / "run", plain)
    assert verdict.outcome in (Outcome.EQUAL, Outcome.EQUIVALENT), verdict.sentence


def test_rates_are_those_of_the_update(tmp_path: Path) -> None:
    train(tmp_path / "study" / "run", "schedule")
    rates = load(tmp_path / "study" / "run").series("lr")
    assert rates == pytest.approx([1e-3 * 0.9**step for step in range(STEPS)])


def adversarial(path: Path | None) -> list[bytes]:
    """Two models, two optimizers, each of which steps once a step: a list of modules, as pipeline stages are."""
    torch.manual_seed(0)
    generator, critic = nn.ModuleDict({"make": nn.Linear(4, 6)}), nn.ModuleDict({"judge": nn.Linear(6, 1)})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (generator, critic)]
    run = None if path is None else watch([generator, critic], optimizers, path, share=1.0)
    for step in range(STEPS):
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for sign, optimizer in zip((1, -1), optimizers, strict=True):
            loss = sign * critic["judge"](torch.tanh(generator["make"](noise))).mean()
            for each_optimizer in optimizers:
                each_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if run is not None:
            run.step(loss=loss, data=noise)
    if run is not None:
        run.close()
    return [param.detach().numpy().tobytes() for each in (generator, critic) for param in each.parameters()]


def test_two_models_with_an_optimizer_each_are_one_run(tmp_path: Path) -> None:
    path = tmp_path / "study" / "gan"
    assert adversarial(path) == adversarial(None)
    record = load(path)
    assert record.problems == ()
    assert record.length == STEPS
    assert record.captures[1].tensors.keys() == {"make.weight", "make.bias", "judge.weight", "judge.bias"}


test_a_mutant_is_found = finds(
    "Habits under a watch",
    test_a_habit_that_changes_no_arithmetic_is_the_plain_loop="""
        closures: Gradients are seen before a closure ran
            capture.watching.Watching._before_update: if closure is None: => if True:
            (name="closure")
    """,
    test_rates_are_those_of_the_update="""
        rate: The rate is not the optimizer's
            capture.watching.Watching._update: float(optimizer.param_groups[0]["lr"]) => 1.0
    """,
)
