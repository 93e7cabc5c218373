"""Mistakes of ordering, one each, that the recorder must find and name the buffer of."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from harness.fsdp.comm import device
from harness.fsdp.comm.device import DeviceRuntime, copy_together
from harness.fsdp.comm.reduction import Exchange
from harness.fsdp.runtime import reduce
from harness.fsdp.runtime.reduce import PendingReduction, ReducePipeline
from harness.fsdp.runtime.weights import Weights
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.update import norms
from tests.streams import programs
from tests.streams.cases import APART, LOADING, READING, Case
from tests.streams.programs import run
from tests.streams.races import races_of
from tests.support.covering import once
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

ZERO1, ZERO2, ZERO3 = (Case(name) for name in ("optim", "optim_grads", "optim_grads_params"))
HSDP = Case("optim_grads", "no_shard")
BF16 = Case("optim_grads_params", policy="bf16_comm")
_side_stream = DeviceRuntime._on_side_stream


@dataclass(frozen=True)
class Fault:
    """breaks: the mistake. patch: makes it. case: is trained with it. buffer: a pattern of the buffers that reports
    name. between: patterns of the operations that nothing orders."""

    breaks: str
    patch: Callable[[], AbstractContextManager[Any]]
    case: Case
    buffer: str
    between: tuple[str, str] = ("", "")


def instead(of: Any, name: str, wrong: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(of, name, wrong)


def bare(name: str) -> AbstractContextManager[Any]:
    """On a stream of the engine's, which waits for nothing."""
    cuda = device.cuda
    stream = next((each for each in _STREAMS if each.name == name and each.cuda is cuda), None)
    if stream is None:
        stream = programs.Stream(cuda, name)
        _STREAMS.append(stream)
    found: AbstractContextManager[Any] = cuda.stream(stream)
    return found


_STREAMS: list[programs.Stream] = []


def on_stream(of: Any, method: str, stream: str) -> Callable[[], AbstractContextManager[Any]]:
    """A function runs on a side stream that waits for nothing."""
    right = getattr(of, method)

    def wrong(*args: Any, **named: Any) -> Any:
        with bare(stream):
            return right(*args, **named)

    return instead(of, method, wrong)


@contextmanager
def landed_too_soon() -> Iterator[None]:
    """A reduction counts as made when its traffic has come in, whatever becomes of the sums."""
    right, found = PendingReduction._exchange, dict[int, list[Exchange]]()

    def noting(self: PendingReduction, *given: Any) -> Exchange:
        found.setdefault(id(self), []).append(right(self, *given))
        return found[id(self)][-1]

    def wait(self: PendingReduction) -> None:
        for exchange in found.pop(id(self), ()):
            exchange.pending.wait()

    with mock.patch.multiple(PendingReduction, _exchange=noting, wait=wait):
        yield


def early_event(self: PendingReduction) -> None:
    with self.runtime.stream(self._stream):
        self.done = self.runtime.record()
    while self.advance():
        pass


@contextmanager
def swapped_early() -> Iterator[None]:
    """Units take turns in one buffer as if each were done with a unit before its time: all fit at any time."""
    right = BucketMemory.unit

    @contextmanager
    def one_place(self: BucketMemory, *, shares: bool) -> Iterator[None]:
        self._num_units = 0
        with right(self, shares=shares):
            yield

    with (
        mock.patch.object(BucketMemory, "has_room", return_value=True),
        mock.patch.object(BucketMemory, "unit", one_place),
    ):
        yield


def moved_late(bucket: Any, pipeline: ReducePipeline) -> PendingReduction:
    held: Gradients = bucket.gradients
    waiting, held._waiting = held._waiting, {}
    places = [held._views[index] for index in waiting]
    held._unwritten -= waiting.keys()
    job = PendingReduction(bucket, pipeline)
    copy_together(places, list(waiting.values()))
    return job


def own_stream(optimizer: torch.optim.Optimizer, recorder: Any) -> None:
    with bare("optimizer"):
        optimizer.step()


def installed_beside(self: Any, *args: Any, **named: Any) -> None:
    with bare("install"):
        _install(self, *args, **named)


_install = Weights.install

