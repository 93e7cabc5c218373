"""DCP's storage interface over safetensors files and a JSON manifest, without pickle on disk.

Ranks still plan through `torch.distributed` object collectives, as DCP does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner as DcpLoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner as DcpSavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from harness.checkpoint import tensor_file
from harness.checkpoint.manifest import Chunk, Damaged, FileEntry, Manifest, TensorEntry


@dataclass(frozen=True)
class Stored:
    chunk: Chunk
    entry: FileEntry


class Unprepared:
    """Methods that DCP calls before it moves data, where there is nothing to do."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one call to the next."""

    def set_up_storage_writer(self, *_: Any, **__: Any) -> None:
        """Nothing to prepare."""

    set_up_storage_reader = set_up_storage_writer

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


class Writer(Unprepared, StorageWriter):
    """Writes this rank's chunks into one file; the coordinator writes the manifest at the end.

    Args: folder: exists; each rank adds `rank-<rank>.safetensors`. values: plain JSON for the manifest.
    """

    def __init__(self, folder: Path, rank: int, values: Mapping[str, Any]) -> None:
        self.folder = folder
        self.rank = rank
        self.values = dict(values)

    def write_data(self, plan: SavePlan, planner: DcpSavePlanner) -> Future[list[WriteResult]]:
        """Raises `TypeError`: something is no tensor; it belongs into `values`. Otherwise as `tensor_file.write`."""
        chunks = {_name(item): item for item in plan.items}
        refused = [item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO]
        if refused:
            raise TypeError(f"no tensors, and nothing is pickled here: {', '.join(refused[:5])}")
        results: list[WriteResult] = []
        if chunks:
            name = f"rank-{self.rank:05d}.safetensors"
            tensors: dict[str, Any] = {each: planner.resolve_data(item) for each, item in chunks.items()}
            written = tensor_file.write(self.folder / name, tensors)
            entry = FileEntry(written.bytes, written.xxh3)
            for each, item in chunks.items():
                chunk = Chunk(tuple(item.index.offset or ()), tuple(tensors[each].shape), name, each)
                results.append(WriteResult(item.index, tensors[each].nbytes, Stored(chunk, entry)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, FileEntry] = {}
        chunks: dict[str, list[Chunk]] = {}
        for result in (each for found in results for each in found):
            files[result.storage_data.chunk.file] = result.storage_data.entry
            chunks.setdefault(result.index.fqn, []).append(result.storage_data.chunk)
        tensors = {
            key: TensorEntry(
                str(entry.properties.dtype).removeprefix("torch."),
                tuple(entry.size),
                tuple(sorted(chunks.get(key, []), key=lambda each: each.offsets)),
            )
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        Manifest(tensors, files, self.values).write(self.folder)


class Reader(Unprepared, StorageReader):
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.chunks = {(key, chunk.offsets): chunk for key, entry in manifest.tensors.items() for chunk in entry.chunks}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata(state_dict_metadata={key: stored(entry) for key, entry in self.manifest.tensors.items()})

    def read_data(self, plan: LoadPlan, planner: DcpLoadPlanner) -> Future[None]:
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            for item in plan.items:
                chunk = self.chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                if chunk.file not in opened:
                    opened[chunk.file] = stack.enter_context(safe_open(self.folder / chunk.file, framework="pt"))
                entry = self.manifest.tensors[item.storage_index.fqn]
                held = held_chunk(opened[chunk.file], chunk, dtype_of(entry))
                ranges = zip(item.storage_offsets, item.lengths, strict=True)
                target = planner.resolve_tensor(item).detach()
                self._deliver(held[tuple(slice(begin, begin + size) for begin, size in ranges)], item, target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _deliver(self, part: Tensor, item: ReadItem, target: Tensor) -> None:
        """Fill the target; another dtype is rounded to nearest, ties to even, as by `Tensor.copy_`."""
        target.copy_(part)


class Comparer(Reader):
    """Compares the files with the state in place instead of loading."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        self.wrong: set[str] = set()
        """Keys of tensors that differ, bit for bit, from the checkpoint after the documented cast."""

    def _deliver(self, part: Tensor, item: ReadItem, target: Tensor) -> None:
        if not _same_bits(target, part.to(target.dtype).to(target.device)):
            self.wrong.add(item.dest_index.fqn)


def held_chunk(file: Any, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """A chunk of an opened safetensors file, mapped, not read.

    Raises `Damaged`: the file has no such tensor, or one of another shape or dtype.
    """
    held: Tensor | None = file.get_tensor(chunk.name) if chunk.name in file.keys() else None  # noqa: SIM118 # no mapping
    if held is None or (tuple(held.shape), held.dtype) != (chunk.sizes, dtype):
        described = "none" if held is None else f"{held.dtype} {list(held.shape)}"
        raise Damaged(f"{chunk.file}: {chunk.name} should be {dtype} {list(chunk.sizes)} and is {described}")
    return held


def stored(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype_of(entry)), torch.Size(entry.shape), chunks)


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Torch's dtype of an entry. Raises `Damaged`: torch has none of this name."""
    found = getattr(torch, entry.dtype, None)
    if not isinstance(found, torch.dtype):
        raise Damaged(f"{entry.dtype!r} is no dtype")
    return found


def whole_tensor(folder: Path, entry: TensorEntry) -> Tensor:
    """Unsharded tensor from its chunks, without DCP and without other ranks."""
    whole = torch.empty(entry.shape, dtype=dtype_of(entry))
    for chunk in entry.chunks:
        with safe_open(folder / chunk.file, framework="pt") as file:
            place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place].copy_(held_chunk(file, chunk, whole.dtype))
    return whole


def _name(item: WriteItem) -> str:
    offsets = ",".join(map(str, item.index.offset or ()))
    return f"{item.index.fqn}@{offsets}" if any(item.index.offset or ()) else item.index.fqn


def _same_bits(one: Tensor, other: Tensor) -> bool:
    flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    if all(each.numel() % 8 == 0 and each.data_ptr() % 8 == 0 for each in flat):
        flat = [each.view(torch.int64) for each in flat]  # compared eight times as fast
    return torch.equal(*flat)


SavePlanner = partial(DefaultSavePlanner, flatten_state_dict=False, flatten_sharded_tensors=False)
LoadPlanner = partial(DefaultLoadPlanner, flatten_state_dict=False, flatten_sharded_tensors=False)
