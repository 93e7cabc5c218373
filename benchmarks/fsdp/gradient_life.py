"""What happens to a gradient from its birth to the update, for all eight pairs of strategies, as seen from outside.

Four ranks, two by two, train one bucket over two microbatches: bf16 weights, fp32 main weights and gradients, a bf16
wire. Every event is noted where the engine makes it; nothing here is read from a policy. The picture
(`docs/gradient_life.svg`) and the tables of docs/engine.md are drawn from these events by
`benchmarks/fsdp/engine_page.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness.fsdp import MixedPrecisionPolicy, OuterStrategy, Strategy, fully_shard
from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.events import OUTER
from harness.fsdp.comm.reduction import Floating, Reduction
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.memory import BucketMemory

INNER, OUTSIDE = 2, 2
PAIRS = tuple(itertools.product([s.name for s in Strategy], [s.name for s in OuterStrategy]))
STAGES = ("first microbatch", "last microbatch", "step()", "zero_grad()")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Event(NamedTuple):
    """One thing that happens to the gradient of one bucket.

    stage: one of `STAGES`. kind: write, reduce_scatter, all_reduce, fold, share, scale, free, update, all_gather.
    axis: inner, outer or "". how: copy, add or "". dtype: of what is written, sent or kept. where: the sums, a
    temporary bucket, ...
    """

    stage: str
    kind: str
    axis: str = ""
    how: str = ""
    dtype: str = ""
    where: str = ""


Life = list[Event]


def _axis(bucket: str) -> str:
    return "outer" if bucket.endswith(OUTER) else "inner"


def _around(owner: Any, name: str, before: Callable[..., None]) -> Any:
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return mock.patch.object(owner, name, method)


class Witness:
    """Turns what the engine calls into events; each method has the arguments of the engine's own."""

    def __init__(self, note: Callable[..., None]) -> None:
        self.note = note

    def fold(self, _: Any, exchange: Any, into: Any, *, add: bool) -> None:
        axis, kind = _axis(exchange.label.bucket), exchange.label.kind
        self.note(kind, axis, "", NAMES[exchange.parts[0].tensor.dtype])
        self.note("fold", axis, "add" if add else "copy", NAMES[into[0].dtype])
        if exchange.factor != 1.0:
            self.note("scale", axis, "", NAMES[into[0].dtype], "as it is summed")

    def copy_in(self, gradients: Any, index: int) -> None:
        where = "the sums" if gradients.is_in_place else "a temporary bucket"
        how = "copy" if index in gradients._unwritten else "add"
        self.note("write", "", how, NAMES[gradients.arriving], where)

    def spread(self, _: Any, exchange: Any, whole: Any) -> None:
        """The second leg of an all-reduce."""
        self.note("share", _axis(exchange.label.bucket), "", NAMES[whole[0].tensor.dtype])

    def finish(self, _: Any, sums: Any, main: Any, factor: float) -> None:
        if factor != 1.0:
            self.note("scale", "", "", NAMES[sums[0].dtype], "as it is finished")

    def all_gather(self, _: Any, parts: Any, label: Any, **__: Any) -> None:
        self.note("all_gather", _axis(label.bucket), "", NAMES[parts[0].tensor.dtype])

    def forget(self, gradients: Any) -> None:
        if not gradients.placements.accumulates_locally and gradients.has_sums:
            self.note("free", "", "", NAMES[gradients.sums.dtype], "the sums")

    def give_back(self, _: Any, bucket: Any) -> None:
        """A temporary bucket is no longer needed."""
        self.note("free", "", "", NAMES[bucket.dtype], "the temporary bucket")


WATCHED = (Reduction, "fold"), (Gradients, "copy_in"), (Reduction, "spread"), (Floating, "finish"), (
    Communicator, "all_gather"), (Gradients, "forget"), (BucketMemory, "give_back")  # fmt: skip


@contextmanager
def watching(note: Callable[..., None]) -> Iterator[None]:
    witness = Witness(note)
    with ExitStack() as stack:
        for owner, name in WATCHED:
            stack.enter_context(_around(owner, name, getattr(witness, name)))
        yield


def life_of(inner: str, outer: str, mesh: Any) -> Life:
    """The life of one bucket's gradient on this rank. *Collective.*"""
    events: Life = []
    stage = ""

    def note(kind: str, axis: str = "", how: str = "", dtype: str = "", where: str = "") -> None:
        repeats = kind == "write" and bool(events) and events[-1].kind == "write" and events[-1].stage == stage
        if stage and not repeats:  # the bucket is asked for again by the hook that found it
            events.append(Event(stage, kind, axis, how, dtype, where))

    module = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-3),
        device_mesh=mesh,
        dp_shard_dim="shard",
        dp_outer_dim="outer",
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
    )
    with watching(note):
        for index in range(2):
            model.set_model_auto_sync(index == 1)
            stage = ""
            loss = model(torch.ones(1, 8, dtype=torch.bfloat16)).sum()
            stage = STAGES[index]
            if inner == "optim_grads_params":
                note("all_gather", "inner", "", "bf16", "for the forward")
            loss.backward()
            model._parts.gradients.drain()  # sums that nobody waited for yet belong to this microbatch
        stage = STAGES[2]
        optimizer.step()
        model.install_weights()  # as the next forward begins
        stage = STAGES[3]
        optimizer.zero_grad()
    model.close()
    return events


def lives(rank: int) -> dict[tuple[str, str], Life]:
    mesh = init_device_mesh("cpu", (OUTSIDE, INNER), mesh_dim_names=("outer", "shard"))
    return {pair: life_of(*pair, mesh) for pair in PAIRS}
