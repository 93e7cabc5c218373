"""Units and buckets of our engine for its first rank, made by the engine itself on the meta device.

Buckets are `ParamGroup`s whose communicators are not there: layouts, dtypes, gradients and bytes kept are theirs. Flat
tensors are equally long on all ranks; ranks differ in how much of them is padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config.derived import data_ranks, engine_options, fixed_buffers, optimizer_states
from harness.config.schema import Config, Device
from harness.engines.adapters.native import policy_of
from harness.engines.protocol import TORCH_DTYPES
from harness.fsdp import Placements
from harness.fsdp.comm.mesh import Place
from harness.fsdp.comm.reduction import FixedPoint, Integers
from harness.fsdp.options import Numerics, Registration, Transport
from harness.fsdp.runtime.units import Members, Unit, build_units, plan_units
from harness.fsdp.storage.codec import mark_weights
from harness.fsdp.storage.gradients import GradientPlan
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.param_group import GroupKey, ParamGroup
from harness.models.workload import TokenWorkload, workload_for
from harness.private_torch import fake_store

META = torch.device("meta")
ROLES = (
    *("compute_weights", "main_weights", "main_grads", "gradient_sums", "optimizer", "fp8_scales", "buffers"),
    "padding",
)


class Unallocated(BucketMemory):
    """Buckets on the meta device, those in the host's memory too; weights are unsharded always."""

    def empty(self, bucket: Tensor) -> None:
        """Leave a bucket as it is."""

    def unmoved(self, numel: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Model:
    """units: the root first. memory: of temporary buckets. transport: what moves buckets, shm, gloo or nccl."""

    config: Config
    workload: TokenWorkload
    module: nn.Module
    units: list[Unit]
    memory: BucketMemory
    place: Place
    transport: str

    @property
    def buckets(self) -> list[ParamGroup]:
        return [bucket for unit in self.units for bucket in unit.buckets]

    @property
    def trained(self) -> list[ParamGroup]:
        return [bucket for bucket in self.buckets if bucket.trainable]


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
    workload, options, policy = workload_for(config), engine_options(config), policy_of(config.dtype)
    module = workload.build("meta", TORCH_DTYPES[config.dtype.compute])
    workload.quantize(module, META)
    if axis is not None:
        workload.cut(module, axis, sequence_parallel=config.mesh.sequence_parallel)
    mark_weights(module)
    outer, numerics = config.mesh.dp_outer, config.numerics.mode
    place = Place(0, data_ranks(config) // outer, 0, outer)
    placements = Placements.of(config.sharding.strategy, config.sharding.outer if outer > 1 else None)
    in_place = config.cluster.nodes == 1 and options["transport"] is Transport.auto
    transport = "nccl" if config.cluster.device is Device.cuda else "shm" if in_place else "gloo"
    comm: Any = SimpleNamespace(shm=transport == "shm" or None, is_gloo=transport == "gloo")
    gather = SimpleNamespace(shm=None)  # where shared memory would be allocated
    mesh: Any = SimpleNamespace(place=place, has_outer=outer > 1, inner=comm, outer=comm, gather=gather)
    tensor: Any = None if axis is None else SimpleNamespace(group=axis.get_group())
    registers = options["nccl_ub"] is not Registration.none and fixed_buffers(config)
    memory = Unallocated(META, fixed=fixed_buffers(config), registers=registers)
    integers = Integers(FixedPoint(), 1.0, META) if numerics is Numerics.exact else None
    offload = torch.device("cpu") if options["offload_optimizer"] else None
    gradients = GradientPlan(memory, numerics=numerics, integers=integers, offload=offload)

    def group(name: str, key: GroupKey, members: Members) -> ParamGroup:
        return ParamGroup(name, key, members, key.resolve(policy), gradients, mesh, placements, tensor, None)

    units = build_units(plan_units(module, workload.unit_classes), group, memory)
    return Model(config, workload, module, units, memory, place, transport)


def kept(model: Model) -> tuple[dict[str, int], int]:
    """Bytes by role, of the first rank; main weights that are the compute weights count as these. And how many of them
    lie in the host's memory (engine.offload_optimizer), where that is not the device's."""
    found, on_host, states = Counter(dict.fromkeys(ROLES, 0)), 0, optimizer_states(model.config)
    for bucket in model.buckets:
        found.update(bucket.persistent_bytes())
        found["fp8_scales"] += bucket.codec.scale_bytes if bucket.codec else 0
        if bucket.gradients is None:
            continue
        numel = bucket.layout.param_numel_on(bucket.cuts.layout_rank)
        moments = states * numel * bucket.dtypes.main.itemsize
        found["optimizer"] += moments
        if bucket.main_storage is not None and bucket.gradients.is_offloaded:
            on_host += moments + bucket.main_storage.nbytes + bucket.gradients.kept()[0][1].nbytes
    found["buffers"] = sum(buffer.nbytes for buffer in model.module.buffers())
    return dict(found), on_host if model.config.cluster.device is Device.cuda else 0
