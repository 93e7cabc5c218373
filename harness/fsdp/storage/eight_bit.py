"""Weights that a bucket holds in 8 bits: how main weights become payload and scales, on whatever rows a rank has.

[Note: 8-bit weights] Weights of FP8 layers have buckets of their own, whose compute dtype is e4m3: what is kept and
gathered is payload, one byte a parameter, and a layer multiplies it as it is. Main weights stay as the policy says
(fp32), and are quantized from there, after an update and whenever a gather casts them.

A scale belongs to a tile of the *whole* weight, of which a rank may hold some rows. So amaxes are found in two steps:
each rank takes those of its own rows, then all ranks that cut the weight take the largest, in one all-reduce for all
layers (two where both axes cut). A maximum has no order, so every rank finds the amax of the whole weight to the bit,
makes the same scales of it, and casts its rows as if it cast all of them: shards that are gathered are the whole weight
quantized. Scales are on every rank and never travel. A 128x128 tile that a rank boundary cuts is treated alike. To keep
tiles whole (`grain=block(128)`) gives the same bits, saves 4 bytes in 16384, and makes shards ragged: 300 rows over two
ranks are 172 and 128 then, where rows alone are 150 and 150.

Where a plan of tensor parallelism has cut the weight, a bucket holds this rank's portion, and `current` and `delayed`
take the largest over that axis too (one all-reduce more). A portion of `block` and `mx_32x32` must be whole tiles: its
scales are its own.

Weights of `mx` need two payloads, one for each direction, of other bits: they stay in the compute dtype and are
quantized at each use, as frozen weights of every recipe are. `mx_32x32` is MXFP8 with one payload.

Under delayed scaling the scale comes from the layer's history (see [Note: Delayed]): at the end of a step the history
is closed first, then weights are quantized under its new scale, then their own amax begins the next record. Weights
that are loaded are quantized under the scale that was saved with them: no step ends there, and the payload is what it
was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from harness.fsdp.fp8.delayed import Column
from harness.fsdp.fp8.formats import WIDENED, is_8_bit
from harness.fsdp.fp8.linear import Fp8Linear
from harness.fsdp.fp8.portions import portion_here
from harness.fsdp.fp8.quantize import Tile, amax_grid, encode, scales_of, spread
from harness.fsdp.policy import Dtypes
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.layout import LocalSlice, Slot
from harness.fsdp.tensor_parallel.portion import Portion

LAYER = "_fsdp_fp8_layer"
"""Attribute of a parameter that is to be held in 8 bits: its layer, weakly."""


def mark_weights(module: nn.Module) -> None:
    """Note of each weight that is to be held in 8 bits which layer it is of; see [Note: 8-bit weights].

    Raises:
        ValueError: it holds 8 bits already, so that there is nothing to make main weights of; or tensor parallelism has
            cut it inside a tile of its recipe.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, Fp8Linear):
            continue
        layer.keep_buffers_plain()
        weight, recipe = layer.weight, layer.recipe
        here = portion_here(weight)
        if is_8_bit(here.dtype):
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} is {here.dtype} before sharding: give it in fp32 or bf16,"
                " of which the engine makes 8 bits"
            )
        if not recipe.fits(tuple(here.shape)):
            raise ValueError(
                f"{name}.weight of shape {list(weight.shape)} is {list(here.shape)} on this rank:"
                f" fp8={recipe.name.name} takes portions of which both sizes are multiples of {recipe.multiple}. Cut it"
                f" over fewer ranks, or leave {name} out of convert_linears()"
            )
        if layer.is_held:
            setattr(weight, LAYER, weakref.ref(layer))


def is_marked(param: nn.Parameter) -> bool:
    """Whether a parameter is to be held in 8 bits."""
    return LAYER in param.__dict__


class EightBitWeight:
    """One weight's scales, and the cast of its rows. Under tensor parallelism: of this rank's portion of it.

    Args:
        layer: of a recipe whose weights are quantized once for both directions. slot: where the weight lies.
        portion: what this rank has of it.
    """

    def __init__(
        self, layer: Callable[[], Fp8Linear | None], slot: Slot, portion: Portion, device: torch.device
    ) -> None:
        self._layer = layer
        self.slot = slot
        self.shape = (slot.spec.shape[0], slot.spec.shape[1])
        weights = self.layer.recipe.weights
        self.format, self.tile, self.scaling = weights.format, weights.tile, self.layer.recipe.scaling
        self.has_tiles_elsewhere = not portion.is_whole and _along(self.tile, portion.dim) is None
        """Whether a tile has elements on other ranks of the tensor-parallel axis."""
        grid = self.tile.grid(self.shape)
        self.num_tiles = grid[0] * grid[1]
        self.scale = torch.ones(grid, dtype=torch.float32, device=device)
        self.scale_inv = torch.ones(grid, dtype=torch.float32, device=device)
        self.layer.weight_scale_inv = self.scale_inv

    @property
    def layer(self) -> Fp8Linear:
        """Whose weight it is."""
        found = self._layer()
        assert found is not None, "an engine does not outlive the module it shards"
        return found

    def _place(self, local: LocalSlice) -> tuple[int, tuple[int, int]]:
        """First row and shape of the rows that a rank holds."""
        columns = self.shape[1]
        return local.start // columns, (local.numel // columns, columns)

    def amaxes(self, values: Tensor, local: LocalSlice) -> Tensor:
        """Amaxes of all tiles as far as a rank's rows tell, 0 elsewhere: fp32, shape of `scale`.

        Args:
            values: the rows, flat, in the main weights' dtype. local: which they are.
        """
        found = torch.zeros_like(self.scale)
        first, shape = self._place(local)
        if not local.numel:
            return found
        rows = self.tile.rows
        lead = 0 if rows is None else first % rows
        filled = values.new_zeros(lead + shape[0], shape[1])
        filled[lead:] = values.detach().view(shape)
        grid = amax_grid(filled, Tile(rows, self.tile.columns)).to(found.device)
        top = 0 if rows is None else first // rows
        found[top : top + grid.shape[0]] = grid
        return found

    def rescale(self, amaxes: Tensor) -> None:
        """Take scales from here on: of amaxes of the whole weight now, or of the history, which notes them."""
        history = self.layer.history
        if history is None:
            scale, inverse = scales_of(amaxes.view_as(self.scale), self.format, self.scaling)
        else:
            scale = history.scale[Column.weights].view(1, 1)
            inverse = scale.reciprocal()
            history.record(Column.weights, amaxes)
        self.scale.copy_(scale)
        self.scale_inv.copy_(inverse)

    def encode(self, values: Tensor, local: LocalSlice) -> Tensor:
        """The payload of a rank's rows, flat; arguments as of `amaxes`."""
        first, shape = self._place(local)
        scale = spread(self.scale.to(values.device), self.tile, shape, first)
        return encode(values.view(shape), scale, self.format).view(-1)


