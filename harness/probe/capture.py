"""Captured steps on disk: one safetensors file a step, with its JSON in the file's own metadata.

[Note: A captured step] `step-000001.safetensors` has, by parameter name behind a prefix: `gradient/`, averaged over the
global microbatches, before clipping; `local/`, the sum of local gradients in fp64 minus the gradient, in fp32 (fp64
beside an fp64 gradient); `before/`, main weights before the step, unless the step before has them as `after/`;
`moment/`, the optimizer's entries before the step (`moment/NAME/ENTRY`), not at step 1, where they are zero; `after/`,
main weights after it. The metadata's `harness` is JSON: step, num_microbatches, plan (captured steps, if chosen), and
of a step observed beside the engine terms, wrong_weights and whole (parameters whose `local/` is the sum itself).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.store.files import PRIVATE, private_folder
from harness.store.shapes import METADATA


def write_step(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> None:
    """Write a captured step, atomically; tensors have the prefixes above. Raises `OSError`."""
    private_folder(folder)
    path, text = folder / f"step-{step:06d}.safetensors", json.dumps({"step": step, **facts}, allow_nan=False)
    temporary = path.with_suffix(".tmp")
    save_file(dict(tensors), temporary, {METADATA: text})
    temporary.chmod(PRIVATE)
    os.replace(temporary, path)


def beside(expected: Tensor, gradient: Tensor | None) -> tuple[Tensor, bool]:
    """`expected` (fp64) as stored beside a gradient, and True if that is `expected` itself.

    Rounding of the difference to fp32 is 2**-24 of what is lost in the gradient.
    """
    if gradient is None or gradient.shape != expected.shape:
        return expected, True
    off = expected - gradient.double()
    stored = off if gradient.dtype is torch.float64 else off.float()
    return (stored, False) if bool(stored.isfinite().all()) else (expected, True)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Bytes of a CPU tensor, without a copy where it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data


def json_number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)
