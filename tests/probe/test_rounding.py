"""The perturbed reference against what it stands for: passes that really compute in fewer bits."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor, nn

from harness.engines.protocol import Microbatch
from harness.models.workload import TokenWorkload, workload_for
from harness.probe.rounding import _gradients, moves
from tests.models.families import filled, option, rows

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def built(model: str, dtype: torch.dtype) -> tuple[TokenWorkload, nn.Module, list[Microbatch]]:
    workload = workload_for(option(f"model={model}"))
    return workload, filled(workload, dtype), rows(option(f"model={model}"), 6, length=24)


FEW = {("tiny", "bf16"), ("odd", "fp32"), ("moe", "bf16")}
"""Each model and each dtype; `make test-all` takes every pair."""


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(model, dtype, marks=() if (model, dtype) in FEW else pytest.mark.full)
        for model in ("tiny", "odd", "moe")
        for dtype in DTYPES
    ],
)
def test_moves_are_what_a_narrow_pass_shows(model: str, dtype: str) -> None:
    """Every tensor of some size within a factor 4 (what a verdict allows), the middle one within 2.5 either way."""
    workload, exact_model, batches = built(model, torch.float64)
    exact, _ = _gradients(workload.loss, exact_model, batches)
    narrow, _ = _gradients(workload.loss, built(model, DTYPES[dtype])[1], batches)
    found = moves(workload.loss, exact_model, batches, [dtype], 4, 0)[dtype]
    ratios = [
        float((narrow[name].double() - grad).norm() / grad.norm()) / found[name]["distance"]
        for name, grad in exact.items()
        if name in found and grad.numel() >= 32
    ]
    assert max(ratios) < 4.0
    assert 0.4 < statistics.median(ratios) < 2.5


def test_the_model_and_its_gradients_stay_as_they_were() -> None:
    workload, model, batches = built("odd", torch.float64)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    moves(workload.loss, model, batches, ["bf16"], 1, 0)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert all(param.grad is None for param in model.parameters())


def test_one_seed_gives_one_answer_and_wider_dtypes_move_less() -> None:
    workload, model, batches = built("odd", torch.float64)
    first, again = (moves(workload.loss, model, batches, ["bf16", "fp16", "fp32"], 2, 7) for _ in range(2))
    assert first == again
    off = [first[dtype][""]["distance"] for dtype in ("bf16", "fp16", "fp32")]
    assert off[0] > 4 * off[1] > 1e3 * off[2]
    assert off[0] / off[1] == pytest.approx(8, rel=0.5), "three bits"


def test_a_scale_is_spread_far_less_than_the_distance() -> None:
    workload, model, batches = built("tiny", torch.float64)
    found = moves(workload.loss, model, batches, ["bf16"], 4, 0)["bf16"]
    assert found[""]["scale"] < found[""]["distance"]
    assert 0 < found[""]["loss"] < 2.0**-8


class Summing(nn.Module):
    """Weights that get their gradients as sums over all rows, each in another way of torch's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.bag = (nn.Parameter(torch.rand(4, 32).to(dtype)) for _ in range(2))
        self.embedding = nn.Embedding(4, 32, dtype=dtype)
        self.norm = nn.LayerNorm(32, dtype=dtype)
        self.bias = nn.Parameter(torch.rand(32).to(dtype))

    def forward(self, rows: Tensor) -> Tensor:
        bags = nn.functional.embedding_bag(rows[:, None], self.bag, mode="sum")
        seen = torch.randn(len(rows), 32, generator=torch.Generator().manual_seed(3)).to(self.bias.dtype)
        return self.norm(seen) + self.embedding(rows) + self.table[rows] + bags + self.bias


def test_sums_that_are_made_in_16_bits_move_as_far_as_they_do() -> None:
    """Of 2,000 rows: an index, bags, an embedding and a LayerNorm; a bias, whose sum is made in fp32, is near by."""

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        left = torch.randn(len(rows), 32, generator=torch.Generator().manual_seed(1))
        return (model(rows).float() * left.to(next(model.parameters()).dtype)).mean()

    rows = [torch.randint(0, 4, (2_000,), generator=torch.Generator().manual_seed(2))]
    exact, _ = _gradients(loss, Summing(torch.float64), rows)
    narrow, _ = _gradients(loss, Summing(torch.bfloat16), rows)
    found = moves(loss, Summing(torch.float64), rows, ["bf16"], 4, 0)["bf16"]
    off = {name: float((narrow[name].double() - grad).norm() / grad.norm()) for name, grad in exact.items()}
    assert min(value for name, value in off.items() if name != "bias") > 1e-2 > 2 * off["bias"]
    assert all(0.3 < value / found[name]["distance"] < 3 for name, value in off.items()), (off, found)
