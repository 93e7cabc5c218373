"""Layouts of ragged tensors for tests: how rows of dimension 0 lie on the ranks of a mesh."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from harness.fsdp.ragged import RaggedShard, RaggedTensor
from harness.fsdp.ragged.tensor import spec_like


class Layout(NamedTuple):
    """mesh: sizes of its axes, the last of which cuts rows. shares: how many of eight rows each of its ranks has.
    others: placements on the other axes. begins: first row of each rank, where they do not follow one another."""

    mesh: tuple[int, ...]
    shares: tuple[int, ...]
    others: tuple[str, ...] = ()
    begins: tuple[int, ...] | None = None

    def spans(self, rows: int) -> list[tuple[int, int]]:
        """Rows of each rank of the last axis, of a tensor with that many rows there."""
        begins = self.begins or tuple(sum(self.shares[:rank]) for rank in range(len(self.shares)))
        total = sum(self.shares)
        ends = [begin + share for begin, share in zip(begins, self.shares, strict=True)]
        return [(begin * rows // total, end * rows // total) for begin, end in zip(begins, ends, strict=True)]


HALVES = Layout((2,), (4, 4))
UNEVEN = Layout((2,), (3, 5))
FIRST = Layout((2,), (8, 0))
SECOND = Layout((2,), (0, 8))
TURNED = Layout((2,), (5, 3), begins=(3, 0))
THREE = Layout((3,), (1, 0, 7))
HSDP = Layout((2, 2), (3, 5), ("replicate",))
TP_ROWS = Layout((2, 2), (3, 1), ("0",))
TP_COLUMNS = Layout((2, 2), (3, 5), ("1",))

ALL = {
    "halves": HALVES,
    "uneven": UNEVEN,
    "first": FIRST,
    "second": SECOND,
    "turned": TURNED,
    "three": THREE,
    "hsdp": HSDP,
    "tp_rows": TP_ROWS,
    "tp_columns": TP_COLUMNS,
}


def mesh_of(layout: Layout) -> DeviceMesh:
    """The mesh, over all ranks. Collective."""
    return init_device_mesh("cpu", layout.mesh)


def cut(whole: Tensor, layout: Layout, mesh: DeviceMesh, name: str = "blocks.0.weight") -> RaggedTensor:
    """A copy of a whole tensor, cut by the layout."""
    others: list[Placement] = [Replicate() if each == "replicate" else Shard(int(each)) for each in layout.others]
    rows = whole.shape[0] if whole.dim() else 1
    rows //= layout.mesh[0] if layout.others == ("0",) else 1
    placements = (*others, RaggedShard(layout.spans(rows), name))
    spec = spec_like(whole, mesh, placements)
    like = RaggedTensor.of(torch.empty(0, dtype=whole.dtype), spec)
    return RaggedTensor.of(like.rows_of(whole).clone(), spec)
