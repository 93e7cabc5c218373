"""Tensors of a checkpoint: each chunk is written by one of the ranks that hold it, and read by those that need it.

A rank holds one chunk of each tensor: its part of a DTensor, or all of any other tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.checkpoint import tensor_file
from harness.checkpoint.manifest import Chunk, Damaged, Manifest, TensorEntry
from harness.probe.step_checks.pieces import local_part

Deliver = Callable[[str, Tensor, Tensor], None]
"""Takes a tensor's key, stored elements, and this rank's own in the same places."""


class Held(NamedTuple):
    """This rank's chunk of a tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    part: Tensor
    """Elements, over the engine's own memory."""


def held_of(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Chunks by key, but of DTensors of which this rank has no elements."""
    found = {}
    for key, tensor in tensors.items():
        part, offsets = local_part(tensor), (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            chunks: list[Any] = tensor.__create_chunk_list__()
            if not chunks or not part.numel():
                continue
            (chunk,) = chunks
            offsets = tuple(chunk.offsets)
        found[key] = Held(tuple(tensor.shape), offsets, part)
    return found


def described(held: Mapping[str, Held]) -> list[Any]:
    """Key, dtype, full shape, offsets and sizes of this rank's chunks, as JSON for the other ranks."""
    return [
        [key, str(part.dtype).removeprefix("torch."), shape, offsets, list(part.shape)]
        for key, (shape, offsets, part) in held.items()
    ]


def shared_out(told: Sequence[Sequence[Any]]) -> dict[str, TensorEntry]:
    """Entries of all tensors: a chunk lies in the file of the rank that has it and the least to write until then.

    Args: told: `described` of every rank. Raises `ValueError`: chunks do not make up their tensor.
    """
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank, chunks in enumerate(told):
        for key, dtype, shape, offsets, sizes in chunks:
            kinds[key] = dtype, tuple(shape)
            holders.setdefault((key, tuple(offsets), tuple(sizes)), []).append(rank)
    written, found = [0] * len(told), dict[str, list[Chunk]]()
    for (key, offsets, sizes), ranks in holders.items():
        rank = min(ranks, key=lambda each: written[each])
        written[rank] += math.prod(sizes)
        name = f"{key}@{','.join(map(str, offsets))}" if any(offsets) else key
        found.setdefault(key, []).append(Chunk(offsets, sizes, file_of(rank), name))
    for key, (_, shape) in kinds.items():
        if sum(math.prod(chunk.sizes) for chunk in found[key]) != math.prod(shape):
            raise ValueError(f"the ranks' chunks of {key} do not make up a tensor of {list(shape)}")
    by_place = {key: tuple(sorted(chunks, key=lambda chunk: chunk.offsets)) for key, chunks in found.items()}
    return {key: TensorEntry(*kind, by_place[key]) for key, kind in kinds.items()}


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write(folder: Path, rank: int, held: Mapping[str, Held], entries: Mapping[str, TensorEntry]) -> list[Any]:
    """Write what is this rank's to write; size and checksum of the file, or nothing without a chunk.

    Raises as `tensor_file.write`.
    """
    chunks = ((key, chunk) for key, entry in entries.items() for chunk in entry.chunks)
    own = {chunk.name: held[key].part for key, chunk in chunks if chunk.file == file_of(rank)}
    if not own:
        return []
    written = tensor_file.write(folder / file_of(rank), own)
    return [written.bytes, written.xxh3]


def read(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor], deliver: Deliver) -> None:
    """Deliver the stored elements of every tensor's chunk on this rank.

    Raises `Damaged`: chunks lack some of them, or as `held_chunk`.
    """
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for key, own in held_of(tensors).items():
            entry, count = manifest.tensors[key], 0
            for chunk in entry.chunks:
                here, there = _overlap(own, chunk)
                target = own.part[here]
                if not target.numel():
                    continue
                if chunk.file not in opened:
                    opened[chunk.file] = stack.enter_context(safe_open(folder / chunk.file, framework="pt"))
                deliver(key, held_chunk(opened[chunk.file], chunk, dtype_of(entry))[there], target)
                count += target.numel()
            if count != own.part.numel():
                raise Damaged(f"{folder} has {count} of {own.part.numel()} elements of {key}")


def _overlap(held: Held, chunk: Chunk) -> tuple[tuple[slice, ...], ...]:
    """Places of the common elements, in this rank's part and in the chunk."""
    rows = list(zip(held.offsets, held.part.shape, chunk.offsets, chunk.sizes, strict=True))
    spans = [(max(a, b), max(a, b, min(a + n, b + m))) for a, n, b, m in rows]
    return tuple(
        tuple(slice(begin - at, end - at) for (begin, end), at in zip(spans, offsets, strict=True))
        for offsets in (held.offsets, chunk.offsets)
    )


def load_into(_: str, stored: Tensor, target: Tensor) -> None:
    """Fill the target; another dtype is rounded to nearest, ties to even, as by `Tensor.copy_`."""
    target.copy_(stored)


def is_loaded(stored: Tensor, target: Tensor) -> bool:
    """True if the target has the bits that `load_into` gives it."""
    cast = stored.to(target.dtype).to(target.device)
    flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (target, cast)]
    if all(each.numel() % 8 == 0 and each.data_ptr() % 8 == 0 for each in flat):
        flat = [each.view(torch.int64) for each in flat]  # compared eight times as fast
    return torch.equal(*flat)


def held_chunk(file: Any, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """A chunk of an opened safetensors file, mapped, not read.

    Raises `Damaged`: the file has no such tensor, or one of another shape or dtype.
    """
    held: Tensor | None = file.get_tensor(chunk.name) if chunk.name in file.keys() else None  # noqa: SIM118 # no mapping
    if held is None or (tuple(held.shape), held.dtype) != (chunk.sizes, dtype):
        described = "none" if held is None else f"{held.dtype} {list(held.shape)}"
        raise Damaged(f"{chunk.file}: {chunk.name} should be {dtype} {list(chunk.sizes)} and is {described}")
    return held


def dtype_of(entry: TensorEntry) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype


def whole_tensor(folder: Path, entry: TensorEntry) -> Tensor:
    """Unsharded tensor from its chunks, without other ranks."""
    whole = torch.empty(entry.shape, dtype=dtype_of(entry))
    for chunk in entry.chunks:
        with safe_open(folder / chunk.file, framework="pt") as file:
            place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place].copy_(held_chunk(file, chunk, whole.dtype))
    return whole
