"""State of tp_shards: read by a layout without them, and by FSDP2, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import Shard

from harness.fsdp.ragged import RaggedTensor
from tests.fsdp.tensor_parallel.training import (
    Case,
    Shape,
    built,
    in_fsdp2,
    mesh_of,
    sharded,
    step_of,
    whole_of,
)
from tests.support.mutants import kills
from tests.support.spawn import run_ranks

SHAPE = Shape(layers=1)


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [key for key, value in found.items() if key in wanted and not torch.equal(value, wanted[key])]


def stepped(case: Case) -> tuple[Any, Any]:
    model, optimizer = sharded(case, mesh_of(case))
    for step in range(2):
        step_of(case, model, optimizer, step)
    return model, optimizer


EVEN = Case(2, 2, shape=Shape(vocab=36, layers=1))


def without_tp_shards(rank: int, folder: Path, swaps: bool) -> list[str]:
    """Saved under tensor parallelism, where one `swaps` as if the first rank had the last rows, and loaded without."""
    model, _ = stepped(EVEN)
    wanted = dict(model.full_weights())
    own = RaggedTensor.__create_chunk_list__

    def swapped(self: RaggedTensor) -> list[ChunkStorageMetadata]:
        chunks = own(self)
        dims = [each.dim for each in self.placements[:-1] if isinstance(each, Shard)]
        if not chunks or not dims:
            return chunks
        offsets = list(chunks[0].offsets)
        offsets[dims[0]] = (offsets[dims[0]] + self.shape[dims[0]] // 2) % self.shape[dims[0]]
        return [ChunkStorageMetadata(torch.Size(offsets), chunks[0].sizes)]

    with mock.patch.object(RaggedTensor, "__create_chunk_list__", swapped if swaps else own):
        dcp.save(model.state_dict(), checkpoint_id=str(folder))
    model.close()
    case = Case(4, 1, shape=EVEN.shape)
    model, _ = sharded(case, mesh_of(case))
    held = model.state_dict()
    dcp.load(held, checkpoint_id=str(folder))
    model.load_state_dict(held)
    return differing(dict(model.full_weights()), wanted)


def test_tp_shards_are_read_without_tensor_parallelism(tmp_path: Path) -> None:
    assert run_ranks(without_tp_shards, 4, tmp_path, False) == [[]] * 4


@kills("The engine, by tensor parallelism", "TP shards change places", "Shards of the axis are saved in another order")
def test_a_mutant_is_found_where_tp_shards_change_places(tmp_path: Path) -> None:
    assert all(run_ranks(without_tp_shards, 4, tmp_path, True))


# -- with FSDP2 --------------------------------------------------------------------------------------------------------


def without_scale(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "scale"}


def both_ways(rank: int, folder: Path) -> list[str]:
    """FSDP2's weights into ours, through files and without; then ours, trained on, into FSDP2's."""
    case = Case(2, 2, shape=SHAPE)
    model, _ = stepped(case)
    peer = in_fsdp2(built(SHAPE, seed=1), SHAPE, mesh_of(case))
    theirs = {name: whole_of(value) for name, value in without_scale(peer.state_dict()).items()}
    dcp.save(without_scale(peer.state_dict()), checkpoint_id=str(folder / "theirs"))
    held = without_scale(model.state_dict())
    ours = {name: whole_of(value).clone() for name, value in held.items()}
    dcp.save(held, checkpoint_id=str(folder / "ours"))
    dcp.load(held, checkpoint_id=str(folder / "theirs"))
    model.load_state_dict(held, strict=False)
    told = differing(dict(model.full_weights()), theirs)
    state = without_scale(peer.state_dict())
    dcp.load(state, checkpoint_id=str(folder / "ours"))
    told += differing({name: whole_of(value) for name, value in state.items()}, ours)
    model.load_state_dict(without_scale(peer.state_dict()), strict=False)
    return told + differing(dict(model.full_weights()), ours)


def test_weights_go_to_fsdp2_over_the_same_plan_and_back(tmp_path: Path) -> None:
    assert run_ranks(both_ways, 4, tmp_path) == [[]] * 4