PATCHED = {
    "bucket from the wrong stream": Fault(
        "The bucket that autograd fills is allocated on the stream of reductions, and goes back to it",
        on_stream(BucketMemory, "take", "reduce"),
        ZERO2,
        r"memory for blocks\.1/float32",
        ("allocated on stream reduce", "stream main"),
    ),
    "bucket freed too soon": Fault(
        "A gradient bucket is given back while its reduction runs",
        landed_too_soon,
        ZERO2,
        r"memory for blocks\.2/float32",
        ("stream reduce|stream nccl reduce", "stream main"),
    ),
    "event before its work": Fault(
        "The event of a reduction is recorded before the reduction",
        instead(PendingReduction, "run", early_event),
        ZERO2,
        r"gradient sums of \(root\)/float32",
        ("copy_ of .* on stream reduce", "mul_ .* on stream main"),
    ),
    "one buffer for two": Fault(
        "Under double_buffer a unit is fetched one early, into the buffer of the unit that runs",
        swapped_early,
        Case("optim_grads_params", buffers="double"),
        r"weights of blocks\.\d/float32 \| weights of blocks",
        ("", ""),
    ),
    "installed beside the update": Fault(
        "Weights are overwritten while the optimizer's stream still updates what they are made of",
        instead(Weights, "install", installed_beside),
        Case("optim", policy="bf16"),
        r"weights of \(root\)/bfloat16",
        ("_fused_adamw_ on stream main", "copy_ .*stream install"),
    ),
    "update on a stream of its own": Fault(
        "The optimizer steps on another stream than the gradients were finished for",
        instead(programs, "step_of", own_stream),
        Case("no_shard"),
        r"gradient sums of|weights of",
        ("stream (main|optimizer)", "stream (main|optimizer)"),
    ),
    "sums from the wrong stream": Fault(
        "The memory of gradient sums is allocated on another stream than that which puts them there",
        on_stream(Gradients, "allocate_sums", "gather"),
        ZERO2,
        r"gradient sums of blocks\.2/float32",
        ("copy_ .*stream reduce", "allocated from stream gather"),
    ),
    "moved after sending": Fault(
        "Gradients that waited for one another are moved into their bucket when that is on its way",
        instead(reduce, "PendingReduction", moved_late),
        ZERO2,
        r"memory for blocks\.2/float32",
        ("nccl reduce_scatter|stream reduce", "_foreach_copy_"),
    ),
    "clipped beside the norm": Fault(
        "Gradients are scaled on a stream that waits for nothing",
        on_stream(norms, "scale_gradients", "clip"),
        Case("optim", clip=True),
        r"gradient sums of (\(root\)|blocks)",
        ("mul_ .*stream clip", "_fused_adamw_ on stream main"),
    ),
    "weights from the wrong stream": Fault(
        "The memory of gathered weights is allocated on the stream of gathers, and freed while the compute reads it",
        on_stream(BucketMemory, "refill", "gather"),
        ZERO3,
        r"weights of (\(root\)|blocks\.\d)/float32",
        ("stream main", "allocated from stream gather"),
    ),
    "backward not handed back": Fault(
        "A backward under another current stream ends without that stream having waited for its leaves",
        instead(programs, "hand_back", lambda caller, forward: None),
        Case("optim_grads", backward_on="other"),
        r"memory for \(root\)/float32",
        ("stream main", "stream (other|reduce|nccl reduce)"),
    ),
}

