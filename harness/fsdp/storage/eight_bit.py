"""Weights that a bucket holds in 8 bits: how main weights become payload and scales, on whatever rows a rank has.

[Note: 8-bit weights] Weights of FP8 layers have buckets of their own, whose compute dtype is e4m3: what is kept and
gathered is payload, one byte a parameter, and a layer multiplies it as it is. Main weights stay as the policy says
(fp32), and are quantized from there, after an update and whenever a gather casts them.

A scale belongs to a tile of the *whole* weight, of which a rank may hold some rows. So amaxes are found in two steps:
each rank takes those of its own rows, then all ranks that cut the weight take the largest, in one all-reduce for all
layers (two where both axes cut). A maximum has no order, so every rank finds the amax of the whole weight to the bit,
makes the same scales of it, and casts its rows as if it cast all of them: shards that are gathered are the whole weight
quantized. Scales are on every rank and never travel. A 128x128 tile that a rank boundary cuts is treated alike.

Where a plan of tensor parallelism has cut the weight, a bucket holds this rank's portion, and `current` and `delayed`
take the largest over that axis too (one all-reduce more). A portion of the other recipes must be whole tiles: its
scales are its own.

Weights of `mx` have two payloads of other bits, of tiles along rows for the forward and along columns for the backward;
see [Note: Two payloads]. Frozen weights stay in the compute dtype and are quantized at each use.

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
from harness.fsdp.fp8.quantize import Tile, encode
from harness.fsdp.fp8.tile_scales import TileScales
from harness.fsdp.policy import Dtypes
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.layout import LocalSlice, Slot
from harness.fsdp.storage.sides import Place, Side, TwoPayloads
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
                f" over fewer ranks, or leave {name} out of Fp8Linear.convert()"
            )
        if layer.is_held:
            setattr(weight, LAYER, weakref.ref(layer))


def payloads_of(param: nn.Parameter) -> int:
    """In how many ways a parameter is to be held in 8 bits; 0: in none."""
    layer = getattr(param, LAYER)() if LAYER in param.__dict__ else None
    return 0 if layer is None else len(layer.recipe.held_tiles)


class EightBitWeight:
    """One weight's scales, and the casts of its rows. Under tensor parallelism: of this rank's portion of it.

    Args:
        layer: whose weight it is, weakly. slot: where the weight lies. portion: what this rank has of it.
    """

    def __init__(
        self, layer: Callable[[], Fp8Linear | None], slot: Slot, portion: Portion, device: torch.device
    ) -> None:
        self._layer = layer
        self.slot = slot
        self.shape = (slot.spec.shape[0], slot.spec.shape[1])
        recipe = self.layer.recipe
        of, tiles = recipe.weights, recipe.held_tiles
        self.scales = [TileScales(tile, self.shape, of.format, recipe.scaling, device) for tile in tiles]
        """Scales of each payload."""
        self.has_tiles_elsewhere = not portion.is_whole and _along(of.tile, portion.dim) is None
        """Whether a tile has elements on other ranks of the tensor-parallel axis."""
        self.num_tiles = sum(each.num_tiles for each in self.scales)
        self.layer.weight_scale_inv = self.scales[0].inverse
        self.two_payloads: TwoPayloads | None = None
        """What the layer multiplies, where that is not its weight in both directions."""

    def serve_from(self, sides: Sequence[Side], first: int) -> None:
        """Have the layer find its payloads in these sides, one each, at element `first` of the bucket."""
        places = [Place(side, first, self.shape, each) for side, each in zip(sides, self.scales, strict=True)]
        if len(places) > 1:
            self.two_payloads = self.layer.two_payloads = TwoPayloads(*places)

    @property
    def layer(self) -> Fp8Linear:
        """Whose weight it is."""
        found = self._layer()
        assert found is not None, "an engine does not outlive the module it shards"
        return found

    def _rows(self, values: Tensor, local: LocalSlice) -> tuple[Tensor, int]:
        """The rows that a rank holds, and the first one's number."""
        columns = self.shape[1]
        return values.view(local.numel // columns, columns), local.start // columns

    def told_by(self, values: Tensor, local: LocalSlice) -> Tensor:
        """What a rank's rows tell of all tiles, to be made the largest over all ranks; flat, `num_tiles` elements, fp32
        or uint8 (see `TileScales`).

        Args:
            values: the rows, flat, in the main weights' dtype. local: which they are.
        """
        rows, first = self._rows(values, local)
        return torch.cat([each.told_by(rows, first).view(-1) for each in self.scales])

    def rescale(self, agreed: Tensor) -> None:
        """Take scales from here on: of what all ranks have agreed on now, or of the history, which notes it."""
        history = self.layer.history
        if history is not None:
            scale = history.scale[Column.weights].view(1, 1)
            for each in self.scales:
                each.set(scale, scale.reciprocal())
            history.record(Column.weights, agreed.view(1, 1))
            return
        for each, part in zip(self.scales, agreed.split([each.num_tiles for each in self.scales]), strict=True):
            each.take(part)

    def encode(self, values: Tensor, local: LocalSlice, payload: int) -> Tensor:
        """A payload of a rank's rows, flat; arguments as of `told_by`."""
        rows, first = self._rows(values, local)
        scales = self.scales[payload]
        return encode(rows, scales.of_rows(rows.shape[0], first, rows.device), scales.format).view(-1)


def _along(tile: Tile, dim: int | None) -> int | None:
    """How many rows (dimension 0) or columns (1) a tile has; None: all."""
    return tile.columns if dim else tile.rows


class EightBitWeights:
    """All weights of one bucket; see [Note: 8-bit weights].

    Args:
        params: the bucket's, each marked by `mark_weights`, all with as many payloads. cuts: how it is cut.
        sides: of the bucket, one for each payload.
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
        sides: Sequence[Side],
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
        for weight in self.weights:
            weight.serve_from(sides, cuts.layout.bucket_range(weight.slot)[0])

    @property
    def has_tiles_elsewhere(self) -> bool:
        """Whether a tile of one of them has elements on other ranks of the tensor-parallel axis."""
        return any(each.has_tiles_elsewhere for each in self.weights)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, on every rank."""
        return sum(scales.nbytes for each in self.weights for scales in each.scales)

    def _local(self, shards: Sequence[Tensor]) -> list[tuple[EightBitWeight, LocalSlice, Tensor]]:
        """Each weight, which rows of it this rank holds, and these."""
        found = []
        for weight in self.weights:
            local = self.cuts.layout.local_slice(weight.slot, self.cuts.layout_rank)
            found.append((weight, local, shards[local.segment][local.offset : local.offset + local.numel]))
        return found

    def told_by(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """What this rank's main weights tell of all tiles, a flat tensor a weight; see `EightBitWeight.told_by`."""
        return [weight.told_by(rows, local) for weight, local, rows in self._local(shards)]

    def of_tiles_elsewhere(self, told: Sequence[Tensor]) -> list[Tensor]:
        """The parts of what `told_by` gives in which other ranks of the tensor-parallel axis have a say."""
        return [part for weight, part in zip(self.weights, told, strict=True) if weight.has_tiles_elsewhere]

    def rescale(self, agreed: Sequence[Tensor]) -> None:
        """Take scales from what `told_by` gives, once it is the largest over all ranks that cut the weights."""
        for weight, part in zip(self.weights, agreed, strict=True):
            weight.rescale(part)

    def encode(self, shards: Sequence[Tensor], payload: int) -> list[Tensor]:
        """One payload of this rank's main weights under the scales as they are: a tensor a segment, zeros as padding.

        payload: its number, as of the sides.
        """
        found = [torch.zeros(shard.shape, dtype=self.dtype, device=shard.device) for shard in shards]
        for weight, local, rows in self._local(shards):
            if local.numel:
                begin, end = local.offset, local.offset + local.numel
                found[local.segment][begin:end] = weight.encode(rows, local, payload)
        return found

    def take(self, slot: Slot, value: Tensor) -> list[Tensor]:
        """Take scales from the value of one weight, or of its portion (flat, in the main weights' dtype); its payloads,
        flat."""
        weight = next(each for each in self.weights if each.slot is slot)
        everything = LocalSlice(slot.segment, 0, 0, slot.spec.numel)
        weight.rescale(weight.told_by(value, everything))
        return [weight.encode(value, everything, payload) for payload in range(len(weight.scales))]
