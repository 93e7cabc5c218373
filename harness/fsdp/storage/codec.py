"""How main weights of FP8 layers become compute weights, by a codec of their bucket; those of all others are cast.

Weights of FP8 layers have buckets of their own, whose compute dtype is e4m3: payload is kept and gathered, one byte a
parameter, and a layer multiplies it as it is, in the forward and, transposed, in the backward. Main weights stay as the
policy says (fp32), and are quantized from there, after an update and whenever a gather casts them. Frozen weights are
not held in 8 bits, nor are those of the recipe `mx`, which takes other tiles in the backward: layers quantize the
compute weights at each use.

A scale belongs to a tile of the unsharded weight, of which a rank may hold some rows. Each rank takes the amaxes of its
own rows, then all ranks that cut the weight take the largest, in one all-reduce for all layers (two where both axes
cut). A maximum has no order, so every rank makes the same scales of it, and casts its rows as if it cast all of them:
shards that are gathered are the unsharded weight quantized. Scales are on every rank and never travel. Where a plan of
tensor parallelism has cut the weight, a bucket holds this rank's tp_shard, and `current` takes the largest over that
axis too. A TP shard of the other recipes consists of entire tiles: its scales are its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from harness.fp8.linear import Fp8Linear
from harness.fp8.quantize import WIDENED, Quantized, is_8_bit
from harness.fp8.tile_scales import TileScales
from harness.fp8.tp_shards import tp_shard_here
from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import Mesh, Meshes
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.layout import LocalSlice, Slot
from harness.fsdp.storage.placement import SHARD, Axis
from harness.fsdp.tensor_parallel import TpShard

PURPOSE = "fp8 amaxes"
LAYER = "_fsdp_fp8_layer"
"""Attribute of a parameter that is to be held in 8 bits: its layer, weakly."""


def mark_weights(module: nn.Module) -> None:
    """Mark each weight that is to be held in 8 bits with its layer. Raises ValueError: a weight holds 8 bits already,
    or tensor parallelism has cut it inside a tile of its recipe."""
    for name, layer in module.named_modules():
        if not isinstance(layer, Fp8Linear):
            continue
        weight, recipe, here = layer.weight, layer.recipe, tp_shard_here(layer.weight)
        if is_8_bit(here.dtype):
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} is {here.dtype} before sharding: give it in fp32 or bf16,"
                " of which the engine makes 8 bits"
            )
        if not recipe.fits(tuple(here.shape)):
            raise ValueError(
                f"{name}.weight of shape {list(weight.shape)} is {list(here.shape)} on this rank:"
                f" fp8={recipe.name} takes TP shards of which both sizes are multiples of {recipe.multiple}. Cut it"
                f" over fewer ranks, or leave {name} out of Fp8Linear.convert()"
            )
        if layer.is_held:
            setattr(weight, LAYER, weakref.ref(layer))


def is_marked(param: nn.Parameter) -> bool:
    return LAYER in param.__dict__


class Fp8Weight:
    """One weight [out, in] with scales, or this rank's TP shard of it under tensor parallelism.

    view: of its bucket, where it has values while that is unsharded. layer: takes them from here.
    """

    def __init__(self, layer: Fp8Linear, slot: Slot, view: Tensor, tp_shard: TpShard) -> None:
        self.slot, self._view = slot, view
        recipe, tile = layer.recipe, layer.recipe.weights.tile
        shape = slot.spec.shape[0], slot.spec.shape[1]
        self.scales = TileScales(tile, shape, recipe.weights.format, recipe.scaling, view.device)
        self.shares_tiles = not tp_shard.is_whole and (tile.columns if tp_shard.dim else tile.rows) is None
        layer.encoded_weight = self

    def __call__(self) -> Quantized:
        return Quantized(self._view, self.scales.inverse.float(), self.scales.tile)

    def maxima(self, values: Tensor, start: int) -> Tensor:
        return self.scales.maxima(values, start).view(-1)

    def rescale(self, maxima: Tensor) -> None:
        """Set scales from the largest `maxima` of all ranks."""
        self.scales.take(maxima)


class Fp8Codec:
    """Quantizes the weights of one bucket, each marked by `mark_weights`. views: of these in the unsharded bucket.

    ValueError for a dtype of main weights that is not quantized.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        cuts: Cuts,
        views: Sequence[Tensor],
        tp_shards: Mapping[str, TpShard],
        main: torch.dtype,
    ) -> None:
        if main not in WIDENED:
            raise ValueError(
                f"main_params_dtype={main} cannot be quantized to 8 bits: FP8 layers take main weights of"
                f" {', '.join(str(each) for each in WIDENED)}"
            )
        self.cuts, self.dtype = cuts, views[0].dtype
        self.weights = [
            Fp8Weight(getattr(param, LAYER)(), slot, view, tp_shards[name])
            for slot, view, (name, param) in zip(cuts.layout.slots, views, params, strict=True)
        ]

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales, on every rank."""
        return sum(each.scales.nbytes for each in self.weights)

    def local(self, shards: Sequence[Tensor]) -> Iterator[tuple[Fp8Weight, Tensor, LocalSlice]]:
        for weight in self.weights:
            local = self.cuts.own_slice(weight.slot)
            yield weight, local.of(shards), local

    def encode(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """This rank's main weights in 8 bits; a tensor a segment."""
        found = [torch.zeros(shard.shape, dtype=self.dtype, device=shard.device) for shard in shards]
        for weight, rows, local in self.local(shards):
            if local.numel:
                local.of(found).copy_(weight.scales.encode(rows, local.start))
        return found

    def encode_value(self, slot: Slot, value: Tensor) -> Tensor:
        """The value of one weight or of its TP shard in 8 bits: flat, as it is given in the main weights' dtype."""
        weight = next(each for each in self.weights if each.slot is slot)
        weight.rescale(weight.maxima(value, 0))
        return weight.scales.encode(value, 0)


Held = Sequence[tuple[Fp8Codec, Sequence[Tensor], Mesh]]


def refresh_scales(held: Held, meshes: Meshes) -> None:
    """Compute scales of one model's FP8 layers for main weights as they are now, by one all-reduce an axis for all of
    them (two where recipes are mixed). *Collective* where 8-bit weights are cut.

    held: all of the model's codecs with this rank's main weights and the mesh that cuts them.
    """
    found = [
        (weight, codec, mesh, weight.maxima(rows, local.start))
        for codec, shards, mesh in held
        for weight, rows, local in codec.local(shards)
    ]
    for mesh in meshes:
        for axis, comm in ((Axis.inner, mesh.inner), (Axis.outer, mesh.outer)):
            cut = [each for _, codec, of, each in found if of is mesh and getattr(codec.cuts.own, axis.name) is SHARD]
            _take_largest(comm, cut)
    _take_largest(meshes.tensor, [each for weight, _, _, each in found if weight.shares_tiles])
    for weight, _, _, maxima in found:
        weight.rescale(maxima)


def _take_largest(comm: Communicator | None, tensors: Sequence[Tensor]) -> None:
    """Replace each element by its maximum over a group, in place, by one collective for each dtype. *Collective.*"""
    if comm is None or comm.size == 1:
        return
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        alike = [each for each in tensors if each.dtype == dtype]
        together = comm.largest(torch.cat([each.reshape(-1) for each in alike]), PURPOSE)
        for each, part in zip(alike, together.split([each.numel() for each in alike]), strict=True):
            each.copy_(part.view_as(each))
