"""Optimizers that read `decoupled_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.fsdp import MixedPrecisionPolicy, fully_shard
from harness.fsdp.update.flat_step import DECOUPLED, FlatStep
from tests.fsdp.checked import Mutant, each_holds, each_is_found, patched
from tests.fsdp.pairs import Block, Model, data


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
