"""The plan of one cell: bytes kept, bytes at the peak, and traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from harness.config.derived import engine_options, fixed_buffers, microbatches_per_rank
from harness.config.schema import Config, EngineName, ModelFamily, OptimizerName
from harness.config.typed import load_config
from harness.fsdp.vocabulary import GradBuffer
from harness.plan.activations import Recorded, record
from harness.plan.kept import kept, on_host
from harness.plan.model import Model, built, tensor_axis
from harness.plan.peak import peak
from harness.plan.wire import Rows, wire

GIB = 2**30
ONCE = (ModelFamily.llama, ModelFamily.moe)
"""Families of which each unit runs once in a forward, in the order of its definition."""


Records = dict[str, Recorded]


def planned(values: dict[str, Any], records: Records | None = None) -> dict[str, Any]:
    """The plan of a frozen configuration, or why there is none. records: those of other cells, which it may share."""
    config = load_config(values)
    why = refusal(config)
    return plan(config, records) if why is None else {"refused": why}


def refusal(config: Config) -> str | None:
    if config.engine.name is not EngineName.native:
        return f"engine={config.engine.name.name} is not planned; valid: engine=native"
    if config.optimizer.name in (OptimizerName.ext, OptimizerName.muon):
        what = "state of its own" if config.optimizer.name is OptimizerName.ext else "whole matrices in its steps"
        return f"optimizer={config.optimizer.name.name} has {what}, not planned; valid: optimizer=adam, adamw or sgd"
    return None


def plan(config: Config, records: Records | None = None) -> dict[str, Any]:
    """Bytes and messages of the first rank, which keeps as much as any other.

    on_host: bytes of what is kept that are not on the device, and not in its peak. left_out: what is not planned, and
    why; peak and wire are None there. fits: in cluster.device_memory; None where one of both is unknown.
    """
    unknown = dict(left_out(config))
    with tensor_axis(config.mesh.tp) as axis:
        model = built(config, axis)
        recorded = (
            None if "peak" in unknown and config.mesh.tp == 1 else _recorded(model, {} if records is None else records)
        )
    memory, host, k = kept(model), on_host(model), microbatches_per_rank(config)
    found = peak(model, recorded.marks, sum(memory.values()) - host) if recorded and "peak" not in unknown else None
    room = config.cluster.device_memory
    rows = None if "wire" in unknown else wire(model, recorded.tensor_parallel if recorded else Rows(), k)
    return {
        "kept": memory,
        "on_host": host,
        "peak": None if found is None else asdict(found),
        "wire": None if rows is None else as_table(rows),
        "left_out": unknown,
        "fits": None if found is None or room is None else found.total <= room * GIB,
    }


def _recorded(model: Model, records: Records) -> Recorded:
    """A record of this cell, or of one that computes alike."""
    config = model.config
    arriving = [bucket.arriving(config) for bucket in model.buckets]
    sizes = (
        config.model,
        config.data.seq_len,
        config.train.microbatch_size,
        config.mesh.tp,
        config.mesh.sequence_parallel,
    )
    key = repr((sizes, config.cluster.device, config.dtype.compute, arriving, [unit.name for unit in model.units]))
    if key not in records:
        records[key] = record(model)
    return records[key]


def left_out(config: Config) -> Iterator[tuple[str, str]]:
    """Parts of a plan that would be guesses, each with the setting that makes it one."""
    options, family = engine_options(config), config.model.family
    if family not in ONCE:
        for part in ("peak", "wire"):
            yield part, f"model.family={family.name}: how often and when its units run is known only once it runs"
    if config.dtype.fp8 is not None:
        yield "peak", f"dtype.fp8={config.dtype.fp8.name}: what its layers keep for the backward is not recorded"
        if config.mesh.tp > 1:
            yield "wire", "dtype.fp8 with mesh.tp: maxima of activations are exchanged as the layers run"
    if config.dtype.loss_scale == "dynamic":
        yield "wire", "dtype.loss_scale=dynamic: torch's scaler has an exchange of its own"
    if fixed_buffers(config):
        yield "peak", "engine.double_buffer (which nccl_ub turns on): fixed buffers are not planned"
    if options["grad_buffer"] is not GradBuffer.flat or options["prefetch_limit_bytes"] is not None:
        yield "peak", "engine.grad_buffer and engine.prefetch_limit_bytes: planned at their defaults alone"


def as_table(rows: Rows) -> dict[str, dict[str, dict[str, int]]]:
    """Count and bytes by axis and kind."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for (axis, kind, what), amount in rows.items():
        found.setdefault(axis, {}).setdefault(kind, {"count": 0, "bytes": 0})[what] = amount
    return found
