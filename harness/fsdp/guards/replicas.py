"""Whether ranks that should hold the same data do: a hash of its bits, compared every few steps.

[Note: The hash] Bits are read as 32-bit words (16-bit ones where that does not divide). Each word is mixed with its
index and the mixed words are added modulo 2^64, on the device: sums of integers do not depend on their order, so any
kernel gives the same hash. The mix is not linear, so that changes do not cancel as they would in a weighted sum (two
flipped signs, say). NaN and the two zeros are told apart like any other bits.

[Note: In three looks] Ranks compare one number. Only where that differs do they compare one number a tensor, and then
one a part of the first tensor that differs, so that the error names a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.mesh import Meshes
from harness.fsdp.guards.watches import by_value, ranks_text
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.placement import REPLICATE

BLOCK = 1 << 16
"""Words hashed at a time on a CPU, so that the passes over them stay in cache."""
DEVICE_BLOCK = 1 << 24
"""On a device: 128 MiB at a time."""
_ODD_1, _ODD_2 = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd factors with well spread bits (those of splitmix64, made positive)."""


@dataclass(frozen=True)
class Replica:
    """A flat tensor that must have the same bits on all ranks that are asked.

    name: for the error. parts: names views of it, in the same order on all ranks; called where it differs.
    """

    name: str
    tensor: Tensor
    parts: Callable[[], list[tuple[str, Tensor]]] = list


class ReplicaDrift(RuntimeError):
    """Ranks that should hold the same data hold different bits. Names the first such parameter and the ranks."""


@torch.no_grad()
def bit_hash(tensor: Tensor) -> Tensor:
    """Hash of a tensor's bits in their order: int64, shape [], on its device."""
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(torch.uint8).view(_word(flat))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    size = DEVICE_BLOCK if is_queued(flat.device) else BLOCK
    ramp = torch.arange(1, min(size, words.numel()) + 1, dtype=torch.int64, device=flat.device)
    for begin in range(0, words.numel(), size):
        block = words[begin : begin + size].to(torch.int64)
        mixed = (ramp[: block.numel()] + begin).mul_(_ODD_1).bitwise_xor_(block)
        mixed.mul_(_ODD_2)
        mixed.bitwise_xor_(mixed >> 29).mul_(_ODD_1)
        mixed.bitwise_xor_(mixed >> 32)
        total += mixed.sum()
    return total


def _word(flat: Tensor) -> torch.dtype:
    if flat.nbytes % 4 == 0:
        return torch.int32
    return torch.int16 if flat.nbytes % 2 == 0 else torch.uint8


def check_equal(replicas: Sequence[Replica], comm: Communicator, when: str) -> None:
    """Compare tensors over all ranks of a group: the same names, lengths and dtypes everywhere. *Collective.*

    One all-reduce of a number a rank where all is well. `when` is for the error.

    Raises:
        ReplicaDrift: on all ranks the same, naming the first tensor that differs, its part, and the ranks.
    """
    if comm.size == 1 or not replicas:
        return
    hashes = torch.stack([bit_hash(each.tensor) for each in replicas])
    if not _differing(_everyones(bit_hash(hashes).reshape(1), comm)):
        return
    table = _everyones(hashes, comm)
    if not (differing := _differing(table)):
        raise ReplicaDrift(f"replicas differ {when}, and differ no more when looked at again: they are being changed")
    replica = replicas[differing[0]]
    rows, names = table[:, differing[0]], ["padding between parameters"]
    if parts := replica.parts():
        of_parts = _everyones(torch.stack([bit_hash(view) for _, view in parts]), comm)
        if places := _differing(of_parts):
            rows, names = of_parts[:, places[0]], [parts[place][0] for place in places]
    raise ReplicaDrift(_describe(replica.name, names, rows.tolist(), len(differing), when))


def _everyones(hashes: Tensor, comm: Communicator) -> Tensor:
    """Every rank's hashes: int64, shape [ranks, hashes]."""
    table = hashes.new_zeros(comm.size, hashes.numel())
    table[comm.rank] = hashes
    return comm.sum_scalars(table, "replica hashes")


def _differing(table: Tensor) -> list[int]:
    """Columns that are not the same in all rows."""
    differs: list[bool] = (table != table[0]).any(0).tolist()
    return [place for place, each in enumerate(differs) if each]


