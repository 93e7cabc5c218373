"""The engine's surface: what it refuses, what it promises to a plain loop, and what happens when things go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, ShardedModel, fully_shard, fully_shard_model, fully_shard_optimizer
from harness.fsdp.megatron import UNBUILT
from harness.fsdp.vocabulary import Strategy
from tests.support.spawn import run_ranks

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


@pytest.fixture(autouse=True)
def group(tmp_path: Any) -> Any:
    """A process group of one for every test that does not start ranks."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(UNBUILT))
def test_an_argument_that_is_not_honoured_is_refused_by_name(name: str) -> None:
    ask = "something" if UNBUILT[name] is None else (not UNBUILT[name])
    model = make()
    with pytest.raises(NotImplementedError, match=f"{name}="):
        fully_shard(model, sgd(model), **{name: ask})
    fully_shard_model(make(), **{name: UNBUILT[name]}).close()


def test_an_argument_nobody_knows_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="fsdp_units"):
        fully_shard_model(make(), fsdp_units=[Block])


@pytest.mark.parametrize("value", ["zero3", 4, -1, None, True, 2.0])
def test_an_unknown_strategy_lists_the_valid_ones(value: Any) -> None:
    with pytest.raises(ValueError, match="'optim_grads_params'"):
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
    with pytest.raises(ValueError, match="is no nn"):
        fully_shard_model(make(), fsdp_unit_modules=[int])
    with pytest.raises(ValueError, match="dp_shard_dim='dp'"):
        fully_shard_model(make(), dp_shard_dim="dp")
    with pytest.raises(ValueError, match="has no parameters"):
        fully_shard(nn.Identity(), device=torch.device("cpu"))
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


def test_low_precision_gradients_must_be_asked_for() -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="allow_low_precision_grads"):
        fully_shard_model(make(), mixed_precision_policy=policy)


def test_what_is_frozen_needs_no_policy() -> None:
    """Frozen weights have no main weights and no gradients, so a policy that could not hold them does not matter."""
    model = make()
    model[0].double().requires_grad_(False)
    wrapped = fully_shard_model(model, fsdp_unit_modules=[Block])
    assert dict(wrapped.full_weights())["0.linear.weight"].dtype == torch.float64


def test_optimizers_that_need_whole_matrices_are_refused_by_name() -> None:
    model = make()
    with pytest.raises(TypeError, match="LBFGS"):
        fully_shard(model, torch.optim.LBFGS(model.parameters()))


