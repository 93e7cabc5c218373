"""The routed decoder against experts written out, its routes, and what rounding does to them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from harness.config.roundoff import UNIT
from harness.models.moe import RoutedFeedForward, Router
from harness.models.workload import workload_for
from harness.parity.tiers.arithmetic import Arithmetic
from harness.parity.tiers.envelope import Envelope, _most
from tests.models.families import filled, mean_gradient, option, rows


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_token_gets_its_best_experts_weighted_by_their_probability(k: int) -> None:
    """Token by token, expert by expert."""
    config = option("model=moe", dim=6, ffn_dim=5, num_experts=5, experts_per_token=k).model
    layer = RoutedFeedForward(config, "cpu", torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(generator=generator)
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=generator)
    found = layer(x)
    for b in range(2):
        for s in range(7):
            p = torch.softmax(layer.router.weight @ x[b, s], 0)
            expected = torch.zeros(6, dtype=torch.float64)
            for number in sorted(range(5), key=lambda n: -p[n].item())[:k]:
                expert = layer.experts[number]
                hidden = F.silu(expert.w_gate.weight @ x[b, s]) * (expert.w_up.weight @ x[b, s])
                expected += p[number] * (expert.w_down.weight @ hidden)
            torch.testing.assert_close(found[b, s], expected, rtol=1e-12, atol=1e-12)


def test_the_router_learns_and_scores_in_fp32() -> None:
    router = Router(4, 3, "cpu", torch.bfloat16)
    with torch.no_grad():
        router.weight.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(router(x), F.linear(x.float(), router.weight.float()))
    for k in (1, 2):
        config = option("model=moe", experts_per_token=k)
        workload = workload_for(config)
        _, gradients = mean_gradient(workload, filled(workload), rows(config, 2))
        assert all(gradients[f"blocks.{n}.ffn.router.weight"].norm() > 0 for n in range(3))


@pytest.mark.parametrize("skip_idle", [True, False])
def test_an_expert_without_tokens_gets_no_gradient_or_zeros(skip_idle: bool) -> None:
    config = option("model=moe", skip_idle=skip_idle)
    workload = workload_for(config)
    model = filled(workload)
    tokens = torch.full((1, 2), 7)
    workload.loss(model, (tokens, tokens)).backward()
    experts = [model.get_submodule(f"blocks.0.ffn.experts.{number}").w_up.weight.grad for number in range(8)]
    idle = [gradient is None or not gradient.any() for gradient in experts]
    assert 4 <= sum(idle) <= 6, "two tokens go to two experts each, and these are alike"
    assert all((gradient is None) is (skip_idle and empty) for gradient, empty in zip(experts, idle, strict=True))
    assert workload.may_leave_unused is skip_idle


def test_only_choosing_leaves_experts_unused() -> None:
    assert not workload_for(option("model=moe", num_experts=4, experts_per_token=4)).may_leave_unused
    assert not workload_for(option("model=tiny")).may_leave_unused


def test_routes_flip_as_often_as_the_envelope_says() -> None:
    """Score errors of a known size: the share of tokens whose set of experts changes, and its bound over many draws."""
    n, k, tokens = 8, 2, 200_000
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(tokens, n, generator=generator, dtype=torch.float64)
    run = Arithmetic("bf16", "fp32", "fp32", "fp32", 1, 1, 1, 1, tokens, 48, 1, num_experts=n, experts_per_token=k)
    control = replace(run, compute="fp64")
    error = math.hypot(run.forward, control.forward)
    assert error > UNIT["bf16"] / 4
    noisy = scores + error * torch.randn(tokens, n, generator=generator, dtype=torch.float64)
    best, other = (each.topk(k, dim=-1).indices.sort(-1).values for each in (scores, noisy))
    flipped = (best != other).any(-1).sum().item()
    allowed = Envelope(run, control).flips
    assert allowed / 1.3 < flipped < allowed
    assert Envelope(run, control, same_forward=True).flips == 0
    assert Envelope(replace(run, num_experts=1, experts_per_token=1), control).flips == 0
    counts = torch.poisson(torch.full((100_000,), 0.5), generator=generator)
    assert counts.max() <= _most(0.5) <= 8
    assert _most(1e-8) == 0