CASES = {
    "double step": Case("optim_grads", k=2),
    "norm": Case("optim_grads", clip=True),
    "outer optim": Case("optim_grads_params", "optim"),
    "loading": Case("optim", offload=True, more=LOADING, policy="bf16"),
    "apart": Case("optim_grads", offload=True, more=APART, policy="bf16"),
    "reading": Case("optim", more=READING),
    "offload": Case("optim_grads", offload=True),
    "one rank inside": Case("optim", "optim", more="inner axis of one rank"),
} | {"ZeRO-1": ZERO1, "ZeRO-2": ZERO2, "ZeRO-3": ZERO3, "HSDP": HSDP, "bf16": BF16}
SLIPS = slips(
    r"""
    no wait after a gather: A unit's forward begins before its weights have come in
        fsdp.storage.param_group.ParamGroup.wait_for_unshard: pending.wait()
            => vars(self).setdefault("forgotten", []).append(pending)
        ZeRO-3
        weights of \(root\)/float32
        nccl all_gather ; mm on stream main
    gather beside the last use: The stream of gathers does not wait for the compute that has used the memory before
        fsdp.comm.device.DeviceRuntime._on_side_stream: if waits: => if waits and name != "gather":
        ZeRO-3
        weights of blocks\.\d/float32
        allocated on stream main ; copy_ of blocks.* on stream gather
    reduced before the last gradient: A reduction does not wait for the kernels that write its gradients
        fsdp.comm.device.DeviceRuntime._on_side_stream: if waits: => if waits and name != "reduce":
        ZeRO-1
        gradient sums of blocks\.2/float32
        on stream main ; nccl reduce_scatter
    outer beside inner: The outer reduction does not wait for the inner one
        fsdp.comm.device.DeviceRuntime._on_side_stream: if waits: => if waits and name != "outer":
        HSDP
        gradient sums of blocks\.2/float32
        stream reduce ; all_reduce of blocks.2/float32 outer
    sums used too soon: The optimizer does not wait for the reductions
        fsdp.runtime.reduce.PendingReduction.wait: self.done.wait() => pass
        ZeRO-1
        gradient sums of \(root\)/float32
        nccl reduce_scatter|stream reduce ; stream main
    all-to-all not waited for: Contributions are summed before they have come in
        fsdp.comm.reduction.Reduction.fold: exchange.pending.wait()
            => exchange.pending.incoming = []\n    exchange.pending.wait()
        bf16
        memory for blocks\.2/bfloat16
        nccl all_to_all ; stream reduce
    reduce-scatter not waited for: A reduce-scatter's result is added to the sums before it has come in
        fsdp.comm.reduction.Reduction.fold: exchange.pending.wait()
            => exchange.pending.incoming = []\n    exchange.pending.wait()
        double step
        memory for blocks\.2/float32
        nccl reduce_scatter ; stream reduce
    norm before its sum: The norm is taken before the ranks' parts are added
        fsdp.comm.communicator.Communicator.sum_scalars: operation).wait() => operation)
        norm
        memory for (norm|\(root\)|blocks)|block \d+
        nccl all_reduce ; sqrt
    weights not installed: The next forward begins before other ranks' updated weights have come in
        fsdp.storage.param_group.ParamGroup.receive: each.wait() => pass
        ZeRO-1
        weights of \(root\)/float32
        nccl all_gather ; mm on stream main
    inner shards not installed: A unit is gathered before its part has come in from the outer axis
        fsdp.storage.param_group.ParamGroup.receive: each.wait() => pass
        outer optim
        weights of blocks\.\d/float32
        nccl all_gather of .* outer ; stream gather
    loaded beside a copy: The host writes main weights that a device is still copying
        fsdp.runtime.weights.Weights.before_edit: if self.buckets[0].plan.offload is not None: => if False:
        loading
        main weights of .*/bfloat16
        copy_ .*stream other ; copy_ .*stream host
    updated beside a copy: An optimizer updates main weights on the host that a device still copies for an evaluation
        fsdp.runtime.weights.Weights.before_edit: self.runtime.synchronize() => pass
        apart
        main weights of .*/bfloat16
        copy_ .*stream other ; adam.*stream host|stream host
    received by the reader alone: The first stream that reads weights after an update waits for them, and no other does
        fsdp.comm.device.DeviceRuntime.as_on: if now == stream: => if True:
        reading
        weights of \(root\)/float32
        pow on stream other ; nccl all_gather
    offloaded and not waited for: The host steps main gradients that are still being copied to it
        fsdp.comm.device.DeviceRuntime.synchronize: if self.has_streams: => if False:
        offload
        main gradients of \(root\)/float32
        copy_ ; on stream host
    waiting for a leg that moves nothing: Compute waits for the gather of an axis of one rank, not for the one before it
        fsdp.storage.param_group.ParamGroup.gather_shards:  and comm.size > 1 =>
        one rank inside
        weights of (\(root\)|blocks\.\d)/float32
        nccl all_gather ; on stream main
    """
)
FAULTS = PATCHED | {
    name: Fault(slip.breaks, slip.patched, CASES[case], buffer, tuple(between.split(" ; ")))
    for name, (slip, case, buffer, between) in SLIPS.items()
}


def found_by_all(rank: int, faults: list[str]) -> dict[str, tuple[list[tuple[str, str, str]], float]]:
    """Of each fault the buffers and operations of its races, and the seconds that took; the first rank records."""
    found = {}
    for name in faults:
        begin = time.perf_counter()
        with FAULTS[name].patch():
            ran = run(rank, FAULTS[name].case, records=rank == 0)
        races = races_of(ran.log) if ran.log is not None else []
        found[name] = [(race.buffer, race.first, race.then) for race in races], time.perf_counter() - begin
    return found


@once
def found(world: int) -> dict[str, tuple[list[tuple[str, str, str]], float]]:
    return run_ranks(found_by_all, world, [name for name, fault in FAULTS.items() if fault.case.world == world])[0]


@pytest.mark.parametrize("name", each("Orders of streams", FAULTS))
def test_a_fault_is_found_and_its_buffer_named(name: str, killed_in: Callable[[float], None]) -> None:
    fault = FAULTS[name]
    races, seconds = found(fault.case.world)[name]
    assert any(
        re.search(fault.buffer, buffer) and re.search(fault.between[0], first) and re.search(fault.between[1], then)
        for buffer, first, then in races
    ), "\n".join(" | ".join(race) for race in races) or "no race was found"
    killed_in(seconds)