# -- what a plain loop may rely on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_in_no_group_are_not_updated(strategy: str) -> None:
    model = make()
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()])
    wrapped, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    before = dict(wrapped.full_weights())
    wrapped(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    moved = {name for name, value in wrapped.full_weights() if not torch.equal(before[name], value)}
    assert moved == {name for name in before if not name.startswith("1.")}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_leaves_nothing_behind(strategy: str) -> None:
    model = make()
    expected = make()(torch.ones(2, 6))
    wrapped, _ = fully_shard(model, sgd(model), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    resting = wrapped._parts.memory.live_bytes
    with torch.no_grad():
        assert torch.equal(wrapped(torch.ones(2, 6)), expected)
    assert wrapped._parts.memory.live_bytes == resting
    wrapped(torch.ones(2, 6)).sum().backward()
    wrapped.finish_grad_sync()
    assert wrapped._parts.memory.live_bytes == resting, "memory returns to rest after each backward"


def test_a_forward_that_raises_does_not_spoil_the_next() -> None:
    model = make()
    wrapped, optimizer = fully_shard(model, sgd(model), fsdp_unit_modules=[Block])
    with pytest.raises(RuntimeError, match="shapes"):
        wrapped(torch.ones(2, 5))
    plain = make()
    wrapped(torch.ones(2, 6)).sum().backward()
    plain(torch.ones(2, 6)).sum().backward()
    gradients = dict(wrapped.full_gradients())
    assert all(torch.equal(gradients[name], p.grad) for name, p in plain.named_parameters())
    optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_add_up_without_no_sync_and_after_a_step(strategy: str) -> None:
    model, plain = make(), make()
    wrapped, optimizer = fully_shard(model, sgd(model), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    other = sgd(plain)
    for each, own in ((wrapped, optimizer), (plain, other)):
        for _ in range(2):
            each(torch.ones(2, 6)).sum().backward()
        own.step()
        each(torch.full((2, 6), 0.5)).sum().backward()
        own.step()
    gradients = dict(wrapped.full_gradients())
    assert all(torch.allclose(gradients[name], p.grad) for name, p in plain.named_parameters())
    weights = dict(wrapped.full_weights())
    assert all(torch.allclose(weights[name], p) for name, p in plain.named_parameters())


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_step_without_reduction_is_refused(strategy: str) -> None:
    model = make()
    wrapped, optimizer = fully_shard(model, sgd(model), zero_dp_strategy=strategy)
    with wrapped.no_sync():
        wrapped(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="never reduced"):
        optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_set_to_none_forgets_gradients_as_torch_does(strategy: str) -> None:
    """Those of an earlier microbatch too, that a later one would be added to."""
    model, plain = make(), make()
    wrapped, _ = fully_shard(model, sgd(model), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    for each in (wrapped, plain):
        each.zero_grad()
    with wrapped.no_sync():
        wrapped(torch.ones(2, 6)).sum().backward()
    plain(torch.ones(2, 6)).sum().backward()
    for each in (model, plain):
        for p in each.parameters():
            p.grad = None
        each(torch.full((2, 6), 0.5)).sum().backward()
    gradients = dict(wrapped.full_gradients())
    assert all(torch.allclose(gradients[name], p.grad) for name, p in plain.named_parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_without_backward_before_the_step_keeps_no_old_weights(strategy: str) -> None:
    model, plain = make(), make()
    wrapped, optimizer = fully_shard(model, sgd(model), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    other = sgd(plain)
    for each, opt in ((wrapped, optimizer), (plain, other)):
        each(torch.ones(2, 6)).sum().backward()
        each(torch.ones(2, 6))  # its graph is dropped; gathered weights must not outlive the step
        opt.step()
    assert torch.equal(wrapped(torch.ones(2, 6)), plain(torch.ones(2, 6)))


def test_both_faces_agree() -> None:
    first, second = make(), make()
    wrapped, optimizer = fully_shard(first, sgd(first), fsdp_unit_modules=[f"{__name__}.Block"])
    direct = fully_shard(second, unit_modules=[Block])
    other = fully_shard_optimizer(direct, sgd(second))
    for model, opt in ((wrapped, optimizer), (direct, other)):
        model(torch.ones(2, 6)).sum().backward()
        opt.step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(wrapped.full_weights(), direct.full_weights(), strict=True))


def test_activation_checkpointing_around_a_unit() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = make()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model, plain = Checkpointed(), Checkpointed()
    wrapped = fully_shard_model(model, fsdp_unit_modules=[Block, nn.Linear])
    wrapped(torch.ones(2, 6)).sum().backward()
    plain(torch.ones(2, 6)).sum().backward()
    gradients = dict(wrapped.full_gradients())
    assert all(torch.equal(gradients[name], p.grad) for name, p in plain.named_parameters())


def test_fp32_gradients_of_bf16_weights_keep_small_contributions() -> None:
    """256 + 1 - 256 is 1 in fp32 and 0 in bf16."""
    for strategy in STRATEGIES:
        weight = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
        model = fully_shard_model(weight, zero_dp_strategy=strategy)
        for index, value in enumerate((256.0, 1.0, -256.0)):
            model.set_model_auto_sync(index == 2)
            model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
        assert dict(model.full_gradients())["weight"].item() == 1.0


def local_state_round_trip(rank: int, strategy: str) -> list[bool]:
    torch.manual_seed(rank)
    data = [torch.randn(3, 6) for _ in range(4)]

    def build() -> tuple[ShardedModel, torch.optim.Optimizer]:
        model = make()
        return fully_shard(
            model, torch.optim.AdamW(model.parameters(), lr=0.1), fsdp_unit_modules=[Block], zero_dp_strategy=strategy
        )

    def step(model: ShardedModel, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    for x in data[:2]:
        step(model, optimizer, x)
    saved = {key: value.clone() for key, value in model.local_state().items()}
    other, other_optimizer = build()
    other.load_local_state(saved)
    for x in data[2:]:
        step(model, optimizer, x)
        step(other, other_optimizer, x)
    equal = all(torch.equal(a, b) for (_, a), (_, b) in zip(model.full_weights(), other.full_weights(), strict=True))
    refused = []
    for broken in (
        {k: v for k, v in saved.items() if not k.endswith(":0")},
        {**saved, "weights/other:0": torch.zeros(1)},
        {k: v.double() for k, v in saved.items()},
        {k: v[:-1] if v.dim() else v for k, v in saved.items()},
    ):
        before = [w for _, w in other.full_weights()]
        try:
            other.load_local_state(broken)
            refused.append(False)
        except ValueError as error:
            unchanged = all(torch.equal(a, b) for a, (_, b) in zip(before, other.full_weights(), strict=True))
            refused.append("nothing was loaded" in str(error) and unchanged)
    return [equal, *refused]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_local_state_resumes_bit_for_bit_and_refuses_what_does_not_fit(strategy: str) -> None:
    dist.destroy_process_group()
    try:
        for found in run_ranks(local_state_round_trip, 2, strategy):
            assert found == [True] * 5
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("add", [False, True])
def test_contributions_are_summed_in_rank_order_in_the_accumulate_dtype(add: bool) -> None:
    """((2^25 - 2^25) + 1) is 1 in fp32; from the other end the 1 is lost. In bf16 256 + 1 - 256 is 0."""
    from harness.fsdp.comm.reduction import _sum_in_order

    contributions = [torch.tensor([2.0**25]), torch.tensor([-(2.0**25)]), torch.tensor([1.0])]
    target = torch.tensor([10.0])
    _sum_in_order(contributions, target, torch.float32, add=add)
    assert target.item() == (11.0 if add else 1.0)
    _sum_in_order(contributions[::-1], target, torch.float32, add=False)
    assert target.item() == 0.0
    wire = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, -256.0)]
    _sum_in_order(wire, target, torch.float32, add=False)
    assert target.item() == 1.0


def test_a_sum_over_any_length_leaves_no_block_out() -> None:
    from harness.fsdp.comm.reduction import _sum_in_order
    from harness.shm.transfer import BLOCK

    for length in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1):
        contributions = [torch.arange(length, dtype=torch.float32) * scale for scale in (1, 2, 3)]
        target = torch.full((length,), torch.nan)
        _sum_in_order(contributions, target, torch.float64, add=False)
        assert torch.equal(target, torch.arange(length, dtype=torch.float32) * 6)


@pytest.mark.parametrize("name", ["fsdp_double_buffer", "double_buffer"])
def test_the_double_buffer_goes_by_both_names(name: str) -> None:
    model = fully_shard_model(make(), fsdp_unit_modules=[Block], **{name: True})
    assert model.options.double_buffer
    model.close()
