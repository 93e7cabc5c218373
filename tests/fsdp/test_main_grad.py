"""`param.get_main_grad()`: kernels that add a weight's gradient into the main gradient by themselves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, fully_shard
from harness.fsdp.update.flat_step import DECOUPLED, FlatStep
from tests.fsdp.checked import Mutant, each_holds, each_is_found, patched
from tests.fsdp.pairs import PAIRS, STRATEGIES, WIDTH, Block, Model, Pair, data, same, shard
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

WORLD, STEPS = 4, 2


class FusedLinear(torch.autograd.Function):
    """x W^T; its backward adds to the main gradient and has no gradient to return."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        main = ctx.weight.get_main_grad()
        assert main.shape == ctx.weight.shape
        main.add_((gradients[0].T @ x).to(main.dtype))
        return gradients[0] @ ctx.weight, None


class StandIn(FusedLinear):
    """As TransformerEngine does it: adds, says so, and returns zeros that only tell that the gradient came."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        weight.get_main_grad().add_(gradients[0].T @ x)
        weight.grad_added_to_main_grad = True
        return gradients[0] @ weight, torch.zeros((), dtype=x.dtype).expand(weight.shape)


class PlainLinear(torch.autograd.Function):
    """The same arithmetic, the gradient returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].T @ x


Kinds = tuple[Any, Any]


class Mixed(nn.Module):
    """A unit whose matrices may be fused, and whose bias never is."""

    def __init__(self, hidden: int, fused: Kinds, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(hidden, WIDTH).to(dtype))
        self.down = nn.Parameter((torch.randn(WIDTH, hidden) / hidden).to(dtype))
        self.bias = nn.Parameter(torch.zeros(hidden, dtype=dtype))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.fused
        h = torch.tanh(up.apply(x, self.up) + self.bias)  # type: ignore[no-untyped-call]
        y: Tensor = x + down.apply(h, self.down)  # type: ignore[no-untyped-call]
        return y


class Chain(nn.Module):
    """Three units, `path` of them run; a fused matrix of the root before them, which sees no input with a gradient."""

    def __init__(self, fused: Kinds, path: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.entry = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype))
        self.units = nn.ModuleList(Mixed(hidden, fused, dtype) for hidden in (5, 11, 8))
        self.fused, self.path = fused, path

    def forward(self, x: Tensor) -> Tensor:
        x = self.fused[0].apply(x, self.entry)  # type: ignore[no-untyped-call]
        for place in self.path:
            x = self.units[place](x)
        return x


ONCE, TWICE = (0, 1, 2), (0, 1, 1, 2, 0)
KINDS: dict[str, Kinds] = {
    "none": (PlainLinear, PlainLinear),
    "all": (FusedLinear, FusedLinear),
    "up": (FusedLinear, PlainLinear),
    "down": (PlainLinear, FusedLinear),
    "stand-in": (StandIn, StandIn),
}


def train(
    pair: Pair, kind: str, k: int, numerics: str, path: tuple[int, ...], dtype: torch.dtype, **more: Any
) -> dict[str, Tensor]:
    """Gradients of the first step, and weights after the last."""
    model, optimizer = shard(
        pair, Chain(KINDS[kind], path, dtype), fsdp_unit_modules=[Mixed], numerics=numerics, grad_divisor=WORLD * k,
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32), **more,
    )  # fmt: skip
    found = {}
    for step in range(STEPS):
        for index in range(k):
            model.set_model_auto_sync(index == k - 1)
            x = data(step, dist.get_rank() * k + index).to(dtype)
            model(x).float().square().mean().backward()
        if step == 0:
            found = {f"gradient of {name}": value for name, value in model.full_gradients()}
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    found |= dict(model.full_weights())
    model.close()
    return found


Trial = tuple[Pair, int, str, str]
"""Strategies, microbatches, numerics, and which matrices are fused."""
TRIALS = Cover(
    itertools.product(PAIRS, (1, 2), ("ordered", "exact"), ("all", "up", "down", "stand-in")),
    values=lambda trial: (trial[0].inner, trial[0].outer, *trial[1:]),
)


