"""Full gradients and updates of a step on disk: safetensors, each with a JSON file of its content."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.config.captured import Captured
from harness.store.files import private_folder, write_json


def write_capture(folder: Path, step: int, num_microbatches: int, gradients: Iterable[tuple[str, Tensor]]) -> None:
    """Write every gradient under its parameter's name, atomically. Raises `OSError`.

    The JSON beside it has the model's order (safetensors has not) and each tensor's dtype, shape, norm (fp64) and
    SHA-256. It is written last: a capture without it is incomplete.
    """
    facts = {
        "step": step,
        "content": "gradients averaged over the global microbatches, before clipping",
        "num_microbatches": num_microbatches,
    }
    _write(folder / f"step-{step:06d}", facts, gradients)


def write_update(folder: Path, step: int, before: Mapping[str, Tensor], after: Iterable[tuple[str, Tensor]]) -> None:
    """Main weights after minus before a step, in their dtype, as `update-000001.safetensors`. Raises `OSError`."""
    changes = ((name, weight - before[name]) for name, weight in after)
    _write(
        folder / f"update-{step:06d}", {"step": step, "content": "main weights after the step, minus before"}, changes
    )


def write_weights(folder: Path, step: int, weights: Mapping[str, Tensor]) -> None:
    """Main weights before a step, as `weights-000001.safetensors`. Raises `OSError`."""
    _write(folder / f"weights-{step:06d}", {"step": step, "content": "main weights before the step"}, weights.items())


def write_final(folder: Path, steps: int, weights: Mapping[str, Tensor]) -> None:
    """Last main weights, as `final.safetensors`. Raises `OSError`."""
    _write(folder / "final", {"step": steps, "content": "main weights after the last step"}, weights.items())


def write_plan(folder: Path, plan: Captured) -> None:
    """Captured steps, as `captured.json`. Raises `OSError`."""
    private_folder(folder)
    write_json(folder / "captured.json", plan._asdict())


def write_moments(folder: Path, step: int, moments: Iterable[tuple[str, Tensor]]) -> None:
    """Moments before a step, as `<parameter>/<entry>` in `moments-000001.safetensors`. Raises `OSError`."""
    _write(
        folder / f"moments-{step:06d}", {"step": step, "content": "the optimizer's moments before the step"}, moments
    )


def write_rounding(folder: Path, step: int, draws: int, moves: Mapping[str, object]) -> None:
    """Effect of rounding on a step's gradients, as `rounding-000001.json`; see `harness.probe.rounding.moves`. Raises
    `OSError`."""
    private_folder(folder)
    write_json(folder / f"rounding-{step:06d}.json", {"step": step, "draws": draws, "moves": moves})


def write_witness(
    folder: Path,
    step: int,
    expected: Mapping[str, tuple[Tensor, float]],
    kept: Mapping[str, int],
    wrong: Sequence[Mapping[str, object]],
) -> None:
    """Observations of a step beside the engine, as `witness-000001.safetensors`. Raises `OSError`.

    Args: expected: by parameter: the gradient that the reduction must give, and the norm of its terms. kept: by
    parameter: CRC-32 of the first rank's main weights before the step, in the compute dtype. wrong: parameters that
    differ in a rank's forward: rank, tensor, what.
    """
    facts = {
        "step": step,
        "content": "local gradients as autograd gave them, averaged over the global microbatches in fp64",
        "terms": {name: _json_number(norm) for name, (_, norm) in expected.items()},
        "kept": dict(kept),
        "wrong_weights": list(wrong),
    }
    _write(folder / f"witness-{step:06d}", facts, ((name, tensor) for name, (tensor, _) in expected.items()))


def _write(stem: Path, facts: Mapping[str, object], named: Iterable[tuple[str, Tensor]]) -> None:
    private_folder(stem.parent)
    tensors = {name: tensor.contiguous() for name, tensor in named}
    path = stem.with_suffix(".safetensors")
    temporary, description = path.with_suffix(".tmp"), path.with_suffix(".json")
    with ThreadPoolExecutor(2, "capture") as beside:  # the other ranks wait meanwhile: their cores are free to hash on
        described = beside.map(_facts, tensors.values())
        save_file(tensors, temporary)
        description.unlink(missing_ok=True)  # of a step that is done again: it does not describe what comes now
        os.replace(temporary, path)
        write_json(description, {**facts, "tensors": dict(zip(tensors, described, strict=True))})


def tensor_sha256(tensor: Tensor) -> str:
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Bytes of a CPU tensor, without a copy where it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data


def _facts(tensor: Tensor) -> dict[str, object]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "norm": _json_number(torch.linalg.vector_norm(tensor, dtype=torch.float64).item()),
        "sha256": tensor_sha256(tensor),
    }


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)
