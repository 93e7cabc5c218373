"""Programs that are valid, or wrong in a way a user would not notice: each was once a silent wrong number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, ShardedModel, Strategy, fully_shard, fully_shard_model
from tests.fsdp.test_api import Block, make, sgd
from tests.support.spawn import run_ranks

STRATEGIES = [strategy.name for strategy in Strategy]


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def same_gradients(wrapped: ShardedModel, plain: nn.Module) -> None:
    found = dict(wrapped.full_gradients())
    for name, param in plain.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(found[name], expected, msg=f"gradient of {name}")


class Scaled(nn.Module):
    """A parameter of the root that the loss uses after the forward, as CLIP's temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_root_parameter_used_after_the_forward_keeps_its_gradient(strategy: str, dtype: torch.dtype) -> None:
    model, plain = Scaled().to(dtype), Scaled().to(dtype)
    wrapped = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    for each, owner in ((wrapped, model), (plain, plain)):
        (each(torch.ones(2, 6, dtype=dtype)) * owner.scale.exp()).float().square().sum().backward()
    found = dict(wrapped.full_gradients())["scale"]
    assert found.item() == pytest.approx(plain.scale.grad.item(), rel=1e-6 if dtype is torch.float32 else 2e-2)


@dataclass
class Output:
    logits: Tensor
    note: str = ""


class Wrapping(Scaled):
    def forward(self, x: Tensor) -> Output:
        return Output(self.body(x))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_outputs_in_a_dataclass(strategy: str) -> None:
    wrapped, plain = fully_shard_model(Wrapping(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy), Wrapping()
    for each in (wrapped, plain):
        each(torch.ones(2, 6)).logits.square().sum().backward()
    same_gradients(wrapped, plain)


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("boom")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_that_raises_is_forgotten_whole(strategy: str) -> None:
    model, plain = make(), make()
    wrapped, optimizer = fully_shard(model, sgd(model), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    x = torch.ones(2, 6)
    hidden = Boom.apply(wrapped.module[0](x))  # the upper units' backward is done when it raises
    with wrapped.unsharded("2"), pytest.raises(ArithmeticError):
        wrapped.module[2](wrapped.module[1](hidden)).sum().backward()
    with pytest.raises(RuntimeError, match="last backward raised"):
        optimizer.step()
    optimizer.zero_grad()
    wrapped(x).sum().backward()
    plain(x).sum().backward()
    same_gradients(wrapped, plain)


class Collecting(nn.Module):
    """A unit that writes to an argument, as auxiliary losses and caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, bag: list[Tensor], pair: tuple[Tensor, int], *, extra: Tensor) -> Tensor:
        x = x + self.linear(x) * pair[0] + extra
        bag.append(x.square().mean())
        return x


class Gathering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Collecting(), Collecting()

    def forward(self, x: Tensor) -> Tensor:
        bag: list[Tensor] = []
        x = self.first(x, bag, (x, 3), extra=x)
        x = self.second(x, bag, (x, 3), extra=x)
        return x.sum() + torch.stack(bag).sum()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_unit_writes_to_its_arguments_is_kept(strategy: str) -> None:
    wrapped = fully_shard_model(Gathering(), fsdp_unit_modules=[Collecting], zero_dp_strategy=strategy)
    plain = Gathering()
    losses = [each(torch.ones(2, 6)) for each in (wrapped, plain)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    same_gradients(wrapped, plain)


class Ignoring(Block):
    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return super().forward(x)


class Rooted(nn.Module):
    """A unit called `root`, and an input nothing uses: its gradient must stay absent, sqrt(0) would make it NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.root = Ignoring()
        self.z = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.root(x, self.z.sqrt()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_unused_input_gets_no_gradient_and_a_unit_may_be_called_root(strategy: str) -> None:
    wrapped = fully_shard_model(Rooted(), fsdp_unit_modules=[Ignoring], zero_dp_strategy=strategy, grad_divisor=2.0)
    plain = Rooted()
    wrapped(torch.ones(2, 6)).sum().backward()
    (plain(torch.ones(2, 6)).sum() / 2).backward()
    same_gradients(wrapped, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_grad_forgets_and_a_step_without_a_backward_changes_nothing(strategy: str) -> None:
    model = make()
    wrapped, optimizer = fully_shard(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), fsdp_unit_modules=[Block], zero_dp_strategy=strategy
    )
    wrapped(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [weight for _, weight in wrapped.full_weights()]
    assert wrapped.grad_norm() == 0.0
    optimizer.step()
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, wrapped.full_weights(), strict=True))


def test_an_evaluation_with_gradients_on_costs_no_memory_later() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(8)))
    wrapped, optimizer = fully_shard(model, sgd(model), fsdp_unit_modules=[Block])

    def step() -> None:
        wrapped(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    usual = wrapped.counters()["transient_peak_bytes"]
    wrapped(torch.ones(2, 6))  # its graph is never used
    optimizer.step()
    step()
    step()
    assert wrapped.counters()["transient_peak_bytes"] == usual


def test_what_would_be_ignored_is_refused() -> None:
    model = make()
    wrapped, optimizer = fully_shard(model, sgd(model), fsdp_unit_modules=[Block])
    for call in (lambda: optimizer.step(grad_scaler=1), wrapped.double):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard_model(model)
    with pytest.raises(ValueError, match="cannot hold the module"):
        fully_shard_model(make().double())
    MixedPrecisionPolicy(main_params_dtype=None).resolve(torch.float64)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_changed_after_sharding_are_noticed(strategy: str) -> None:
    for change, says in (
        (lambda m: m.double(), "cannot be cast or moved"),
        (lambda m: m[0].double(), "no longer the engine's"),
        (
            lambda m: torch.utils.swap_tensors(m[0].linear.bias, nn.Parameter(torch.ones(6))),
            "no longer the engine's" if strategy == "no_shard" else "Cannot swap",  # torch's own words
        ),
    ):
        model = make()
        wrapped = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
        with pytest.raises(RuntimeError, match=says):  # by the change, or by the forward that follows
            change(model), wrapped(torch.ones(2, 6))


def two_models(rank: int) -> list[float]:
    """Two models of one shape whose gradients are reduced in one backward."""
    first, second = (fully_shard_model(nn.Linear(256, 256, bias=False), zero_dp_strategy=2) for _ in range(2))
    worst = 0.0
    for _ in range(4):
        x = torch.full((1, 256), float(rank + 1))
        (first(x).sum() + 10 * second(x).sum()).backward()
        for model, expected in ((first, 1.5), (second, 15.0)):
            worst = max(worst, (dict(model.full_gradients())["weight"] - expected).abs().max().item())
            model.zero_grad()
    return [worst]


def test_two_models_do_not_take_each_others_gradients() -> None:
    dist.destroy_process_group()
    try:
        assert run_ranks(two_models, 2) == [[0.0], [0.0]]
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
