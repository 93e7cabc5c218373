"""The engine's surface: what it refuses, what it promises to a plain loop, and what happens when things go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import fully_shard, fully_shard_model, fully_shard_optimizer, sharding
from harness.fsdp.megatron import UNBUILT
from harness.fsdp.options import Strategy
from tests.support.mutants import Slip, kills

STRATEGIES = [strategy.name for strategy in Strategy]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


pytestmark = pytest.mark.usefixtures("group_of_one")


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(UNBUILT))
def test_an_argument_that_is_not_honoured_is_refused_by_name(name: str) -> None:
    ask = "something" if UNBUILT[name] is None else (not UNBUILT[name])
    model = make()
    with pytest.raises(NotImplementedError, match=f"{name}="):
        fully_shard(model, sgd(model), **{name: ask})
    fully_shard_model(make(), **{name: UNBUILT[name]}).close()


@pytest.mark.parametrize("value", ["zero3", 4, -1, None, True, 2.0])
def test_an_unknown_strategy_lists_the_valid_ones(value: Any) -> None:
    with pytest.raises(ValueError, match="optim_grads_params, 0, 1, 2, 3"):
        fully_shard_model(make(), zero_dp_strategy=value)


@pytest.mark.parametrize("value", [0, 1, 2, 3, *STRATEGIES, *Strategy])
def test_a_strategy_has_three_spellings(value: Any) -> None:
    fully_shard_model(make(), zero_dp_strategy=value).close()


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="prefetch=-1"):
        fully_shard_model(make(), prefetch=-1)
    with pytest.raises(ValueError, match="grad_divisor=0"):
        fully_shard_model(make(), grad_divisor=0)
    with pytest.raises(ValueError, match="calculate_per_token_loss"):
        fully_shard_model(make(), calculate_per_token_loss=True, grad_divisor=2)
    with pytest.raises(ValueError, match=r"no\.such\.Class"):
        fully_shard_model(make(), fsdp_unit_modules=["no.such.Class"])
    with pytest.raises(ValueError, match="dp_shard_dim='dp'"):
        fully_shard_model(make(), dp_shard_dim="dp")
    with pytest.raises(ValueError, match="meta device"):
        fully_shard_model(nn.Linear(2, 2, device="meta"))
    module = nn.Linear(2, 2)
    module.index = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match="floating-point"):
        fully_shard_model(module)


def test_recurrent_layers_leave_the_meta_device() -> None:
    """They look weakly at their parameters, which torch does not swap then."""
    module = nn.LSTM(3, 4, device="meta")
    model = fully_shard_model(module, init_model_with_meta_device=True, device=torch.device("cpu"))
    assert all(mine is one for mine, one in zip(module._flat_weights, module.parameters(), strict=True))
    assert not module._weights_have_changed()
    assert bool(model(torch.ones(2, 3))[0].isfinite().all())


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_a_device_may_be_a_text(device: Any) -> None:
    model = fully_shard(make().to("meta"), unit_modules=[Block], device=device, init_on_meta=True)
    model(torch.ones(2, 6)).sum().backward()
    assert all(param.device.type == param.grad.device.type == "cpu" for param in model.parameters())


@kills("Ordinary programs", "a device as a text", "`device='cpu'` ends in an AttributeError about a text")
def test_a_device_that_is_kept_as_a_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    Slip(sharding, "shard", "torch.device(device or", "(device or").put(monkeypatch)
    with pytest.raises(AttributeError):
        test_a_device_may_be_a_text("cpu")


def test_what_is_frozen_needs_no_policy() -> None:
    """Frozen weights have no main weights and no gradients, so a policy that could not hold them does not matter."""
    model = make()
    model[0].double().requires_grad_(False)
    wrapped = fully_shard_model(model, fsdp_unit_modules=[Block])
    assert dict(wrapped.full_weights())["0.linear.weight"].dtype == torch.float64


# -- what a plain loop may rely on -------------------------------------------------------------------------------------


def test_both_faces_agree() -> None:
    first, second, third = make(), make(), make()
    direct = fully_shard(third, unit_modules=[Block])
    pairs = [
        fully_shard(first, sgd(first), fsdp_unit_modules=[f"{__name__}.Block"]),
        fully_shard(second, sgd(second), unit_modules=[Block], strategy="optim"),
        (direct, fully_shard_optimizer(direct, sgd(third))),
    ]
    for model, optimizer in pairs:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    one, *others = [[weight for _, weight in model.full_weights()] for model, _ in pairs]
    assert all(all(map(torch.equal, one, other)) for other in others)


def test_a_sum_over_any_length_leaves_no_block_out() -> None:
    from harness.shm.transfer import BLOCK, sum_in_order

    for length in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1):
        contributions = [torch.arange(length, dtype=torch.float32) * scale for scale in (1, 2, 3)]
        target = torch.full((length,), torch.nan)
        sum_in_order(contributions, target, torch.float64)
        assert torch.equal(target, torch.arange(length, dtype=torch.float32) * 6)
