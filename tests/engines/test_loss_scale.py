"""fp16 under a dynamic loss scale, held against plain torch in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.config.schema import Dtype, Strategy
from harness.engines.adapters.native import LossScale, NativeEngine
from harness.engines.protocol import Ranks
from harness.fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from harness.models.workload import LlamaWorkload
from harness.probe.step_checks.pieces import local_part
from tests.fsdp.test_api import Block
from tests.fsdp.trial import Case, batches
from tests.support.spawn import run_ranks

RANKS = 3
STEPS = 10
GROWTH = 3
CLIP = 0.05
LARGE = {(2, 1, 0), (3, 1, 1), (6, 2, 0)}
"""Step, rank and microbatch of a loss so large that its gradient overflows fp16 at the first loss scales."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(3)))


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-4, foreach=False)


def loss_of(model: nn.Module, step: int, rank: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + index)
    x = torch.randn(2, 6, generator=generator).half()
    return model(x).float().square().sum() * (30.0 if (step, rank, index) in LARGE else 1e-3)


@dataclass
class Trained:
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: list[float] = field(default_factory=list)
    """Step counts of the optimizer."""
    kept: bool = True
    """Whether skipped steps left weights and optimizer state as they were, to the bit."""


def train_plain(k: int) -> Trained:
    """Written without the engine: fp32 weights, an fp16 copy for each forward, gradients added up in fp64."""
    main = build()
    optimizer = optimizer_of(main.parameters())
    scale, good, found = 2.0**16, 0, Trained()
    for step in range(1, STEPS + 1):
        total = [torch.zeros_like(p, dtype=torch.float64) for p in main.parameters()]
        for rank, index in product(range(RANKS), range(k)):
            half = build().half()
            half.load_state_dict({name: value.half() for name, value in main.state_dict().items()})
            (loss_of(half, step, rank, index) * scale).backward()
            for each, p in zip(total, half.parameters(), strict=True):
                assert p.grad is not None
                each += p.grad.double()
        found.scales.append(scale)
        finite = all(bool(each.isfinite().all()) for each in total)
        found.skipped.append(not finite)
        if not finite:
            scale, good = scale / 2, 0
            found.norms.append(math.nan)
            continue
        for each, p in zip(total, main.parameters(), strict=True):
            p.grad = (each / scale / (RANKS * k)).float()
        found.norms.append(float(nn.utils.clip_grad_norm_(main.parameters(), CLIP)))
        optimizer.step()
        good += 1
        if good == GROWTH:
            scale, good = scale * 2, 0
    found.weights = {name: p.detach() for name, p in main.named_parameters()}
    found.moments = [float(held["step"]) for held in optimizer.state.values()]
    return found


RUNS = [
    *((s.name, k, "fast") for s in Strategy for k in (1, 2)),
    *((s, 2, "ordered") for s in ("optim", "optim_grads_params")),
]
"""Strategy, microbatches and promise about sums."""


def train_all(rank: int) -> list[Trained]:
    return [_train(rank, *run) for run in RUNS]


def _train(rank: int, strategy: str, k: int, numerics: str) -> Trained:
    module = build().half()
    optimizer = optimizer_of(module.parameters())
    arguments: dict[str, Any] = {
        "mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=torch.float32),
        "grad_divisor": RANKS * k,
        "numerics": numerics,
        "initial_value": lambda name, shape: dict(build().named_parameters())[name],
    }
    model = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, **arguments)
    fully_shard_optimizer(model, optimizer)
    scale, found = LossScale(model, optimizer, GROWTH), Trained()
    for step in range(1, STEPS + 1):
        before = {name: value.clone() for name, value in model.sharded_state().items()}
        for index in range(k):
            model.set_model_auto_sync(index == k - 1)
            scale.scale(loss_of(model, step, rank, index)).backward()
        norm, outcome = scale.step(CLIP)
        found.scales.append(outcome.scale)
        found.skipped.append(outcome.skipped)
        found.norms.append(norm)
        after = model.sharded_state()
        if outcome.skipped:
            same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
            found.kept = found.kept and same
        model.zero_grad()
    found.weights = dict(model.full_weights())
    found.moments = [float(held["step"]) for held in optimizer.state.values()]
    model.close()
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_all_as_in_one_process() -> None:
    plain = {k: train_plain(k) for k in (1, 2)}
    for k, each in plain.items():
        print(k, each.scales, each.skipped)
        assert any(each.skipped)
        assert min(each.scales) < 2.0**16, "the scale fell"
        assert any(b > a for a, b in pairwise(each.scales)), "and grew again"
    for of_rank in run_ranks(train_all, RANKS):
        for run, found in zip(RUNS, of_rank, strict=True):
            want = plain[run[1]]
            assert (found.scales, found.skipped) == (want.scales, want.skipped), run
            assert found.norms == pytest.approx(want.norms, rel=1e-6, nan_ok=True), run
            assert found.kept, run
            assert set(found.moments) == set(want.moments) == {float(STEPS - sum(want.skipped))}, run
            for name, weight in want.weights.items():
                torch.testing.assert_close(found.weights[name], weight, rtol=1e-5, atol=1e-7)


