"""Full gradients and updates of a step on disk: safetensors, each with a JSON file that says what is in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.store.files import write_json


def write_capture(folder: Path, step: int, num_microbatches: int, gradients: Iterable[tuple[str, Tensor]]) -> None:
    """Write every gradient under its parameter's name, whole or not at all.

    The JSON beside it keeps the model's order (safetensors does not) and says of each tensor its dtype, shape, norm
    (in fp64) and the SHA-256 of its bytes. It is written last: a capture without it is not complete.

    Raises:
        OSError: the folder cannot be written.
    """
    facts = {
        "step": step,
        "content": "gradients averaged over the global microbatches, before clipping",
        "num_microbatches": num_microbatches,
    }
    _write(folder / f"step-{step:06d}", facts, gradients)


def write_update(folder: Path, step: int, before: Mapping[str, Tensor], after: Iterable[tuple[str, Tensor]]) -> None:
    """Write what a step changed: main weights after minus before, in their dtype, as `update-000001.safetensors`.

    Raises:
        OSError: the folder cannot be written.
    """
    changes = ((name, weight - before[name]) for name, weight in after)
    _write(
        folder / f"update-{step:06d}", {"step": step, "content": "main weights after the step, minus before"}, changes
    )


def _write(stem: Path, facts: Mapping[str, object], named: Iterable[tuple[str, Tensor]]) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in named}
    path = stem.with_suffix(".safetensors")
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.chmod(0o644)  # safetensors makes files only their owner reads
    os.replace(temporary, path)
    write_json(path.with_suffix(".json"), {**facts, "tensors": {name: _facts(each) for name, each in tensors.items()}})


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a CPU tensor's bytes, in hex."""
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, not copied where it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data


def _facts(tensor: Tensor) -> dict[str, object]:
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float64).item()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "norm": repr(norm) if norm != norm or norm in (float("inf"), float("-inf")) else norm,
        "sha256": tensor_sha256(tensor),
    }
