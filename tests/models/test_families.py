"""What every family of models promises: microbatches do not matter, nor recomputation; counts are exact."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from harness.config.derived import parameter_count
from harness.models.workload import workload_for
from harness.probe.flops import flops_per_token
from tests.models.families import filled, joined, mean_gradient, option, rows

BRANCHING: list[tuple[str, dict[str, Any]]] = [
    *(("odd", {"repeat_unit": r, "skip_idle": s}) for r, s in itertools.product((False, True), repeat=2)),
    *(("moe", {"skip_idle": skip}) for skip in (False, True)),
]
"""Families of which a microbatch may leave parameters unused."""


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("model", "changes"), BRANCHING)
def test_the_mean_gradient_does_not_depend_on_microbatches(model: str, changes: dict[str, Any], size: int) -> None:
    config = option(f"model={model}", **changes)
    usual = workload_for(option(f"model={model}", **{k: v for k, v in changes.items() if k != "skip_idle"}))
    workload, parts = workload_for(config), rows(config, 4, seed=1 if model == "odd" else 3)
    loss, gradients = mean_gradient(workload, filled(workload), joined(parts, size))
    right, expected = mean_gradient(usual, filled(usual), parts)
    assert loss == pytest.approx(right, rel=1e-13)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-12 * gradient.norm(), name
        assert model == "moe" or gradient.norm() > 0, f"{name} is used by none of these microbatches"


@pytest.mark.parametrize("model", ["tiny", "odd", "moe"])
def test_recomputation_changes_no_bit(model: str) -> None:
    found = []
    for recompute in (False, True):
        config = option(f"model={model}", activation_checkpointing=recompute)
        workload = workload_for(config)
        found.append(mean_gradient(workload, filled(workload, torch.float32), rows(config, 2))[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("model", "changes"),
    [("tiny", {}), *(("moe", {"experts_per_token": k, "tie_embeddings": k == 8}) for k in (1, 2, 8))],
)
def test_parameters_and_operations_are_counted_exactly(model: str, changes: dict[str, Any]) -> None:
    """torch's counter sees every product but the masked half of attention, which the formula leaves out."""
    config = option(f"model={model}", num_layers=2, **changes)
    config.data.seq_len = 9
    workload = workload_for(config)
    built = filled(workload, torch.float32)
    assert sum(weight.numel() for weight in built.parameters()) == parameter_count(config)
    with FlopCounterMode(display=False) as counter:
        mean_gradient(workload, built, rows(config, 2))
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for name, flops in counted.items() if "attention" not in str(name))
    attention = 6 * config.model.num_layers * config.data.seq_len * config.model.dim
    assert products == pytest.approx((flops_per_token(config) - attention) * 18, rel=1e-12)


@pytest.mark.parametrize("repeat_unit", [False, True])
def test_parameters_of_the_odd_family_are_counted_exactly(repeat_unit: bool) -> None:
    config = option("model=odd", num_layers=2, dim=13, ffn_dim=17, vocab_size=19, repeat_unit=repeat_unit)
    workload = workload_for(config)
    assert sum(weight.numel() for weight in filled(workload, torch.float32).parameters()) == parameter_count(config)
