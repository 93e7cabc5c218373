"""A parameter that got a gradient on no rank is left alone, as torch's optimizers leave one whose `.grad` is None.

Decay and momentum move what has a gradient of zero, so that the weights tell. What one rank used, or one microbatch,
is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

from harness.fsdp import MixedPrecisionPolicy, ShardedModel, StepError, create_state, fully_shard
from harness.fsdp.runtime.usage import Usage
from harness.fsdp.storage.gradients import Gradients
from tests.fsdp import unused
from tests.fsdp.pairs import PAIRS, Pair
from tests.fsdp.unused import STEPS, Half, Record, Trial, train_plain, train_sharded
from tests.support.covering import Cover, once
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks

WORLD = 4
bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
TRIALS = Cover(
    (
        Trial(pair, k, optimizer, numerics, fp32 if numerics == "exact" else fp64)
        for pair, k, optimizer, numerics in itertools.product(
            PAIRS, (1, 2), ("adamw", "sgd", "adam", "rmsprop", "nadam"), ("fast", "ordered", "exact")
        )
    ),
    values=lambda trial: (
        trial.pair.inner,
        trial.pair.outer,
        trial.k,
        "" if trial.pair.outer else trial.optimizer,
        trial.numerics,
    ),
)


def train_all(rank: int, world: int, trials: tuple[Trial, ...]) -> list[Record]:
    return [train_sharded(rank, trial, world) for trial in trials]


@once
def records(trials: tuple[Trial, ...], world: int = WORLD) -> dict[Trial, list[Record]]:
    per_rank = run_ranks(train_all, world, world, trials)
    return {trial: [ran[place] for ran in per_rank] for place, trial in enumerate(trials)}


plain = once(train_plain)


def difference(found: list[Record], right: Record, tolerance: float) -> str:
    """What is not as on one process, or nothing. A rank without rows of a parameter keeps nothing of it either way."""
    for step, (ours, theirs) in enumerate(zip(found[0].weights, right.weights, strict=True)):
        off = {name: (ours[name] - weight).abs().max().item() for name, weight in theirs.items()}
        worst = max(off, key=lambda name: off[name])
        if not off[worst] <= tolerance:
            return f"{worst} after step {step} off by {off[worst]:.1e}"
    if found[0].moved() != right.moved():
        return f"moved {found[0].moved()}, not {right.moved()}"
    kept = set().union(*(record.stateless for record in found))
    return "" if kept == right.stateless else f"no state of {kept}, not of {right.stateless}"


@pytest.mark.parametrize("trial", TRIALS.params())
def test_an_unused_parameter_is_left_alone(trial: Trial) -> None:
    right = plain(trial.optimizer, WORLD * trial.k, trial.dtype)
    found = records(TRIALS.batch(trial))[trial]
    assert difference(found, right, 1e-5 if trial.dtype is fp32 else 1e-12) == ""
    assert found[0].norms == pytest.approx(right.norms, rel=1e-5)


# -- who tells whom, and in which formats ------------------------------------------------------------------------------

LOW = MixedPrecisionPolicy(main_grads_dtype=bf16, allow_low_precision_grads=True)
NARROW, HALF = MixedPrecisionPolicy(grad_comm_dtype=bf16), MixedPrecisionPolicy(grad_comm_dtype=torch.float16)
WAYS = (
    Trial(PAIRS[0], 2, more=(("grad_buffer", "concat"),)),
    Trial(Pair("optim_grads", "optim"), 2, more=(("grad_buffer", "concat"),)),
    Trial(Pair("optim_grads_params", ""), 2, more=(("accumulate_unsharded", True),)),
    Trial(Pair("optim_grads", "no_shard"), 2, more=(("accumulate_unsharded", True), ("double_buffer", True))),
    Trial(Pair("optim", ""), 2, more=(("offload_optimizer", True),)),
    Trial(Pair("optim_grads_params", "optim"), 1, more=(("offload_optimizer", True), ("transport", "backend"))),
    Trial(Pair("optim_grads", ""), 2, more=(("report_nan_in_param_grad", True), ("transport", "auto"))),
    Trial(Pair("no_shard", ""), 2, more=(("report_nan_in_param_grad", True),)),
    *(Trial(pair, 2, dtype=bf16, policy=NARROW) for pair in PAIRS[::4]),
    *(Trial(pair, 1, dtype=bf16, policy=LOW) for pair in PAIRS[1::4]),
    *(Trial(pair, 2, dtype=fp32, policy=HALF) for pair in PAIRS[2::4]),
    *(Trial(pair, 2, dtype=fp32) for pair in PAIRS[3::4]),
)
"""Every pair in one of four formats; `ELSEWHERE`, for `make test-all`, has further ones."""
ELSEWHERE = (
    *(Trial(pair, 2, dtype=bf16, policy=NARROW) for pair in PAIRS[2::4]),
    *(Trial(pair, 1, dtype=bf16, policy=LOW) for pair in PAIRS[3::4]),
    *(Trial(pair, 2, dtype=fp32, policy=HALF) for pair in PAIRS[::4]),
    *(Trial(pair, 2, dtype=fp32) for pair in PAIRS[1::4]),
)


@pytest.mark.parametrize(
    ("trials", "trial"),
    [pytest.param(WAYS, trial, id=f"{place}-{trial}") for place, trial in enumerate(WAYS)]
    + [pytest.param(ELSEWHERE, t, id=f"{len(WAYS) + i}-{t}", marks=pytest.mark.full) for i, t in enumerate(ELSEWHERE)],
)
def test_in_every_buffer_and_format(trials: tuple[Trial, ...], trial: Trial) -> None:
    """By which weights move, and in every step: what decays is used."""
    found = records(trials)[trial]
    right = plain(trial.optimizer, WORLD * trial.k)
    assert [record.moved() for record in found] == [right.moved()] * WORLD
    assert set().union(*(record.stateless for record in found)) == right.stateless


# -- saving and loading ------------------------------------------------------------------------------------------------


def resume(rank: int, world: int, trial: Trial, before: int, after: int) -> list[dict[str, Tensor]]:
    """Weights at the end: of a training that goes on, of one that loads local state, and of one that loads by name.

    Loading is into models that have run no step, and into one whose runs were cut elsewhere (`after` steps).
    """
    first = unused.build(trial, world)
    run(first, trial, rank, world, range(before))
    local = {key: value.clone() for key, value in first[0].local_state().items()}
    named = {key: value.clone() for key, value in first[0].sharded_state().tensors.items()}
    found = []
    run(first, trial, rank, world, range(before, STEPS))
    found.append(dict(first[0].full_weights()))
    for way in ("local", "named"):
        model, optimizer = unused.build(trial, world)
        run((model, optimizer), trial, rank, world, range(after))
        if way == "local":
            model.load_local_state(local)
        else:
            create_state(optimizer)
            state = model.sharded_state()
            assert state.tensors.keys() >= named.keys()
            for key, value in named.items():
                state.tensors[key].copy_(value)
            model.adopt_state(state)
        run((model, optimizer), trial, rank, world, range(before, STEPS))
        found.append(dict(model.full_weights()))
        model.close()
    return found


def run(built: tuple[ShardedModel, torch.optim.Optimizer], trial: Trial, rank: int, world: int, steps: range) -> None:
    for step in steps:
        unused.backward(built[0], trial, rank, world, step)
        built[1].step()
        built[1].zero_grad()


def resume_all(rank: int, world: int, pairs: tuple[Pair, ...]) -> list[list[dict[str, Tensor]]]:
    names, steps = itertools.cycle(("adamw", "sgd", "nadam")), itertools.cycle(((1, 0), (3, 1)))
    return [resume(rank, world, Trial(pair, 1, next(names)), *next(steps)) for pair in pairs]


@pytest.mark.parametrize("pairs", [PAIRS[::2], pytest.param(PAIRS[1::2], marks=pytest.mark.full)], ids=["few", "rest"])
def test_saved_state_is_taken_up_wherever_runs_were_cut(pairs: tuple[Pair, ...]) -> None:
    """Counters of Adam differ between neighbours; bits do not depend on where runs are cut."""
    for found in run_ranks(resume_all, WORLD, WORLD, pairs):
        for went_on, *loaded in found:
            assert all(torch.equal(went_on[name], each[name]) for each in loaded for name in went_on)


# -- what other engines do -------------------------------------------------------------------------------------------


def train_ddp(rank: int, world: int, optimizer: str) -> Record:
    module = Half().double()
    model = DistributedDataParallel(module, find_unused_parameters=True)
    return _train_peer(module, model, optimizer, rank, world)


def train_fsdp2(rank: int, world: int, optimizer: str) -> Record:
    module = Half().double()
    for part in module.parts:
        fsdp2(part)
    fsdp2(module)
    return _train_peer(module, module, optimizer, 0, 1, seen_by=world)


def _train_peer(module: nn.Module, model: nn.Module, optimizer: str, rank: int, world: int, seen_by: int = 1) -> Record:
    """`world` microbatches a step; `seen_by` ranks see the same ones, where all must run the same units."""
    stepped, record = unused.make_optimizer(optimizer, module), Record()
    count = max(world, seen_by)
    for step in range(STEPS):
        stepped.zero_grad()
        for index in [rank] if world > 1 else range(count):
            (unused.loss_of(model, step, index, count, fp64) / (1 if world > 1 else count)).backward()
        stepped.step()
        record.weights.append({name: _whole(param) for name, param in module.named_parameters()})
    return record


def _whole(param: Any) -> Tensor:
    found: Tensor = (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
    return found


@pytest.mark.parametrize("peer", [train_ddp, train_fsdp2], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_ddp_and_fsdp2_leave_the_same_alone(peer: Callable[..., Record], optimizer: str) -> None:
    """What one process does is what they do; so it is what we are held against."""
    right = plain(optimizer, 2)
    found = run_ranks(peer, 2, 2, optimizer)[0]
    for ours, theirs in zip(found.weights, right.weights[1:], strict=True):
        assert all(torch.allclose(ours[name], weight, rtol=0, atol=1e-12) for name, weight in theirs.items())


def one_backward_more(rank: int, strategy: str) -> str:
    """Rank 0 runs two backwards in its second step; the error of the third, at the latest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = fully_shard(model, torch.optim.SGD(model.parameters()), zero_dp_strategy=strategy)
    try:
        for step in range(4):
            for _ in range(2 if (rank, step) == (0, 1) else 1):
                model(torch.full((2, 4), rank + 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except StepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_ranks_in_different_steps_are_told_so(strategy: str) -> None:
    told = run_ranks(one_backward_more, 2, strategy)
    assert all("some rank ran a backward more, or less" in each for each in told)


# -- mutants -----------------------------------------------------------------------------------------------------------

_forget = Gradients.take
OWN_ALONE = Slip(Usage, "_count", "each % _UPDATE for each in totals", "had[place] for place, _ in enumerate(totals)")


def _forgetful(self: Gradients) -> Tensor:
    taken = _forget(self)
    self.came = set()
    return taken


MUTANTS: dict[str, tuple[str, Callable[[], Any], Trial]] = {
    "zeros for all": (
        "A parameter that no rank used is updated as if its gradient were zero",
        lambda: mock.patch.object(Usage, "find", return_value=0),
        Trial(PAIRS[0]),
    ),
    "one rank decides": (
        "What this rank did not use counts as used by none",
        lambda: mock.patch.object(Usage, "_count", OWN_ALONE.made()),
        Trial(Pair("optim_grads", "")),
    ),
    "the last microbatch decides": (
        "A parameter is used if the last microbatch used it",
        lambda: mock.patch.object(Gradients, "take", _forgetful),
        Trial(Pair("optim_grads", ""), 2, numerics="ordered"),
    ),
}


def visit(rank: int) -> dict[str, Record]:
    """Every mutant's training; and under "" + its name that of the engine as it is."""
    found = {}
    for name, (_, patch, trial) in MUTANTS.items():
        with patch():
            found[name] = train_sharded(rank, trial, WORLD)
    return found


@once
def mutated() -> list[dict[str, Record]]:
    return run_ranks(visit, WORLD)


@pytest.mark.parametrize("name", each("The engine, by what it leaves alone", ((n, m[0]) for n, m in MUTANTS.items())))
def test_a_mutant_is_found(name: str) -> None:
    _, _, trial = MUTANTS[name]
    right = plain(trial.optimizer, WORLD * trial.k, trial.dtype)
    assert difference([ran[name] for ran in mutated()], right, 1e-5 if trial.dtype is fp32 else 1e-12) != ""
