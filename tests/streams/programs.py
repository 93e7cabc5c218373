"""Trainings of cases on the ranks, recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.fsdp import Fp8Linear, Groups, ShardedModel, fully_shard, fully_shard_optimizer
from harness.fsdp.tensor_parallel import values_here
from tests.fsdp import pairs
from tests.streams.cases import (
    APART,
    EIGHT_BITS,
    EVALUATING,
    EXPERTS,
    LATE,
    LOADING,
    MORE,
    POLICIES,
    READING,
    Case,
)
from tests.streams.cuda import MAIN, Stream
from tests.streams.group import RecordedGroup, new_group
from tests.streams.log import Log
from tests.streams.recorder import Recorder, believing_in, recording

STEPS = 3
TILE = 128
"""What both sizes of a weight are multiples of, under every recipe."""
MAX_NORM = 0.05
"""Below the norms that occur, so that clipping acts."""


class Wide(pairs.Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(TILE, 3 * TILE), nn.Linear(3 * TILE, TILE)


class Program(pairs.Model):
    """Four units, of which the root is used first and last; blocks may be recomputed."""

    def __init__(self, recompute: str, *, late: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.late = late

    def widen(self) -> None:
        """Give the blocks sizes that every recipe can tile, over two ranks not always at a tile's edge."""
        self.entry = nn.Linear(pairs.WIDTH, TILE, bias=False)
        self.blocks = nn.ModuleList(Wide() for _ in range(2))
        self.exit = nn.Linear(TILE, pairs.WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant") if self.recompute else block(x)
        y: Tensor = self.exit(x)
        self.recompute = "kept" if self.late else self.recompute
        return y


def program_of(case: Case) -> Program:
    program = Program(case.recompute, late=case.more == LATE)
    for param in program.blocks[-1].parameters() if case.more == EXPERTS else ():
        param.allreduce = False  # type: ignore[attr-defined] # Megatron's mark
    if case.more in EIGHT_BITS:
        program.widen()
        Fp8Linear.convert(program, EIGHT_BITS[case.more], lambda name, _: name.startswith("blocks"))
    return program


# -- ranks -------------------------------------------------------------------------------------------------------------


@cache
def groups_of(rank: int, outer: int, inner: int, of: str = "") -> tuple[Groups, list[RecordedGroup]]:
    """The communicators of a grid, made once in a process; and a list of them. of: what they are for, in reports."""
    world = outer * inner
    shard = [list(range(row * inner, (row + 1) * inner)) for row in range(outer)]
    across = [list(range(column, world, inner)) for column in range(inner)]
    mine = shard[rank // inner]
    found = [new_group(mine, f"reduce{of}"), new_group(mine, f"gather{of}")]
    if outer > 1:
        found += [new_group(across[rank % inner], f"outer{of}"), new_group(range(world), f"everyone{of}")]
        return Groups(found[0], found[2], found[3], gather=found[1]), found
    return Groups(found[0], gather=found[1]), found


class Several:
    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.between: Callable[[], None] = lambda: None

    def step(self) -> None:
        """All of them."""
        for each in self.optimizers:
            each.step()
            self.between()

    def zero_grad(self) -> None:
        """All of them."""
        for each in self.optimizers:
            each.zero_grad()


def shard(rank: int, case: Case, module: nn.Module) -> tuple[ShardedModel, Any]:
    groups, _ = groups_of(rank, case.hosts, case.inner)
    dtype, policy, numerics = POLICIES[case.policy]
    options: dict[str, Any] = {"double_buffer": case.buffers == "double", "numerics": numerics}
    if case.buffers == "user":
        options = {"nccl_ub": "manual", "numerics": numerics}
    if numerics == "exact":
        options["exact_terms"] = case.k * case.world
    options |= MORE.get(case.more, {})
    if options.get("separate_gather_group") is False:
        groups = replace(groups, gather=None)
    model = fully_shard(
        module.to(dtype),
        groups=groups,
        expert_groups=groups_of(rank, case.hosts, case.inner, " of experts")[0] if case.more == EXPERTS else None,
        unit_modules=[pairs.Block],
        strategy=case.strategy,
        outer_strategy=case.outer or "no_shard",
        mp_policy=policy,
        grad_divisor=float(case.k * case.world),
        prefetch=case.prefetch,
        offload_optimizer=case.offload,
        watchdog_timeout_s=600.0,
        **options,
    )
    if case.more != APART:
        return model, fully_shard_optimizer(model, pairs.adamw(model.module))
    weights = list(model.module.parameters())
    halves = [pairs.adamw(nn.ParameterList(half)) for half in (weights[::2], weights[1::2])]
    return model, Several([fully_shard_optimizer(model, each) for each in halves])


def name_buffers(recorder: Recorder, model: ShardedModel, case: Case) -> None:
    """Let reports speak of buffers as the engine does."""
    for bucket in model.engine.buckets:
        recorder.name(bucket.compute, f"weights of {bucket.name}")
        if bucket.kept is not None:
            recorder.name(bucket.kept, f"weights of {bucket.name}")
        if bucket.main_storage is not None:
            recorder.name(bucket.main_storage, f"main weights of {bucket.name}")
        gradients = bucket.gradients
        if gradients is None:
            continue
        recorder.name(gradients.sums, f"gradient sums of {bucket.name}")
        if gradients._main is not None:
            recorder.name(gradients._main, f"main gradients of {bucket.name}")
        for each in (bucket.main_storage, gradients._main) if case.offload else ():
            assert each is not None
            recorder.on_host(each)


# -- a training --------------------------------------------------------------------------------------------------------


def hand_back(caller: Stream, forward: Stream) -> None:
    """What torch does when a backward ends."""
    caller.wait_stream(forward)


@dataclass
class Run:
    """log: of this rank, where it was asked for. weights: after the last step. orders: what each communicator was asked
    for."""

    case: Case
    log: Log | None
    weights: dict[str, Tensor]
    orders: dict[tuple[str, tuple[int, ...]], list[str]]


def data(case: Case, rank: int, step: int, index: int) -> Tensor:
    return pairs.data(step, rank * case.k + index)


def run(rank: int, case: Case, records: bool = True) -> Run:
    """Three steps under a case on this rank. A rank that does not record believes in streams all the same."""
    with ExitStack() as stack:
        silent = Recorder()
        stack.enter_context(believing_in(silent.cuda))
        model, optimizer = shard(rank, case, program_of(case))
        _, every = groups_of(rank, case.hosts, case.inner)
        if case.more == EXPERTS:
            every = [*every, *groups_of(rank, case.hosts, case.inner, " of experts")[1]]
        for group in every:
            group.order.clear()
        recorder = stack.enter_context(recording()) if records else silent
        if records:
            restart_streams(model, recorder)
            name_buffers(recorder, model, case)
            recorder.host_functions |= {"step_of", "step", "_first"} if case.offload else set()
        train(rank, case, model, optimizer, recorder)
        orders = {(group.label, group.ranks): list(group.order) for group in every}
        log = replace(recorder.log, entries=list(recorder.log.entries)) if records else None
        with recorder.paused():
            weights = {name: value.clone() for name, value in _whole(model)}
            model.close()
    return Run(case, log, weights, orders)


def restart_streams(model: ShardedModel, recorder: Recorder) -> None:
    """Side streams of the recorder: those of the building are another's."""
    runtime = model.engine.runtime
    runtime._streams = {name: Stream(recorder.cuda, name) for name in ("gather", "reduce", "outer")}


def _whole(model: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    for bucket in model.engine.buckets:
        yield from bucket.named_slices(bucket.gather_whole(bucket.main_shards))


def train(rank: int, case: Case, model: ShardedModel, optimizer: Any, recorder: Recorder) -> None:
    reader: Stream | None = None
    for step in range(STEPS):
        for index in range(case.k):
            with recorder.paused():
                x = data(case, rank, step, index).to(POLICIES[case.policy][0])
            last = index == case.k - 1
            with nullcontext() if last else model.no_sync():
                recorder.phase("forward")
                loss = model(x).float().square().mean()
                if case.more == EVALUATING:
                    evaluate(model, x, recorder)
                recorder.phase("backward")
                backward(loss, case, recorder)
        recorder.phase("step")
        if case.clip:
            model.clip_grad_norm_(MAX_NORM)
        if reader is not None:
            recorder.cuda.current.wait_stream(reader)
        if isinstance(optimizer, Several):
            optimizer.between = partial(evaluate, model, x, recorder)
        step_of(optimizer, recorder)
        if case.more == READING:
            reader = read(model, recorder)
        if case.more == LOADING:
            evaluate(model, x, recorder)
            load(model, recorder)
        recorder.phase("end")
        optimizer.zero_grad()


def evaluate(model: ShardedModel, x: Tensor, recorder: Recorder) -> None:
    """A forward without gradients, on a stream of the program's."""
    cuda = recorder.cuda
    before, other = cuda.current, Stream(cuda, "other")
    other.wait_stream(before)
    with cuda.stream(other), torch.no_grad():
        model(x)
    before.wait_stream(other)


def load(model: ShardedModel, recorder: Recorder) -> None:
    """A program's going back to what it has kept: here, to the same."""
    with recorder.paused():
        state = model.sharded_state()
        kept = {name: value.clone() for name, value in state.items() if value.dim()}
        for each in kept.values():
            recorder.on_host(values_here(each))
    for name, value in kept.items():  # counters are what they were
        state[name].copy_(value)


def read(model: ShardedModel, recorder: Recorder) -> Stream:
    """A program's look at all weights beside its training; the stream that looks."""
    cuda = recorder.cuda
    other = Stream(cuda, "other")
    other.wait_stream(cuda.current)
    with cuda.stream(other):
        for param in model.module.parameters():
            param.detach().square().sum()
    return other


def step_of(optimizer: Any, recorder: Recorder) -> None:
    optimizer.step()


def backward(loss: Tensor, case: Case, recorder: Recorder) -> None:
    """`loss.backward()`, where the program may have made another stream current.

    torch runs each node, and its hooks, on the stream its forward ran on, which waits for the stream of the gradient it
    gets; callbacks at the end run on the caller's stream, which then waits for those of all leaves.
    """
    if case.backward_on == MAIN:
        loss.backward()
        return
    cuda = recorder.cuda
    forward, caller = cuda.current, Stream(cuda, case.backward_on)
    caller.wait_stream(forward)  # the program's own: it hands the loss over
    forward.wait_stream(caller)  # torch's: the first gradient is made on the caller's stream

    def end() -> None:
        hand_back(caller, forward)
        cuda.current = caller

    loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(end))
    try:
        loss.backward()
    finally:
        cuda.current = forward
    forward.wait_stream(caller)  # the program's own, before it steps
