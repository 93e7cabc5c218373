"""Data of tensor-parallel ranks, compared once, in the first forward with gradients.

Where a plan cuts the embedding and the head, too, every activation is a sum over ranks, and a model would train on a
mixture of batches. So what the model's forward is given is compared by its bits: integers (token ids), and DTensors
that are whole on each rank. Other floating-point numbers are left out, as nothing says if they are a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.fsdp.comm.mesh import Meshes, all_values
from harness.fsdp.guards.replicas import CopiesPart, bit_hash
from harness.fsdp.runtime.weak_hooks import WeakHook
from harness.fsdp.storage.param_group import ParamGroup
from harness.private_torch import tree_leaves

DATA = "data of tensor-parallel ranks"


class SameData:
    """buckets: all of the model."""

    def __init__(self, module: nn.Module, buckets: Sequence[ParamGroup], meshes: Meshes) -> None:
        self.meshes = meshes
        if any(not shard.is_whole for bucket in buckets for shard in bucket.tp_shards.values()):
            look = WeakHook(self._look)
            self._handle = module.register_forward_pre_hook(look, prepend=True, with_kwargs=True)

    def _look(self, module: nn.Module, args: object, kwargs: object) -> None:
        """*Collective* where there is something to compare. Raises CopiesPart: on all ranks."""
        given = map(_comparable, tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ())
        hashes = [bit_hash(each) for each in given if each is not None]
        if not hashes or self.meshes.tensor is None:
            return
        self._handle.remove()
        bits = all_values(self.meshes.tensor, torch.stack(hashes), DATA)
        if int(self.meshes.everyone.sum_scalars((bits != bits[0]).sum(), DATA)):
            raise CopiesPart(
                "tensor-parallel ranks did not see the same data: integers, or whole DTensors, among the arguments of"
                " the model's forward differ between ranks of tp_dim, so that all ranks would train on a mixture. Give"
                " ranks of tp_dim the same batch: a sampler with num_replicas and rank of the data-parallel dimension,"
                " mesh['dp'].size() and mesh['dp'].get_local_rank(). What is split over tp_dim must be a DTensor that"
                " says so"
            )


def _comparable(given: object) -> Tensor | None:
    if not isinstance(given, Tensor) or given.requires_grad:
        return None
    if isinstance(given, DTensor):
        return given.to_local() if all(each.is_replicate() for each in given.placements) else None
    return None if given.is_floating_point() or given.is_complex() else given
