"""Which parameters share a bucket, and what memory of the process a model takes, against the formula."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from harness.fsdp.storage.parameter_access import grad_of
from tests.fsdp.checked import ZERO3, each_is_found, of_slips
from tests.fsdp.pairs import STRATEGIES
from tests.support.spawn import run_ranks

WIDTH, UNITS = 128, 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width + width // 2), nn.Linear(width + width // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return x + out


class Layer(nn.Module):
    """A unit around a unit of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.inner = nn.Linear(4, 4), Block(4)


def grouped(rank: int, strategy: str = ZERO3) -> list[str]:
    """Buckets that mix units, dtypes or flags, or keep gradients of what is frozen."""
    module = nn.Sequential(Layer(), Layer(), nn.Linear(4, 4))
    module[0].inner.up.bfloat16()
    module[1].own.requires_grad_(False)
    kinds = {name: (name.split(".")[0], p.dtype, p.requires_grad) for name, p in module.named_parameters()}
    model: Any = fully_shard_model(module, fsdp_unit_modules=[Block, Layer], zero_dp_strategy=strategy)
    groups = {tuple(name for name, _ in bucket.params): bucket for bucket in model.engine.buckets}
    found = [str(names) for names in groups if len({kinds[name] for name in names}) > 1]
    found += ["apart"] if len(groups) != len(set(kinds.values())) else []
    found += [str(n) for n, bucket in groups.items() if not kinds[n[0]][-1] and bucket.gradients is not None]
    model.close()
    return found


def test_a_bucket_is_of_one_outermost_unit_dtype_and_flag_and_what_is_frozen_has_no_gradients() -> None:
    assert run_ranks(grouped, 1) == [[]]


CHECKS = {"grouped": grouped}
MUTANTS = of_slips(
    """
    innermost owns: Of nested units the innermost owns parameters
        fsdp.runtime.units.plan_units: if path and unit == id(module) and => if path and
        grouped
    frozen storage: Frozen buckets keep gradients
        fsdp.storage.param_group.ParamGroup._build: dtypes, self.plan) if self.trainable else None => dtypes, self.plan)
        grouped
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by its oracle")


def live_bytes() -> int:
    """Bytes of tensor storage that Python objects of this process hold on the CPU."""
    gc.collect()
    held: dict[int, int] = {}
    # A gradient that autograd put in place is no Python object until somebody asks for it.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    with torch._C.DisableTorchFunctionSubclass():  # a parameter that was kept lets nobody look
        tensors += [found for each in tensors if each.is_leaf and (found := grad_of(each)) is not None]
        for tensor in tensors:
            if type(tensor) is Tensor or type(tensor) is nn.Parameter:
                storage = tensor.untyped_storage()
                held[storage._cdata] = storage.nbytes()  # of released weights there is no address
    return sum(held.values())


KEPT = {
    "no_shard": (2 + 4 + 4 + 8, 0),
    "optim": (2 + 4, 4 + 8),
    "optim_grads": (2, 4 + 4 + 8),
    "optim_grads_params": (0, 2 + 4 + 4 + 8),
}
"""Bytes an element kept whole, and cut over the ranks: bf16 compute, fp32 main weights and gradients, Adam."""


def levels(rank: int, strategy: str) -> dict[str, list[float]]:
    """Bytes an element with gradients, between steps, and once the model is gone."""
    module = nn.Sequential(*(Block() for _ in range(UNITS))).bfloat16()
    numel = sum(param.numel() for param in module.parameters())
    before = live_bytes() - 2 * numel
    optimizer: Any = torch.optim.AdamW(module.parameters())
    model: Any
    policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    more = {"fsdp_unit_modules": [Block], "zero_dp_strategy": strategy, "mixed_precision_policy": policy}
    model, optimizer = fully_shard(module, optimizer, **more)
    found: dict[str, list[float]] = {"reduced": [], "rests": [], "gone": []}
    for _ in range(3):
        model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        found["reduced"].append((live_bytes() - before) / numel)
        optimizer.zero_grad()
        found["rests"].append((live_bytes() - before) / numel)
    model.close()
    del model, module, optimizer
    found["gone"].append((live_bytes() - before) / numel)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_what_the_formula_says_rests_on_one_level_and_goes_with_the_model(strategy: str) -> None:
    whole, cut = KEPT[strategy]
    most = whole + cut / 2
    # compute weights are not kept where they are gathered for each use
    least = most - (2 if strategy in STRATEGIES[2:] else 0)
    for rank in run_ranks(levels, 2, strategy):
        assert all(0.98 * least < level < 1.02 * most for level in rank["reduced"]), rank
        assert max(rank["rests"]) - min(rank["rests"]) < 0.01, rank
        assert rank["gone"][0] < 0.08, rank
