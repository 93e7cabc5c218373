"""The plan of one cell: bytes kept, bytes at the peak, and traffic.

As a program: a list of configurations (JSON) from stdin, a list of plans to stdout, for callers without torch.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from harness.config.derived import engine_options, microbatches_per_rank, tokens_per_step
from harness.config.own import capabilities_of
from harness.config.schema import Config, Device, EngineName, OptimizerName
from harness.config.typed import load_config
from harness.fsdp.options import GradBuffer
from harness.plan.activations import Recorded, record
from harness.plan.model import Model, built, tensor_axis
from harness.plan.packages import PEERS, beyond
from harness.plan.peak import Ours
from harness.plan.peers import alone
from harness.probe.flops import flops_per_token
from harness.store.screen import filtered

GIB = 2**30

Records = dict[str, Recorded]


def planned(values: dict[str, Any], records: Records | None = None) -> dict[str, Any]:
    """The plan of a frozen configuration, or why there is none. records: those of other cells, which it may share."""
    config = load_config(values)
    why = refusal(config)
    try:
        return plan(config, records) if why is None else {"refused": why}
    except (ValueError, NotImplementedError) as error:  # as a rank says it
        return {"refused": str(error)}


def totals(config: Config) -> dict[str, int | None] | None:
    """Bytes kept on the device, at the peak and sent in a step; None where there is no plan."""
    if refusal(config) is not None:
        return None
    made = plan(config)
    peak = made["peak"] and made["peak"]["total"]
    return {"kept": sum(made["kept"].values()), "peak": peak, "sent": made["sent"]}


def refusal(config: Config) -> str | None:
    engine, package = config.engine.name, capabilities_of(config).package
    if engine is not EngineName.native and engine not in PEERS:
        return f"engine={engine.name} is not planned; valid: {', '.join(['native', *(each.name for each in PEERS)])}"
    if engine is EngineName.megatron_fsdp and find_spec("megatron_fsdp") is None:
        return f"engine=megatron_fsdp is planned by the package itself, which is not installed: pip install {package}"
    if config.optimizer.name in (OptimizerName.ext, OptimizerName.muon):
        what = "state of its own" if config.optimizer.name is OptimizerName.ext else "whole matrices in its steps"
        return f"optimizer={config.optimizer.name.name} has {what}, not planned; valid: optimizer=adam, adamw or sgd"
    return None


def plan(config: Config, records: Records | None = None) -> dict[str, Any]:
    """Bytes and messages of the first rank, which keeps as much as any other.

    on_host: bytes of what is kept that are not on the device, and not in its peak. left_out: what is not planned, and
    why; peak and wire are None there. flops: of a rank in a step; None if unknown. fits: in cluster.device_memory; None
    where one of both is unknown. sent: bytes of all collectives.
    """
    k, engine = microbatches_per_rank(config), PEERS.get(config.engine.name, Ours)
    with tensor_axis(config.mesh.tp) as axis:
        model = built(config if engine is Ours else alone(config), axis)
        recorded = _recorded(model, {} if records is None else records)
    unknown = dict(left_out(config, recorded.failure, model.module))
    made = engine(config, model, recorded)
    peak, sent = made.run(recorded.marks, k), made.rows
    sent.add(recorded.tensor_parallel, k)
    room, is_sent, has_peak = config.cluster.device_memory, "wire" not in unknown, "peak" not in unknown
    return {
        "kept": made.memory,
        "on_host": made.on_host,
        "peak": peak if has_peak else None,
        "wire": sent.table if is_sent else None,
        "sent": sent.num_bytes if is_sent else None,
        "left_out": unknown,
        "flops": (flops_per_token(config) or 0) * tokens_per_step(config) / config.mesh.world_size or None,
        "fits": peak["total"] <= room * GIB if has_peak and room is not None else None,
    }


def _recorded(model: Model, records: Records) -> Recorded:
    """A record of this cell, or of one that computes alike."""
    config = model.config
    arriving = [each.arriving for unit in model.units for each in unit.gradients]
    of_data = config.data.seq_len, config.train.microbatch_size, config.mesh.tp, config.mesh.sequence_parallel
    made_of = config.model, config.cluster.device, config.dtype.compute, config.dtype.fp8, arriving
    key = repr((of_data, made_of, [unit.name for unit in model.units]))
    if key not in records:
        records[key] = record(model)
    return records[key]


def left_out(config: Config, failure: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Parts of a plan that would be guesses, each with the setting that makes it one. failure: of the record."""
    options = engine_options(config)
    for part in ("peak", "wire") if failure else ():
        yield part, f"model.family={config.model.family.name} does not run on torch's meta device: {failure}"
    for kind in {type(part).__name__ for part in module.modules() if isinstance(part, nn.RNNBase)}:
        yield "peak", f"torch.nn.{kind}: its kernels keep more for a backward than the meta device tells"
    yield from beyond(config)
    if config.dtype.fp8 is not None and config.cluster.device is Device.cuda:
        yield "peak", f"dtype.fp8={config.dtype.fp8.name} on cuda: which kernels multiply, only a card can tell"
    if config.dtype.loss_scale == "dynamic":
        yield "wire", "dtype.loss_scale=dynamic: torch's scaler has an exchange of its own"
    if options["grad_buffer"] is not GradBuffer.flat:
        yield "peak", "engine.grad_buffer: planned at its default alone"


if __name__ == "__main__":
    with filtered():
        torch.set_num_threads(1)
        gc.freeze()  # what is imported is not looked through at each collection: a tenth of the time
        shared: Records = {}
        print(json.dumps([planned(values, shared) for values in json.load(sys.stdin)]))
