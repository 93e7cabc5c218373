"""A parameter that got a gradient on no rank is left alone, as torch's optimizers leave one whose `.grad` is None.

A model of which every step leaves something unused is trained on one process, which sees all data, and on ranks. Decay
and momentum move what has a gradient of zero, so that the weights tell what was updated. What one rank used, or one
microbatch, is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from tests.fsdp.checked import each_is_found, of_slips
from tests.fsdp.pairs import PAIRS, Pair, arguments_of
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

WORLD, STEPS, WIDTH = 4, 5, 6
fp32, fp64, bf16 = torch.float32, torch.float64, torch.bfloat16
LONG = 200
"""Elements of vectors that several ranks have a part of."""
SMALLEST = -(2.0**-149)
"""Of fp32: half of it is -0 there."""


class Given(torch.autograd.Function):
    """Identity; a parameter beside it gets a gradient that is `value` everywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, value: float) -> Tensor:
        ctx.like, ctx.value = param, value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.full_like(ctx.like, ctx.value), None


class Branch(nn.Module):
    """A unit: what is always used, and a side branch, of which some gradients are -0, and some vanish when scaled.

    Neighbours of one row length share a segment, so that stretches must be cut; the long vectors have several owners.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.muted, self.faint = (nn.Parameter(torch.ones(LONG)) for _ in range(2))

    def forward(self, x: Tensor, *, side: bool) -> Tensor:
        h = torch.tanh(self.up(x))
        if side:
            h = Given.apply(h + self.side(x), self.muted, -0.0)
            h = Given.apply(h, self.faint, SMALLEST)
        out: Tensor = x + self.down(h)
        return out


class Half(nn.Module):
    """Two heads used in turn, layers that are dropped, branches of one rank or one microbatch, and one never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Branch() for _ in range(4))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, step: int, index: int, last: int) -> Tensor:
        x = self.entry(x)
        for place in layers(step):
            x = self.parts[place](x, side=takes_side(place, step, index, last))
        out: Tensor = self.heads[step % 2](x)
        return out


def layers(step: int) -> list[int]:
    """The second layer is dropped in odd steps, the fourth is not used before the third step."""
    return [0] + ([1] if step % 2 == 0 else []) + [2] + ([3] if step >= 2 else [])


def takes_side(place: int, step: int, index: int, last: int) -> bool:
    """Whether microbatch `index` of 0 .. `last` takes a layer's side branch: of the first layer one of them in even
    steps, of the third the first one, of the fourth the last one, of the second none."""
    return (place == 0 and index == 1 and step % 2 == 0) or (place, index) in ((2, 0), (3, last))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3, eps=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3),
}
"""Each with decay and, where it has one, momentum."""


@dataclass(frozen=True)
class Trial:
    """A training. dtype: of the weights that are computed with. more: further arguments of `fully_shard_model`."""

    pair: Pair
    optimizer: str
    k: int = 1
    dtype: torch.dtype = fp64
    more: tuple[tuple[str, Any], ...] = ()
    policy: MixedPrecisionPolicy | None = None

    def __str__(self) -> str:
        named = "-".join(f"{name}={value}" for name, value in self.more)
        return f"{self.pair}-{self.optimizer}-k{self.k}-{self.dtype}-{named}".replace("torch.", "")


