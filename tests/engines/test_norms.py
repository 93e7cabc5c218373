"""The peers' norm: one number, whatever the dtypes, sizes and magnitudes, and the few operations it is made of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.engines import optim

CPU = torch.device("cpu")


class Count(TorchDispatchMode):
    """Counts operations that reach a backend."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def sample(*dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 5, generator=generator).to(dtypes[i % len(dtypes)]) for i, n in enumerate((7, 300, 1, 64))]


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32), (torch.float64,)])
@pytest.mark.parametrize("magnitude", [1.0, 1e-25, 1e25, 0.0, math.inf, math.nan])
def test_the_norm_is_that_of_all_elements(dtypes: tuple[torch.dtype, ...], magnitude: float) -> None:
    tensors = [*(magnitude * each for each in sample(*dtypes)), torch.empty(0, dtype=dtypes[0])]
    expected = math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
    assert optim.euclidean_norm(tensors, CPU) == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert optim.euclidean_norm([], CPU) == 0.0


def test_many_tensors_take_as_many_operations_as_two() -> None:
    counts = []
    for number in (2, 200):
        tensors = [torch.randn(4) for _ in range(number)]
        with Count() as counted:
            optim.scale(tensors, 0.5)
        counts.append(len(counted.names))
    assert counts[0] == counts[1] <= 5


def test_scaling_is_the_product_element_by_element() -> None:
    tensors = sample(torch.float32, torch.bfloat16)
    expected = [tensor * 0.37 for tensor in tensors]
    optim.scale(tensors, 0.37)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    optim.scale([], 0.5)