def _along(tile: Tile, dim: int | None) -> int | None:
    """How many rows (dimension 0) or columns (1) a tile has; None: all."""
    return tile.columns if dim else tile.rows


class EightBitWeights:
    """All weights of one bucket; see [Note: 8-bit weights].

    Args:
        params: the bucket's, each marked by `mark_weights`. cuts: how it is cut.
        portions: what this rank has of each, by name.
        dtypes: of the bucket.
        device: of its payload and scales.

    Raises:
        ValueError: main weights have a dtype that is not quantized.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        cuts: Cuts,
        portions: Mapping[str, Portion],
        dtypes: Dtypes,
        device: torch.device,
    ) -> None:
        if dtypes.main not in WIDENED:
            raise ValueError(
                f"main_params_dtype={dtypes.main} cannot be quantized to 8 bits: FP8 layers take main weights of"
                f" {', '.join(str(each) for each in WIDENED)}"
            )
        self.cuts = cuts
        self.dtype = dtypes.compute
        self.weights = [
            EightBitWeight(getattr(param, LAYER), slot, portions[name], device)
            for slot, (name, param) in zip(cuts.layout.slots, params, strict=True)
        ]

    @property
    def has_tiles_elsewhere(self) -> bool:
        """Whether a tile of one of them has elements on other ranks of the tensor-parallel axis."""
        return any(each.has_tiles_elsewhere for each in self.weights)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales and of their reciprocals, on every rank."""
        return sum(each.scale.nbytes + each.scale_inv.nbytes for each in self.weights)

    def _local(self, shards: Sequence[Tensor]) -> list[tuple[EightBitWeight, LocalSlice, Tensor]]:
        """Each weight, which rows of it this rank holds, and these."""
        found = []
        for weight in self.weights:
            local = self.cuts.layout.local_slice(weight.slot, self.cuts.layout_rank)
            found.append((weight, local, shards[local.segment][local.offset : local.offset + local.numel]))
        return found

    def amaxes(self, shards: Sequence[Tensor]) -> Tensor:
        """Amaxes of all tiles of all weights as far as this rank's main weights tell: fp32, flat."""
        return torch.cat([weight.amaxes(rows, local).view(-1) for weight, local, rows in self._local(shards)])

    def _by_weight(self, amaxes: Tensor) -> list[tuple[EightBitWeight, Tensor]]:
        """Each weight with its part of what `amaxes` gives."""
        return list(zip(self.weights, amaxes.split([each.num_tiles for each in self.weights]), strict=True))

    def of_tiles_elsewhere(self, amaxes: Tensor) -> list[Tensor]:
        """Views of the parts of what `amaxes` gives in which other ranks of the tensor-parallel axis have a say."""
        return [part for weight, part in self._by_weight(amaxes) if weight.has_tiles_elsewhere]

    def rescale(self, amaxes: Tensor) -> None:
        """Take scales from what `amaxes` gives, once it is the largest over all ranks that cut the weights."""
        for weight, part in self._by_weight(amaxes):
            weight.rescale(part)

    def encode(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Payloads of this rank's main weights under the scales as they are: a tensor a segment, zeros as padding."""
        found = [torch.zeros(shard.shape, dtype=self.dtype, device=shard.device) for shard in shards]
        for weight, local, rows in self._local(shards):
            if local.numel:
                found[local.segment][local.offset : local.offset + local.numel] = weight.encode(rows, local)
        return found

    def take(self, slot: Slot, value: Tensor) -> Tensor:
        """Take scales from the value of one weight, or of its portion (flat, in the main weights' dtype); its payload,
        flat."""
        weight = next(each for each in self.weights if each.slot is slot)
        everything = LocalSlice(slot.segment, 0, 0, slot.spec.numel)
        weight.rescale(weight.amaxes(value, everything).to(weight.scale.device))
        return weight.encode(value, everything)
