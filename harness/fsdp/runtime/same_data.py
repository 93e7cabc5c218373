"""Data of tensor-parallel ranks, compared once, in the first update.

Where a plan cuts the embedding and the head, too, every activation is a sum over ranks and every copied gradient is the
same, whatever each rank was given: a model would train on a mixture of batches. So what the model's forward is given is
compared by its bits: integers (token ids), and DTensors that are whole on each rank. Other floating-point numbers are
left out, as nothing says if they are a shard; so are labels that only the loss is given. Ranks that are given parts of
one tensor of integers say so by a DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from harness.fsdp.comm.mesh import Meshes, all_values
from harness.fsdp.guards.replicas import CopiesPart, bit_hash
from harness.fsdp.runtime.weak_hooks import WeakHook
from harness.fsdp.storage.param_group import ParamGroup
from harness.private_torch import tree_leaves

DATA = "data of tensor-parallel ranks"


class SameData:
    """buckets: all of the model."""

    def __init__(self, module: nn.Module, buckets: Sequence[ParamGroup], meshes: Meshes) -> None:
        self._tensor, self._data = meshes.tensor, meshes.dense.everyone
        self._bits = torch.zeros((), dtype=torch.int64, device=self._data.runtime.device)
        self._handle: RemovableHandle | None = None
        if any(not shard.is_whole for bucket in buckets for shard in bucket.tp_shards.values()):
            self._handle = module.register_forward_pre_hook(WeakHook(self._look), with_kwargs=True)

    def _look(self, module: nn.Module, args: object, kwargs: object) -> None:
        for given in tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ():
            if not isinstance(given, Tensor) or given.requires_grad:
                continue
            if isinstance(given, DTensor):
                if not all(each.is_replicate() for each in given.placements):
                    continue
                given = given.to_local()
            elif given.is_floating_point() or given.is_complex():
                continue
            self._bits += bit_hash(given).to(self._bits.device)

    def check(self) -> None:
        """The gradients of an update are finished. *Collective* until something was seen. Raises CopiesPart: on all
        ranks."""
        if self._handle is None or self._tensor is None:
            return
        bits = all_values(self._tensor, self._bits, DATA)
        self._bits.zero_()
        found = torch.stack([(bits != bits[0]).any(), (bits != 0).any()]).to(torch.int64)
        is_apart, is_seen = all_values(self._data, found, DATA).any(0).tolist()
        if is_apart:
            raise CopiesPart(
                "tensor-parallel ranks did not see the same data: integers, or whole DTensors, among the arguments of"
                " the model's forward differ between ranks of tp_dim, so that all ranks would train on a mixture. Give"
                " ranks of tp_dim the same batch: a sampler with num_replicas and rank of the data-parallel dimension,"
                " mesh['dp'].size() and mesh['dp'].get_local_rank(). What is split over tp_dim must be a DTensor that"
                " says so. No weight was changed; zero_grad() forgets the step"
            )
        if is_seen:
            self._handle.remove()
            self._handle = None
