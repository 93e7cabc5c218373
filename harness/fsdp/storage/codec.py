"""How main weights of FP8 layers become compute weights, by a codec of their bucket; those of all others are cast.

Weights of FP8 layers have buckets of their own, whose compute dtype is e4m3: payload is kept and gathered, one byte a
parameter, and a layer multiplies it as it is, in the forward and, transposed, in the backward. Main weights stay as the
policy says (fp32), and are quantized from there, after an update and whenever a gather casts them. Frozen weights are
not held in 8 bits, nor are those of the recipe `mx`, which takes other tiles in the backward: layers quantize the
compute weights at each use.

A scale belongs to a tile of the unsharded weight, of which a rank may hold some rows. Each rank takes the amaxes of its
own rows, then all ranks that cut the weight take the largest, in one all-reduce for all layers (two where both axes
cut). A maximum has no order, so every rank makes the same scales of it, and casts its rows as if it cast all of them:
shards that are gathered are the unsharded weight quantized. Scales are on every rank and never travel.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.fp8.linear import CUT, Fp8Linear
from harness.fp8.quantize import E4M3, WIDENED, TileScales, is_8_bit
from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import Mesh, Meshes
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.layout import LocalSlice, Slot
from harness.fsdp.storage.placement import SHARD, Axis

PURPOSE = "fp8 amaxes"
LAYER = "_fsdp_fp8_layer"  # attribute of a parameter that is to be held in 8 bits: its layer, weakly


def mark_weights(module: nn.Module) -> None:
    """Mark each weight that is to be held in 8 bits with its layer. Raises ValueError: a weight holds 8 bits already,
    or tensor parallelism has cut it."""
    for name, layer in ((name, layer) for name, layer in module.named_modules() if isinstance(layer, Fp8Linear)):
        weight = layer.weight
        if isinstance(weight, DTensor):
            raise ValueError(f"{name}.weight cannot be multiplied in 8 bits: {CUT}")
        if is_8_bit(weight.dtype):
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} is {weight.dtype} before sharding: give it in fp32 or bf16,"
                " of which the engine makes 8 bits"
            )
        if layer.is_held:
            setattr(weight, LAYER, weakref.ref(layer))


def is_marked(param: nn.Parameter) -> bool:
    return LAYER in param.__dict__


class Fp8Codec:
    """Quantizes the weights of one bucket, each marked by `mark_weights`. views: of these in the unsharded bucket.

    ValueError for a dtype of main weights that is not quantized.
    """

    def __init__(
        self, params: Sequence[tuple[str, nn.Parameter]], cuts: Cuts, views: Sequence[Tensor], main: torch.dtype
    ) -> None:
        if main not in WIDENED:
            raise ValueError(
                f"main_params_dtype={main} cannot be quantized to 8 bits: FP8 layers take main weights of"
                f" {', '.join(str(each) for each in WIDENED)}"
            )
        self.cuts = cuts
        self.weights: list[tuple[Slot, TileScales]] = []
        for slot, view, (_, param) in zip(cuts.layout.slots, views, params, strict=True):
            layer: Fp8Linear = getattr(param, LAYER)()
            layer.encoded_weight = scales = TileScales(view, layer.recipe.weights.tile, layer.recipe.scaling)
            self.weights.append((slot, scales))

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales, on every rank."""
        return sum(scales.scale.nbytes + scales.inverse.nbytes for _, scales in self.weights)

    def local(self, shards: Sequence[Tensor]) -> Iterator[tuple[TileScales, Tensor, LocalSlice]]:
        for slot, scales in self.weights:
            local = self.cuts.own_slice(slot)
            yield scales, local.of(shards), local

    def encode(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """This rank's main weights in 8 bits; a tensor a segment."""
        found = [torch.zeros(shard.shape, dtype=E4M3, device=shard.device) for shard in shards]
        for scales, rows, local in self.local(shards):
            if local.numel:
                local.of(found).copy_(scales.encode(rows, local.start))
        return found

    def encode_value(self, slot: Slot, value: Tensor) -> Tensor:
        """The value of one weight in 8 bits: flat, as it is given in the main weights' dtype."""
        scales = next(scales for each, scales in self.weights if each is slot)
        scales.take(scales.maxima(value, 0))
        return scales.encode(value, 0)


def refresh_scales(held: Sequence[tuple[Fp8Codec, Sequence[Tensor], Mesh]], meshes: Meshes) -> None:
    """Compute scales of one model's FP8 layers for main weights as they are now, by one all-reduce an axis for all of
    them. *Collective* where 8-bit weights are cut.

    held: all of the model's codecs with this rank's main weights and the mesh that cuts them.
    """
    found = [
        (scales, codec, mesh, scales.maxima(rows, local.start))
        for codec, shards, mesh in held
        for scales, rows, local in codec.local(shards)
    ]
    for mesh in meshes:
        for axis, comm in ((Axis.inner, mesh.inner), (Axis.outer, mesh.outer)):
            cut = [each for _, codec, of, each in found if of is mesh and getattr(codec.cuts.own, axis.name) is SHARD]
            _take_largest(comm, cut)
    for scales, _, _, maxima in found:
        scales.take(maxima)


def _take_largest(comm: Communicator | None, tensors: Sequence[Tensor]) -> None:
    """Replace each element, fp32 and flat, by its maximum over a group, in place. *Collective.*"""
    if comm is not None and comm.size > 1 and tensors:
        together = comm.sum_scalars(torch.cat(list(tensors)), PURPOSE, dist.ReduceOp.MAX)
        for each, part in zip(tensors, together.split([each.numel() for each in tensors]), strict=True):
            each.copy_(part)
