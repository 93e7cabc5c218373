"""DCP's storage interface over safetensors files and a JSON manifest: what torch plans, done without pickle.

What ranks tell each other while they plan goes through `torch.distributed` object collectives, as DCP has it; nothing
of that reaches the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from harness.checkpoint import tensor_file
from harness.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry


@dataclass(frozen=True)
class Stored:
    """Where a rank wrote a chunk: the file (with its final sum) and the name in it."""

    file: str
    name: str
    entry: FileEntry


class Writer(StorageWriter):
    """Writes this rank's chunks into one file; the coordinator writes the manifest when all are there.

    Args:
        folder: exists; each rank adds `rank-<rank>.safetensors`.
        rank: of this process. values: plain JSON for the manifest.
    """

    def __init__(self, folder: Path, rank: int, values: Mapping[str, Any]) -> None:
        self.folder = folder
        self.rank = rank
        self.values = dict(values)
        self.written_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the chunks that the plan gives this rank.

        Raises:
            TypeError: something is no tensor; it belongs into `values`.
            OSError: the disk is full, say.
        """
        chunks = {_name(item): item for item in plan.items}
        refused = [item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO]
        if refused:
            raise TypeError(f"no tensors, and nothing is pickled here: {', '.join(refused[:5])}")
        results: list[WriteResult] = []
        if chunks:
            name = f"rank-{self.rank:05d}.safetensors"
            tensors = {each: _resolved(planner, item) for each, item in chunks.items()}
            written = tensor_file.write(self.folder / name, tensors)
            self.written_bytes = written.bytes
            entry = FileEntry(written.bytes, written.sha256)
            results = [
                WriteResult(item.index, tensors[each].nbytes, Stored(name, each, entry))
                for each, item in chunks.items()
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest; called on the coordinator alone."""
        files: dict[str, FileEntry] = {}
        chunks: dict[str, list[Chunk]] = {}
        for result in (each for found in results for each in found):
            stored, key = result.storage_data, result.index.fqn
            files[stored.file] = stored.entry
            sizes = _sizes(metadata.state_dict_metadata[key], result.index)
            chunks.setdefault(key, []).append(Chunk(tuple(result.index.offset or ()), sizes, stored.file, stored.name))
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

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A folder."""
        return Path(checkpoint_id).is_dir()

    def storage_meta(self) -> StorageMeta | None:
        """None: the folder says it all."""
        return None


class Reader(StorageReader):
    """Reads chunks, and of each no more than is wanted, straight into the tensors they are for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.chunks = {(key, chunk.offsets): chunk for key, entry in manifest.tensors.items() for chunk in entry.chunks}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The manifest, as DCP has it."""
        return Metadata(state_dict_metadata={key: stored(entry) for key, entry in self.manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan says; another dtype is rounded to nearest, ties to even, as `Tensor.copy_` does."""
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    raise TypeError(f"{item.storage_index.fqn} is no tensor, and nothing pickled is read here")
                chunk = self.chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                if chunk.file not in opened:
                    opened[chunk.file] = stack.enter_context(safe_open(self.folder / chunk.file, framework="pt"))
                source = _part(opened[chunk.file], chunk.name, item)
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A folder."""
        return Path(checkpoint_id).is_dir()


def stored(entry: TensorEntry) -> TensorStorageMetadata:
    """An entry of the manifest, as DCP has it."""
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype_of(entry)), torch.Size(entry.shape), chunks)


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Torch's dtype of an entry."""
    found: torch.dtype = getattr(torch, entry.dtype)
    return found


def whole_tensor(folder: Path, entry: TensorEntry) -> Tensor:
    """A tensor put together from its chunks, without DCP and without other ranks."""
    whole = torch.empty(entry.shape, dtype=dtype_of(entry))
    for chunk in entry.chunks:
        with safe_open(folder / chunk.file, framework="pt") as file:
            place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place].copy_(file.get_tensor(chunk.name))
    return whole


def chunks_missing(entry: TensorEntry) -> bool:
    """Whether the chunks do not cover every element exactly once (counted: DCP refuses overlaps when it saves)."""
    return sum(_numel(chunk.sizes) for chunk in entry.chunks) != _numel(entry.shape)


def _numel(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _name(item: WriteItem) -> str:
    offsets = ",".join(map(str, item.index.offset or ()))
    return f"{item.index.fqn}@{offsets}" if any(item.index.offset or ()) else item.index.fqn


def _resolved(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{item.index.fqn} is no tensor, and nothing is pickled here")
    return tensor


def _sizes(entry: Any, index: MetadataIndex) -> tuple[int, ...]:
    for chunk in entry.chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return tuple(chunk.sizes)
    raise LookupError(f"{index.fqn} has no chunk at {index.offset}")


def _part(file: Any, name: str, item: ReadItem) -> Tensor:
    if not item.lengths:
        found: Tensor = file.get_tensor(name)
        return found
    part: Tensor = file.get_slice(name)[_ranges(item)]
    return part


def _ranges(item: ReadItem) -> tuple[slice, ...]:
    def each() -> Iterator[slice]:
        for begin, length in zip(item.storage_offsets, item.lengths, strict=True):
            yield slice(begin, begin + length)

    return tuple(each())
