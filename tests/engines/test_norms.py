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


class PretendCuda:
    """A device that says it is CUDA, for arithmetic that is the same there."""

    type = "cuda"


def sample(*dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 5, generator=generator).to(dtypes[i % len(dtypes)]) for i, n in enumerate((7, 300, 1, 64))]


def reference(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32), (torch.float64,)])
def test_grouped_squares_are_the_squares(dtypes: tuple[torch.dtype, ...]) -> None:
    tensors = [*sample(*dtypes), torch.empty(0, dtype=dtypes[0])]
    found = math.sqrt(optim.grouped_squares(tensors, CPU).item())
    assert found == pytest.approx(reference(tensors), rel=1e-6 if torch.float64 not in dtypes else 1e-14)
    assert optim.grouped_squares([], CPU).tolist() == [0.0]


def test_many_tensors_take_as_many_operations_as_two() -> None:
    counts = []
    for number in (2, 200):
        tensors = [torch.randn(4) for _ in range(number)]
        with Count() as counted:
            optim.grouped_squares(tensors, CPU)
            optim.scale(tensors, 0.5)
        counts.append(len(counted.names))
    assert counts[0] == counts[1] <= 10


@pytest.mark.parametrize("magnitude", [1e-25, 1e25, 0.0, float("inf"), float("nan")])
def test_what_fp32_squares_cannot_hold_is_taken_again_in_fp64_by_all_ranks(
    magnitude: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is asked for its kind alone; the arithmetic runs here."""
    tensors = [torch.full((8,), magnitude, dtype=torch.float32)]
    zeros = torch.zeros
    monkeypatch.setattr(optim.torch, "zeros", lambda *size, device=None, **kind: zeros(*size, **kind))
    calls: list[float] = []

    def total(squares: Tensor) -> Tensor:
        calls.append(squares.item())
        return squares

    found = optim.euclidean_norm(tensors, PretendCuda(), total)  # type: ignore[arg-type] # has what is asked of a device
    expected = math.sqrt(8) * float(torch.tensor(magnitude, dtype=torch.float32))
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert len(calls) == 2


def test_scaling_is_the_product_element_by_element() -> None:
    tensors = sample(torch.float32, torch.bfloat16)
    expected = [tensor * 0.37 for tensor in tensors]
    optim.scale(tensors, 0.37)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    optim.scale([], 0.5)
