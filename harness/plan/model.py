"""Units, buckets and layouts of our engine for its first rank, made by the engine's own planning on the meta device.

Bytes kept between steps are those of `ParamGroup.persistent_bytes`, by buffer; padding apart. Flat tensors are equally
long on all ranks; ranks differ in how much of them is padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config.derived import data_ranks, engine_options, fixed_buffers, optimizer_states
from harness.config.schema import Config, Device
from harness.engines.adapters.native import policy_of
from harness.engines.protocol import TORCH_DTYPES
from harness.fp8.quantize import Scaling
from harness.fp8.tile_scales import TileScales
from harness.fsdp import Placements, TpShard
from harness.fsdp.comm.mesh import Place
from harness.fsdp.policy import Dtypes
from harness.fsdp.runtime.units import plan_units
from harness.fsdp.storage.codec import LAYER, mark_weights
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.layout import ParamSpec
from harness.fsdp.storage.placement import SHARD, On
from harness.fsdp.vocabulary import Numerics, Registration, Transport
from harness.models.workload import TokenWorkload, workload_for
from harness.private_torch import fake_store

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Scales:
    """Bytes of the scales of an 8-bit weight, and of what ranks agree on of them. itemsize: of each of these numbers.
    over_tp: tensor-parallel ranks agree on them too."""

    kept: int
    agreed: int
    itemsize: int
    over_tp: bool


@dataclass(frozen=True)
class Bucket:
    """copies: encodings of the compute weights. scales: of each 8-bit weight. is_cut: tensor parallelism has cut a
    parameter."""

    trainable: bool
    cuts: Cuts
    placements: Placements
    dtypes: Dtypes
    copies: int = 1
    scales: tuple[Scales, ...] = ()
    is_cut: bool = False

    @property
    def is_gathered(self) -> bool:
        """True if its weights are whole only while in use."""
        return bool(self.placements.unshard)

    def arriving(self, config: Config) -> torch.dtype:
        """Dtype of gradients as autograd leaves them; see `Gradients.arriving`."""
        is_exact = config.numerics.mode is Numerics.exact
        return self.dtypes.grads if self.placements.accumulates_locally or is_exact else self.dtypes.wire

    @property
    def whole_bytes(self) -> int:
        """Bytes of one copy of the unsharded compute weights."""
        return self.cuts.layout.bucket_numel * self.dtypes.compute.itemsize


@dataclass(frozen=True)
class Unit:
    """params: of each bucket."""

    name: str
    is_root: bool
    module: nn.Module
    buckets: tuple[Bucket, ...]
    params: tuple[tuple[nn.Parameter, ...], ...]

    @property
    def trained(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.trainable]

    @property
    def is_gathered(self) -> bool:
        return any(bucket.is_gathered for bucket in self.buckets)


@dataclass(frozen=True)
class Model:
    """units: the root first. transport: what moves buckets, shm, gloo or nccl."""

    config: Config
    workload: TokenWorkload
    module: nn.Module
    units: tuple[Unit, ...]
    place: Place
    tp: int
    transport: str

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for unit in self.units for bucket in unit.buckets]

    @property
    def ranks(self) -> int:
        return self.place.inner_size * self.place.outer_size


@contextmanager
def tensor_axis(tp: int) -> Iterator[DeviceMesh | None]:
    """A tensor-parallel axis of which only the first rank is there; nothing is moved."""
    if tp == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=tp, store=fake_store())
    try:
        yield init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def built(config: Config, axis: DeviceMesh | None) -> Model:
    """axis: of `tensor_axis`."""
    workload = workload_for(config)
    module = workload.build("meta", TORCH_DTYPES[config.dtype.compute])
    workload.quantize(module, torch.device("meta"))
    if axis is not None:
        workload.cut(module, axis, sequence_parallel=config.mesh.sequence_parallel)
    mark_weights(module)
    outer = config.mesh.dp_outer
    place = Place(0, data_ranks(config) // outer, 0, outer)
    placements = Placements.of(config.sharding.strategy, config.sharding.outer if outer > 1 else None)
    policy, group = policy_of(config.dtype), None if axis is None else axis.get_group()
    units = []
    for plan in plan_units(module, workload.unit_classes):
        buckets = []
        for key, members in plan.buckets.items():
            shards = [TpShard.of(name, param, group) for name, param in members]
            dtypes = key.resolve(policy)
            cuts = _cuts(tuple(each.here for each in shards), place, placements, dtypes.align_elements)
            found = [_scales(param, each) for (_, param), each in zip(members, shards, strict=True)] if key.fp8 else []
            is_cut = not all(each.is_whole or each.is_copied for each in shards)
            made = Bucket(key.trainable, cuts, placements, dtypes, max(1, key.fp8), tuple(found), is_cut)
            buckets.append(made)
        params = tuple(tuple(param for _, param in members) for members in plan.buckets.values())
        units.append(Unit(plan.name, plan.is_root, plan.module, tuple(buckets), params))
    return Model(config, workload, module, tuple(units), place, config.mesh.tp, _transport(config))


@cache
def _cuts(shapes: Shapes, place: Place, placements: Placements, align: int) -> Cuts:
    """Cuts of parameters of these shapes; units that are alike share them, and their tables of thousands of ranks."""
    specs = [ParamSpec(str(number), shape) for number, shape in enumerate(shapes)]
    return Cuts.plan(specs, place, placements, align)


def _scales(param: Tensor, shard: TpShard) -> Scales:
    recipe, shape = getattr(param, LAYER)().recipe, (shard.here[0], shard.here[1])
    form, scaling, tile = recipe.weights.format, recipe.scaling, recipe.weights.tile
    made = [TileScales(each, shape, form, scaling, torch.device("meta")) for each in recipe.held_tiles]
    itemsize = 1 if scaling is Scaling.exponent else 4
    tiles = sum(each.num_tiles for each in made)
    shares = not shard.is_whole and (tile.columns if shard.dim else tile.rows) is None
    return Scales(sum(each.nbytes for each in made), tiles * itemsize, itemsize, shares)


def _transport(config: Config) -> str:
    if config.cluster.device is Device.cuda:
        return "nccl"
    in_place = config.cluster.nodes == 1 and engine_options(config)["transport"] is Transport.auto
    return "shm" if in_place else "gloo"


ROLES = (
    *("compute_weights", "main_weights", "main_grads", "gradient_sums", "optimizer", "fp8_scales", "buffers"),
    "padding",
)
INTEGER = 8
"""Bytes of a gradient under numerics=exact."""


def kept(model: Model) -> dict[str, int]:
    """Bytes by role, of the first rank; main weights that are the compute weights count as these."""
    found: Counter[str] = Counter(dict.fromkeys(ROLES, 0))
    for bucket in model.buckets:
        for role, num_bytes, used in tensors(bucket, model.config):
            found[role] += used
            found["padding"] += num_bytes - used
        found["fp8_scales"] += sum(each.kept for each in bucket.scales)
    found["buffers"] = sum(buffer.nbytes for buffer in model.module.buffers())
    return dict(found)


def on_host(model: Model) -> int:
    """Bytes of what is kept that lie in the host's memory (engine.offload_optimizer); 0 where that is the device's."""
    config = model.config
    if config.cluster.device is Device.cpu or not engine_options(config)["offload_optimizer"]:
        return 0
    held = [each for bucket in model.buckets if bucket.trainable for each in tensors(bucket, config)]
    return sum(num_bytes for role, num_bytes, _ in held if role in ("main_weights", "main_grads", "optimizer"))


def tensors(bucket: Bucket, config: Config) -> Iterator[tuple[str, int, int]]:
    """Role, bytes, and bytes without padding of each flat tensor of a bucket."""
    placements, cuts, dtypes = bucket.placements, bucket.cuts, bucket.dtypes
    options = engine_options(config)
    offloads = bucket.trainable and options["offload_optimizer"]
    apart = SHARD in cuts.own and options["nccl_ub"] is not Registration.none and fixed_buffers(config)

    def tensor(role: str, on: On, itemsize: int) -> tuple[str, int, int]:
        return role, cuts.numel(on) * itemsize, cuts.param_numel(on) * itemsize

    resting = placements.resting_weights
    if placements.resting_weights_are_kept:
        for _ in range(bucket.copies):
            yield tensor("compute_weights", resting, dtypes.compute.itemsize)
    if not placements.resting_weights_are_kept or dtypes.main != dtypes.compute or offloads or apart:
        yield tensor("main_weights", placements.main_weights, dtypes.main.itemsize)
    if not bucket.trainable:
        return
    is_exact = config.numerics.mode is Numerics.exact
    sums = INTEGER if is_exact else dtypes.grads.itemsize
    if is_exact or offloads or apart:
        yield tensor("main_grads", placements.main_grads, dtypes.grads.itemsize)
    yield tensor("gradient_sums" if is_exact or offloads or apart else "main_grads", placements.accumulated_grads, sums)
    for _ in range(optimizer_states(config)):
        yield _moment(bucket)


def _moment(bucket: Bucket) -> tuple[str, int, int]:
    """One buffer of optimizer state: of the runs of the shard that hold any parameters."""
    layout, rank, width = bucket.cuts.layout, bucket.cuts.layout_rank, bucket.dtypes.main.itemsize
    runs = layout.runs(rank, dict.fromkeys((slot.spec.name for slot in layout.slots), 0))
    return "optimizer", sum(run.end - run.start for run in runs) * width, layout.param_numel_on(rank) * width
