"""Bytes that a rank keeps between steps, by buffer; padding apart. See `ParamGroup.persistent_bytes`.

Flat tensors are equally long on all ranks; ranks differ in how much of them is padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from harness.config.derived import engine_options, fixed_buffers, optimizer_states
from harness.config.schema import Config, Device
from harness.fsdp.storage.placement import SHARD, On
from harness.fsdp.vocabulary import Numerics, Registration
from harness.plan.model import Bucket, Model

ROLES = (
    "compute_weights",
    "main_weights",
    "main_grads",
    "gradient_sums",
    "optimizer",
    "fp8_scales",
    "buffers",
    "padding",
)
INTEGER = 8
"""Bytes of a gradient under numerics=exact."""


def kept(model: Model) -> dict[str, int]:
    """Bytes by role, of the first rank; main weights that are the compute weights count as these."""
    found: Counter[str] = Counter(dict.fromkeys(ROLES, 0))
    states = optimizer_states(model.config)
    for bucket in model.buckets:
        for role, num_bytes, used in tensors(bucket, model.config):
            found[role] += used
            found["padding"] += num_bytes - used
        if bucket.trainable:
            used, whole = _moments(bucket)
            found["optimizer"] += states * used
            found["padding"] += states * (whole - used)
        found["fp8_scales"] += sum(each.kept for each in bucket.scales)
    found["buffers"] = sum(buffer.nbytes for buffer in model.module.buffers())
    return dict(found)


def on_host(model: Model) -> int:
    """Bytes of what is kept that lie in the host's memory (engine.offload_optimizer); 0 where that is the device's."""
    config, states = model.config, optimizer_states(model.config)
    if config.cluster.device is Device.cpu or not engine_options(config)["offload_optimizer"]:
        return 0
    trained = [bucket for bucket in model.buckets if bucket.trainable]
    moved = (
        num_bytes
        for bucket in trained
        for role, num_bytes, _ in tensors(bucket, config)
        if role in ("main_weights", "main_grads")
    )
    return sum(moved) + sum(states * _moments(bucket)[1] for bucket in trained)


def tensors(bucket: Bucket, config: Config) -> Iterator[tuple[str, int, int]]:
    """Role, bytes, and bytes without padding of each flat tensor of a bucket."""
    placements, cuts, dtypes = bucket.placements, bucket.cuts, bucket.dtypes
    options = engine_options(config)
    offloads = bucket.trainable and options["offload_optimizer"]
    apart = SHARD in cuts.own and options["nccl_ub"] is not Registration.none and fixed_buffers(config)
    main = dtypes.main if bucket.trainable else dtypes.compute

    def tensor(role: str, on: On, itemsize: int) -> tuple[str, int, int]:
        return role, cuts.numel(on) * itemsize, cuts.param_numel(on) * itemsize

    resting = placements.resting_weights
    if placements.resting_weights_are_kept:
        for _ in range(bucket.copies):
            yield tensor("compute_weights", resting, dtypes.compute.itemsize)
    if not placements.resting_weights_are_kept or main != dtypes.compute or offloads or apart:
        yield tensor("main_weights", placements.main_weights, main.itemsize)
    if not bucket.trainable:
        return
    is_exact = config.numerics.mode is Numerics.exact
    sums = INTEGER if is_exact else dtypes.grads.itemsize
    if is_exact or offloads or apart:
        yield tensor("main_grads", placements.main_grads, dtypes.grads.itemsize)
        yield tensor("gradient_sums", placements.accumulated_grads, sums)
    else:
        yield tensor("main_grads", placements.accumulated_grads, sums)


def _moments(bucket: Bucket) -> tuple[int, int]:
    """Bytes of one buffer of optimizer state: of parameters, and of the runs of the shard that hold any."""
    layout, rank = bucket.cuts.layout, bucket.cuts.layout_rank
    runs = layout.runs(rank, dict.fromkeys((slot.spec.name for slot in layout.slots), 0))
    itemsize = bucket.dtypes.main.itemsize
    return layout.param_numel_on(rank) * itemsize, sum(run.end - run.start for run in runs) * itemsize