@dataclass
class Kept:
    """weights: after each step. stateless: parameters with rows here of which the optimizer keeps nothing."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    stateless: set[str] = field(default_factory=set)

    def moved(self) -> list[set[str]]:
        """Names of weights that each step changed."""
        pairs = itertools.pairwise(self.weights)
        return [{name for name in old if not torch.equal(old[name], new[name])} for old, new in pairs]


def data(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(3, WIDTH, generator=generator, dtype=fp64)


def train(optimizer: str, k: int, rank: int = 0, trial: Trial | None = None) -> Kept:
    """All steps on one process, where `trial` is None, or on a rank."""
    dtype, count, kept = fp64 if trial is None else trial.dtype, k * WORLD, Kept()
    module: Any = Half().to(dtype)
    model: Any = module
    if trial is not None:
        wide = MixedPrecisionPolicy(main_params_dtype=torch.promote_types(fp32, dtype))
        more = {"mixed_precision_policy": trial.policy or wide, **arguments_of(trial.pair, WORLD)}
        model = fully_shard_model(module, fsdp_unit_modules=[Branch], **more, **dict(trial.more))

    def keep() -> None:
        named = module.named_parameters() if trial is None else model.full_weights()
        kept.weights.append({name: weight.detach().clone() for name, weight in named})

    updates = OPTIMIZERS[optimizer](module.parameters())
    if trial is not None:
        fully_shard_optimizer(model, updates)
    keep()
    mine = range(count) if trial is None else range(rank * k, (rank + 1) * k)
    for step in range(STEPS):
        updates.zero_grad()
        for index in mine:
            given = data(step, index).to(dtype), step, index, count - 1
            loss = model(*given).to(torch.promote_types(fp32, dtype)).square().mean() / len(mine)
            with model.no_sync() if trial is not None and index < mine[-1] else nullcontext():
                loss.backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        kept.norms.append(float(nn.utils.get_total_norm(grads) if trial is None else model.grad_norm()))
        updates.step()
        keep()
    kept.stateless = {name for name, p in module.named_parameters() if not updates.state.get(p)}
    if trial is not None:
        model.close()
    return kept


run_plain = once(train)


def run_all(rank: int, trials: tuple[Trial, ...]) -> list[Kept]:
    return [train(trial.optimizer, trial.k, rank, trial) for trial in trials]


@once
def sharded(trials: tuple[Trial, ...]) -> list[list[Kept]]:
    """By rank and trial."""
    return run_ranks(run_all, WORLD, trials)


def difference(found: Kept, trial: Trial) -> str:
    """What is not as on one process, or nothing: values, and what each step moved."""
    right = run_plain(trial.optimizer, trial.k)
    for step, (ours, theirs) in enumerate(zip(found.weights, right.weights, strict=True)):
        off = {name: (ours[name] - weight).abs().max().item() for name, weight in theirs.items()}
        worst = max(off, key=lambda name: off[name])
        if not off[worst] <= (1e-5 if trial.dtype is fp32 else 1e-12):
            return f"{worst} after step {step} off by {off[worst]:.1e}"
    return "" if found.moved() == right.moved() else f"moved {found.moved()}, not {right.moved()}"


def differences(rank: int, trial: Trial) -> str:
    """Of a run on ranks."""
    return difference(run_all(rank, (trial,))[0], trial)


ADAMW = "adamw"
FORMATS: tuple[tuple[int, torch.dtype, MixedPrecisionPolicy | None], ...] = (
    (2, bf16, MixedPrecisionPolicy(grad_comm_dtype=bf16)),
    (1, bf16, MixedPrecisionPolicy(main_grads_dtype=bf16, allow_low_precision_grads=True)),
    (2, fp32, MixedPrecisionPolicy(grad_comm_dtype=torch.float16)),
    (2, fp32, None),
)
OPTIONS = (
    Trial(PAIRS[0], ADAMW, 2, more=(("grad_buffer", "concat"),)),
    Trial(Pair("optim_grads", "optim"), ADAMW, 2, more=(("grad_buffer", "concat"),)),
    Trial(Pair("optim_grads", "no_shard"), ADAMW, 2, more=(("double_buffer", True),)),
    Trial(Pair("optim", ""), ADAMW, 2, more=(("offload_optimizer", True),)),
    Trial(Pair("optim_grads_params", "optim"), ADAMW, 1, more=(("offload_optimizer", True), ("transport", "backend"))),
    Trial(Pair("optim_grads", ""), ADAMW, 2, more=(("report_nan_in_param_grad", True), ("transport", "auto"))),
    Trial(Pair("no_shard", ""), ADAMW, 2, more=(("report_nan_in_param_grad", True),)),
)
CASES = Cover(
    (
        *(
            Trial(pair, name, k, fp32 if numerics == "exact" else fp64, (("numerics", numerics),))
            for pair, k, name, numerics in itertools.product(PAIRS, (1, 2), OPTIMIZERS, ("fast", "ordered", "exact"))
        ),
        *OPTIONS,
        *(Trial(pair, ADAMW, k, dtype, policy=p) for pair, (k, dtype, p) in itertools.product(PAIRS, FORMATS)),
    ),
    values=lambda trial: (
        trial.pair.inner,
        trial.pair.outer,
        "" if trial.pair.outer else trial.optimizer,
        (trial.k, trial.dtype, trial.policy),
        trial.more,
    ),
)


@pytest.mark.parametrize("trial", CASES.params())
def test_an_unused_parameter_is_left_alone(trial: Trial) -> None:
    """By which weights move in every step, in every buffer and format; and by their values, where these are exact
    enough. A rank without rows of a parameter keeps nothing of it either way."""
    trials, right = CASES.batch(trial), run_plain(trial.optimizer, trial.k)
    found = [ran[trials.index(trial)] for ran in sharded(trials)]
    if "numerics" in dict(trial.more):
        assert difference(found[0], trial) == ""
        assert found[0].norms == pytest.approx(right.norms, rel=1e-5)
    assert [kept.moved() for kept in found] == [right.moved()] * WORLD
    assert set().union(*(kept.stateless for kept in found)) == right.stateless


# -- mutants -----------------------------------------------------------------------------------------------------------

SPOILT = {
    "no_shard": Trial(PAIRS[0], ADAMW),
    "optim_grads": Trial(Pair("optim_grads", ""), ADAMW),
    "ordered": Trial(Pair("optim_grads", ""), ADAMW, 2, more=(("numerics", "ordered"),)),
}
CHECKS = {"differences": lambda rank, trial: differences(rank, SPOILT[trial])}
MUTANTS = of_slips(
    r"""
    zeros for all: A parameter that no rank used is updated as if its gradient were zero
        fsdp.runtime.gradient_sync.Usage.find: lambda *_: 0
        differences / no_shard
    one rank decides: What this rank did not use counts as used by none
        fsdp.runtime.gradient_sync.Usage._count: _read(comm, pending, sent[len(sent) - len(had) :], progress) => had
        differences / optim_grads
    the last microbatch decides: A parameter is used if the last microbatch used it
        fsdp.storage.gradients.Gradients.take: return bucket => self.arrived = set()\n    return bucket
        differences / ordered
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by what it leaves alone")
