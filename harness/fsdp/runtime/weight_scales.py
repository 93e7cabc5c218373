"""Scales of FP8 weights and activations, made at the end of a step; see [Note: 8-bit weights] and [Note: Delayed]."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import Mesh, Meshes
from harness.fsdp.fp8.delayed import History
from harness.fsdp.fp8.linear import layers_of
from harness.fsdp.runtime.units import is_expert
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.placement import SHARD, Axis

PURPOSE = "fp8 amaxes"


class WeightScales:
    """Makes scales of one model's FP8 layers, one all-reduce an axis for all of them (two where recipes are mixed).

    Args:
        module: whose layers under delayed scaling are looked after.
        buckets: all of the model's.
        meshes: the ranks that cut weights, and see other data or multiply other portions.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], meshes: Meshes) -> None:
        self.held = [bucket for bucket in buckets if bucket.eight_bit is not None]
        self.meshes = meshes
        for layer in layers_of(module):
            layer.ends_with_engine = True
        self._delayed = [
            (weakref.ref(layer), meshes.of(expert=is_expert(layer.weight)))
            for layer in layers_of(module)
            if layer.recipe.delayed
        ]

    def refresh(self, *, step_ended: bool) -> None:
        """Make scales for main weights as they are now. *Collective* where weights are held in 8 bits and cut, and at
        the end of a step of delayed scaling.

        Args:
            step_ended: an optimizer has updated them, so that what was recorded in the step counts; else they were
                loaded or edited, and delayed scales stay.
        """
        told = {each.name: each.eight_bit.told_by(each.main_shards) for each in self.held if each.eight_bit}
        histories = [(each, mesh) for each, mesh in self._histories() if step_ended]
        for mesh in self.meshes:
            seen = [each.amax[0] for each, of in histories if of is mesh]
            mine = [each for each in self.held if each.context.mesh is mesh]
            for axis, comm in ((Axis.inner, mesh.inner), (Axis.outer, mesh.outer)):
                cut = [each for each in mine if getattr(each.cuts.own, axis.name) is SHARD]
                _take_largest(comm, [*(part for each in cut for part in told[each.name]), *seen])
        elsewhere = [
            part for each in self.held if (of := each.eight_bit) for part in of.of_tiles_elsewhere(told[each.name])
        ]
        _take_largest(self.meshes.tensor, [*elsewhere, *(each.amax[0] for each, _ in histories)])
        for each, _ in histories:
            each.update()
        for bucket in self.held:
            assert bucket.eight_bit is not None
            bucket.eight_bit.rescale(told[bucket.name])

    def _histories(self) -> list[tuple[History, Mesh]]:
        found = []
        for ref, mesh in self._delayed:
            layer = ref()
            if layer is not None and layer.history is not None:
                found.append((layer.history, mesh))
        return found


def _take_largest(comm: Communicator | None, tensors: Sequence[Tensor]) -> None:
    """Make each element the largest over the ranks of a group, in place, by one collective for each dtype there is:
    amaxes are fp32, exponents uint8. *Collective.*"""
    if comm is None or comm.size == 1:
        return
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        alike = [each for each in tensors if each.dtype == dtype]
        together = comm.largest(torch.cat([each.reshape(-1) for each in alike]), PURPOSE)
        for each, part in zip(alike, together.split([each.numel() for each in alike]), strict=True):
            each.copy_(part.view_as(each))
