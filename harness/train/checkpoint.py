"""Checkpoints for going on with the same layout, bit for bit.

`ckpt/step-000020/` holds one safetensors file a rank (engine state and random number states) and `meta.json`: the step,
the layout, and each file's size and SHA-256. It is written under another name and renamed when all of it is on the
disk, so that a folder with the final name is whole unless the disk lies; loading checks the sums and falls back to the
next older one. The position in the data is the step itself.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.config.schema import Config
from harness.engines.protocol import Engine, Ranks
from harness.store.errors import StoreError
from harness.store.files import read_json, write_json
from harness.train.control import Control

FORMAT = 1
ENGINE, RNG = "engine/", "rng/"
SHA_WORDS = 4
"""A SHA-256 as signed 64-bit integers, for the control exchange."""


@dataclass(frozen=True)
class Checkpoint:
    """What a loaded checkpoint says beside the engine's state."""

    step: int
    initial_weights: str
    """SHA-256 of the weights the run began with."""
    wrong: tuple[str, ...] = ()
    """What an engine holds after loading that is not what was loaded, by rank."""


class Checkpoints:
    """The `ckpt/` folder of one run. Every method is called by all ranks together."""

    def __init__(self, folder: Path, config: Config, ranks: Ranks, control: Control) -> None:
        self.folder = folder
        self.ranks = ranks
        self.control = control
        self.layout = {
            "engine": config.engine.name.name,
            "strategy": config.sharding.strategy.name,
            "outer": config.sharding.outer.name,
            "world_size": ranks.world_size,
            "dp_outer": config.mesh.dp_outer,
            "main_params": config.dtype.main_params.name,
        }

    def save(self, engine: Engine, step: int, initial_weights: str) -> None:
        """Write the state after `step` and drop older checkpoints.

        Raises:
            RuntimeError: some rank could not write (the disk is full, say); older checkpoints are kept.
        """
        temporary, final = self.folder / f"step-{step:06d}.tmp", self._path(step)
        if self.ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self._agree("make the folder", None)
        state = {ENGINE + key: tensor for key, tensor in engine.state_dict().items()} | _rng_state(self.ranks.device)
        path, fault = temporary / _rank_file(self.ranks.rank), None
        size, digest = 0, bytes(32)
        try:
            # Copies: engines hand out views of flat storage, and safetensors refuses tensors that share one.
            save_file({key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in state.items()}, path)
            size, digest = _flush(path)
        except Exception as error:
            fault = error
        self._agree(f"write {path}", fault)
        rows = self.control.gather([size, *_words(digest)])
        if self.ranks.rank == 0:
            files = [
                {"name": _rank_file(rank), "bytes": row[0], "sha256": _from_words(row[1:]).hex()}
                for rank, row in enumerate(rows)
            ]
            meta = {"format": FORMAT, "step": step, "layout": self.layout, "initial_weights": initial_weights}
            write_json(temporary / "meta.json", meta | {"files": files})
            _publish(temporary, final)
            self._drop_all_but(final)
        self._agree("publish the checkpoint", None)

    def load_newest(self, engine: Engine) -> Checkpoint | None:
        """Restore the newest intact checkpoint; None where there is none.

        Raises:
            StoreError: it was written under another layout.
            ValueError: it does not fit the engine; nothing was loaded.
        """
        steps = sorted(self._steps(), reverse=True) if self.ranks.rank == 0 else []
        while True:
            # Rank 0 proposes, so that all ranks try the same one whatever their view of a shared disk.
            step = self.control.gather([steps.pop(0) if steps else -1])[0][0]
            if step < 0:
                return None
            meta = _meta(self._path(step))
            if meta is not None and meta["layout"] != self.layout:
                raise StoreError(
                    f"{self._path(step)} was written as {meta['layout']}, this run is {self.layout}: "
                    "a checkpoint is only taken up under the layout that wrote it; remove ckpt/ to start from step 0"
                )
            mine = meta is not None and self._intact(step, meta)
            if all(row[0] for row in self.control.gather([int(mine)])):
                assert meta is not None
                state = load_file(self._path(step) / _rank_file(self.ranks.rank))
                engine.load_state_dict(_below(ENGINE, state))
                _restore_rng(_below(RNG, state), self.ranks.device)
                return Checkpoint(step, meta["initial_weights"], self._told_wrong(engine, _below(ENGINE, state)))

    def _told_wrong(self, engine: Engine, loaded: Mapping[str, Tensor]) -> tuple[str, ...]:
        """An engine is not believed to have loaded what it was given: what it holds now is held against that."""
        held = engine.state_dict()
        wrong = sorted(key for key in held.keys() | loaded.keys() if not _same(held.get(key), loaded.get(key)))
        counts = [row[0] for row in self.control.gather([len(wrong)])]
        others = [f"{n} tensors on rank {rank}" for rank, n in enumerate(counts) if n and rank != self.ranks.rank]
        return (*wrong, *others)

    def _intact(self, step: int, meta: Mapping[str, Any]) -> bool:
        path, entry = self._path(step) / _rank_file(self.ranks.rank), meta["files"][self.ranks.rank]
        try:
            return bool(path.stat().st_size == entry["bytes"] and _sha256(path).hex() == entry["sha256"])
        except OSError:
            return False

    def _agree(self, what: str, fault: Exception | None) -> None:
        """Wait for all ranks; if one failed, fail on all, so that none waits for it in the next exchange."""
        failed = [rank for rank, row in enumerate(self.control.gather([int(fault is not None)])) if row[0]]
        if fault is not None:
            raise RuntimeError(f"checkpoint: cannot {what}: {fault}") from fault
        if failed:
            raise RuntimeError(f"checkpoint: rank {failed[0]} could not {what}; see its log")

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _steps(self) -> list[int]:
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return [int(name) for name in names if name.isdigit()]

    def _drop_all_but(self, kept: Path) -> None:
        for path in self.folder.glob("step-*"):
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _meta(path: Path) -> dict[str, Any] | None:
    """The description of a checkpoint, None if it is missing or damaged."""
    try:
        meta: dict[str, Any] | None = read_json(path / "meta.json")
    except StoreError:
        return None
    return meta if meta is not None and meta.get("format") == FORMAT else None


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    state = {RNG + "cpu": torch.get_rng_state()}
    return state | {RNG + "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _restore_rng(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _flush(path: Path) -> tuple[int, bytes]:
    """Put a file on the disk; its size and SHA-256."""
    path.chmod(0o644)  # safetensors makes files only their owner reads
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, _sha256(path)


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _publish(temporary: Path, final: Path) -> None:
    """Give a written folder its final name; names are on the disk only once their folder is."""
    shutil.rmtree(final, ignore_errors=True)
    _flush_folder(temporary)
    os.rename(temporary, final)
    _flush_folder(final.parent)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _words(digest: bytes) -> list[int]:
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True) for i in range(SHA_WORDS)]


def _from_words(words: list[int]) -> bytes:
    return b"".join(word.to_bytes(8, "little", signed=True) for word in words)


def _same(held: Tensor | None, loaded: Tensor | None) -> bool:
    return held is not None and loaded is not None and torch.equal(held.detach().cpu(), loaded.to(held.dtype))