def _describe(bucket: str, names: list[str], hashes: list[int], num_tensors: int, when: str) -> str:
    sides = sorted(by_value(dict(enumerate(map(str, hashes)))).values(), key=len, reverse=True)
    rest = sorted(rank for side in sides[1:] for rank in side)
    others = f" (and {len(names) - 1} more of its parameters)" if len(names) > 1 else ""
    buckets = (
        f", and {num_tensors - 1} more {'buckets differ' if num_tensors > 2 else 'bucket differs'}"
        if num_tensors > 1
        else ""
    )
    alike = "" if len(sides) == 2 else f", in {len(sides) - 1} ways"
    return (
        f"replicas differ {when}: {names[0]}{others} of bucket {bucket} has other bits on {ranks_text(rest)}{alike}"
        f" than on {ranks_text(sides[0])}{buckets}. Something changed weights on some ranks only: an edit outside the"
        " optimizer, another learning rate, or arithmetic that is not the same there"
    )


Held = list[tuple[Communicator, list[Replica]]]
"""What the ranks of a group must hold alike."""


def held_by_several(buckets: Sequence[Bucket], meshes: Meshes) -> Held:
    """Weights of which several ranks have a copy: whole compute weights on all; main weights, and compute weights of an
    inner shard, on the ranks of an axis that does not split them; and on those of a tensor-parallel axis what no plan
    cuts."""
    found: Held = []
    for mesh in meshes:
        of_mesh = [bucket for bucket in buckets if bucket.context.mesh is mesh]
        resident = [bucket for bucket in of_mesh if bucket.is_resident]
        whole = [_replica(b, b.name + each.suffix, each.unsharded) for b in resident for each in b.encodings]
        found.append((mesh.everyone, whole))
        apart = [bucket for bucket in of_mesh if bucket.main_storage is not None]
        found.append((mesh.inner, [_own(bucket) for bucket in apart if bucket.cuts.own.inner is REPLICATE]))
        if mesh.outer is not None:
            outside = [_own(bucket) for bucket in apart if bucket.cuts.own.outer is REPLICATE]
            sharded = [bucket for bucket in of_mesh if not bucket.is_resident]
            shards = ((b.name + each.suffix, each.kept) for b in sharded for each in b.encodings)
            outside += [Replica(f"{name} inner shard", shard) for name, shard in shards if shard is not None]
            found.append((mesh.outer, outside))
    if meshes.tensor is not None:
        found.append((meshes.tensor, [each for bucket in buckets for each in _copies(bucket)]))
    return found


def _copies(bucket: Bucket) -> list[Replica]:
    """This rank's part of the main weights that no plan of tensor parallelism cuts."""
    copied = [(name, part) for name, part in _own_parts(bucket) if bucket.portions[name].is_copied]
    return [Replica(f"{bucket.name} main weights", part, partial(list, [(name, part)])) for name, part in copied]


def _own(bucket: Bucket) -> Replica:
    """This rank's main weights, in storage of their own."""
    storage = bucket.main_storage
    assert storage is not None
    return Replica(f"{bucket.name} main weights", storage, lambda: _own_parts(bucket))


def _own_parts(bucket: Bucket) -> list[tuple[str, Tensor]]:
    found = []
    for slot in bucket.layout.slots:
        local = bucket.layout.local_slice(slot, bucket.cuts.layout_rank)
        shard = bucket.main_shards[local.segment]
        found.append((slot.spec.name, shard[local.offset : local.offset + local.numel]))
    return found


def _replica(bucket: Bucket, name: str, flat: Tensor) -> Replica:
    return Replica(name, flat, lambda: bucket.named_slices(flat))


class ReplicaCheck:
    """Compares what ranks hold whole after every so many steps.

    Args:
        held: what must be equal, over which ranks; asked at each check. every: steps; 0 never.

    Raises:
        ValueError: a negative number of steps.
    """

    def __init__(self, held: Callable[[], Held], every: int) -> None:
        if every < 0:
            raise ValueError(f"check_replicas_every={every} must be a number of steps, or 0 for never")
        self._held = held
        self._every = every
        self._steps = 0

    @property
    def is_due(self) -> bool:
        """Whether the next step ends with a comparison, for which weights must be here."""
        return bool(self._every) and (self._steps + 1) % self._every == 0

    def after_step(self) -> None:
        """Weights were installed. *Collective* where a check is due.

        Raises:
            ReplicaDrift: see `check_equal`.
        """
        due = self.is_due
        self._steps += 1
        if due:
            for comm, replicas in self._held():
                check_equal(replicas, comm, f"after update {self._steps}")