# -- at a factor of 1 --------------------------------------------------------------------------------------------------


def overflowing(rank: int) -> tuple[str, bool]:
    module = build().half()
    model = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=2)
    optimizer = fully_shard_optimizer(optimizer_of(model.parameters()))
    scale = LossScale(model, optimizer, GROWTH)
    scale.load_state_dict({"scale": torch.tensor(1.0), "good_steps": torch.tensor(0)})
    before = dict(model.full_weights())
    x = torch.full((2, 6), math.nan if rank == 1 else 1.0).half()
    scale.scale(model(x).float().sum()).backward()
    with pytest.raises(FloatingPointError) as caught:
        scale.step(None)
    same = all(torch.equal(before[name], weight) for name, weight in model.full_weights())
    model.close()
    return str(caught.value), same


def test_where_no_smaller_factor_helps_all_ranks_raise_and_keep_their_weights() -> None:
    per_rank = run_ranks(overflowing, 2)
    assert per_rank[0] == per_rank[1]
    message, same = per_rank[0]
    assert "not finite at a loss scale of 1" in message
    assert same


# -- the adapter -------------------------------------------------------------------------------------------------------


def adapter(case: Case, loss_scale: Any, compute: Dtype = Dtype.fp32, growth: int = 2) -> NativeEngine:
    config = case.config()
    config.dtype.compute, config.dtype.loss_scale, config.dtype.loss_scale_growth_steps = compute, loss_scale, growth
    return NativeEngine(LlamaWorkload(config), config, Ranks(0, 1, 0, torch.device("cpu")))


def run_step(engine: NativeEngine, case: Case, step: int) -> tuple[list[float], dict[str, Tensor], float]:
    todo = batches(case, 0, step)
    losses = [engine.forward_backward(b, last=i == len(todo) - 1).item() for i, b in enumerate(todo)]
    gradients = dict(engine.named_gradients())
    return losses, gradients, engine.step(1e-3)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("strategy", [s.name for s in Strategy])
def test_in_fp32_a_loss_scale_changes_no_bit(strategy: str) -> None:
    case = Case("native", strategy, 1, 2, clip=0.05)
    plain, scaled = adapter(case, "none"), adapter(case, "dynamic")
    for step in range(1, 5):
        (losses, gradients, norm), other = run_step(plain, case, step), run_step(scaled, case, step)
        assert (losses, norm) == (other[0], other[2])
        assert all(torch.equal(gradients[name], other[1][name]) for name in gradients)
    assert plain.scaled() is None
    assert scaled.scaled() == (2.0**17, False)
    for (_, one), (_, two) in zip(plain.named_weights(), scaled.named_weights(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.usefixtures("group")
def test_a_resumed_run_goes_on_with_the_same_scale() -> None:
    case = Case("native", "optim", 1, 1)
    first = adapter(case, "dynamic", Dtype.fp16, growth=3)
    for step in (1, 2, 3, 4):
        run_step(first, case, step)
    saved = {key: local_part(value).clone() for key, value in first.state().tensors.items()}
    second = adapter(case, "dynamic", Dtype.fp16, growth=3)
    state = second.state()
    for key, value in state.tensors.items():
        local_part(value).copy_(saved[key])
    state.adopt()
    scales = set()
    for step in range(5, 12):
        scales.add(second.loss_scale.value if second.loss_scale else 0.0)
        assert run_step(first, case, step)[2] == pytest.approx(
            run_step(second, case, step)[2], abs=0, rel=0, nan_ok=True
        )
        assert first.scaled() == second.scaled()
    assert len(scales) > 1, "it changed after the resume"
    for (_, one), (_, two) in zip(first.named_weights(), second.named_weights(), strict=True):
        assert torch.equal(one, two)
