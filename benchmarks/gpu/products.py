"""FP8 products of this device beside their emulation, element by element: printed as JSON, a row a pair of tiles.

    python benchmarks/gpu/products.py DEVICE

`right`: whether this device has such a product, of which whole numbers come out exactly, without which products of
the tiles are emulated; `error`: the largest difference from the emulation over sizes of a decoder's layer, beside the
sum of the terms' magnitudes: an accumulator that keeps fewer bits than fp32 shows here.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from harness.fp8.linear import PAIRS, emulate, has_product, scaled_mm
from harness.fp8.quantize import E4M3, Scaling, Tile, quantize

SIZES = ((256, 512, 384), (40, 1024, 2048), (1024, 256, 4096))
"""Rows, columns, and elements that are summed."""


def main(device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return [row(a, b, device) for a, b in PAIRS]


def row(a: Tile, b: Tile, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": f"scaled_mm of {a} by {b}"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found["right"] = has_product(a, b, device)
    found["why"] = [str(each.message) for each in told]
    if found["right"]:
        found["error"] = max(error(a, b, size, device) for size in SIZES)
    return found


def error(a: Tile, b: Tile, size: tuple[int, int, int], device: torch.device) -> float:
    """Largest difference from the emulation, beside the sum of the terms' magnitudes."""
    rows, columns, summed = size
    scaling = Scaling.exact if a.columns is None else Scaling.power_of_two
    left, right = (
        quantize(torch.randn(count, summed, device=device), E4M3, tile, scaling)
        for count, tile in ((rows, a), (columns, b))
    )
    sums = left.dequantize().abs() @ right.dequantize().abs().t()
    return float(((scaled_mm(left, right) - emulate(left, right)).abs() / sums).max())


if __name__ == "__main__":
    print(json.dumps(main(torch.device(sys.argv[1])), indent=2))
