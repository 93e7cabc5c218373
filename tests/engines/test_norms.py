"""The peers' norm and scaling: one number, whatever the dtypes, sizes and magnitudes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness.engines import optim

CPU = torch.device("cpu")


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


def test_scaling_is_the_product_element_by_element() -> None:
    tensors = sample(torch.float32, torch.bfloat16)
    expected = [tensor * 0.37 for tensor in tensors]
    optim.scale(tensors, 0.37)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    optim.scale([], 0.5)