def compare(rank: int, trials: list[Trial]) -> list[list[str]]:
    """What differs between fused and unfused runs, by trial; all in one process group."""
    found = []
    plain = {}
    for pair, k, numerics, kind in trials:
        path = TWICE if k == 1 else ONCE
        if (pair, k, numerics) not in plain:
            plain[pair, k, numerics] = train(pair, "none", k, numerics, path, torch.float32)
        fused = train(pair, kind, k, numerics, path, torch.float32)
        found.append((same if path == ONCE else differing)(plain[pair, k, numerics], fused))
    return found


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of tensors further apart than a sum of two uses of a weight in another order can bring them.

    Adam moves by no more than its rate whatever the gradient, and eps keeps that smooth; so weights differ by less.
    """
    return [n for n in a if (a[n] - b[n]).abs().max() > 32 * 2.0**-24 * max(1e-3, float(a[n].abs().max()))]


@once
def compared(trials: tuple[Trial, ...]) -> dict[Trial, tuple[list[str], ...]]:
    """What each rank found."""
    return dict(zip(trials, zip(*run_ranks(compare, WORLD, list(trials)), strict=True), strict=True))


@pytest.mark.parametrize("trial", TRIALS.params(lambda trial: "-".join(map(str, trial))))
def test_fused_gradients_are_the_unfused_ones(trial: Trial) -> None:
    """To the bit where each weight is used once a microbatch; units called twice to rounding."""
    assert compared(TRIALS.batch(trial))[trial] == ([],) * WORLD


def of_bf16_weights(rank: int, strategy: str) -> float:
    """256 + 1 - 256 over three microbatches, as the gradient of one weight."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = FusedLinear.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return y

    model, _ = shard(Pair(strategy, ""), One(), fsdp_unit_modules=None)
    for index, value in enumerate((256.0, 1.0, -256.0)):
        model.set_model_auto_sync(index == 2)
        x = torch.full((1, 1), value, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()
    found = dict(model.full_gradients())["weight"].item()
    model.close()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_place_has_the_dtype_gradients_wait_in(strategy: str) -> None:
    """1 in fp32 and 0 in bf16, in which the weight computes."""
    assert run_ranks(of_bf16_weights, 1, strategy) == [1.0]


def refuses_concat(rank: int) -> str:
    model, _ = shard(
        Pair("optim_grads", ""), Chain(KINDS["all"], ONCE, torch.float32), fsdp_unit_modules=[Mixed],
        grad_buffer="concat",
    )  # fmt: skip
    try:
        model(data(0, 0)).sum().backward()
    except NotImplementedError as error:
        return str(error)
    finally:
        model.zero_grad()
        model.close()
    return "nothing"


def test_concat_has_no_place_for_it() -> None:
    assert "grad_buffer=flat" in run_ranks(refuses_concat, 1)[0]


# -- optimizers that read `decoupled_grad` -----------------------------------------------------------------------------


class DecoupledSGD(torch.optim.SGD):
    """Reads `decoupled_grad`, as precision-aware optimizers do."""

    def step(self, closure: Any = None) -> None:
        self.seen = [getattr(p, "decoupled_grad", None) for p in self.param_groups[0]["params"] if _held(p)]


def _held(param: Tensor) -> int:
    return int(getattr(param, "_local_tensor", param).numel())


_decouple = FlatStep._decouple


def _leaves_last_out(self: FlatStep, gradient_of: Any) -> None:
    _decouple(self, gradient_of)
    setattr(self.optimizer.param_groups[-1]["params"][-1], DECOUPLED, None)


def decoupled(rank: int, strategy: str) -> list[str]:
    """Gradients that are not fp32 in the step of a rank; None of what has none."""
    module = Model().bfloat16()
    optimizer: Any = DecoupledSGD(module.parameters(), lr=0.1)
    policy = MixedPrecisionPolicy(None, torch.float32)
    options: dict[str, Any] = {"zero_dp_strategy": strategy, "mixed_precision_policy": policy}
    model, optimizer = fully_shard(module, optimizer, fsdp_unit_modules=[Block], use_decoupled_grad=True, **options)
    model(data(0, rank).bfloat16()).float().sum().backward()
    optimizer.step()
    model.close()
    dtypes = [getattr(gradient, "dtype", None) for gradient in optimizer.seen]
    return [str(dtype) for dtype in dtypes if dtype is not torch.float32] if dtypes else ["nothing was stepped"]


CHECKS = {"decoupled": decoupled}
MUTANTS = {
    "one is left out": Mutant("The last has no gradient", patched(FlatStep, "_decouple", _leaves_last_out), "decoupled")
}
test_bf16_weights_are_stepped_by_gradients_in_fp32 = each_holds(__name__, CHECKS)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by its oracle")
