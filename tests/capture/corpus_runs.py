"""Runs of the loops in `corpus_loops`, watched, with a fault of the corpus or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from harness.capture import watch
from harness.config.derived import lr_at
from harness.config.schema import NO_FAULT, Config
from harness.data.loader import Loader
from harness.engines.protocol import Microbatch
from harness.train.faults import build_session
from tests.capture.corpus_loops import KINDS, Bucket, Loop
from tests.faults import clips, fresh, rule, sums, update, weights
from tests.faults.corpus import corpus
from tests.faults.site import Site, spoiling
from tests.study.short import functions_given_back


@dataclass(frozen=True)
class Session:
    """What a fault is given to spoil, by the names of `harness.train.Session`."""

    config: Config
    engine: Any
    ranks: Any
    loader: Any
    begins: Callable[[int], None] = lambda step: None
    progress: Callable[[Any], None] = lambda told: None


def gradient_norm(buckets: list[Bucket], *_: Any) -> Tensor:
    squares = torch.zeros((), dtype=torch.float64)
    for bucket in buckets:
        squares += sum(piece.double().square().sum() for piece in bucket.grad_shards)
    if buckets[0].loop.is_sharded:
        dist.all_reduce(squares)
    return squares.sqrt()


def clip_gradients(buckets: list[Bucket], norm: Tensor, bound: float) -> None:
    for bucket in buckets:
        for piece in bucket.grad_shards:
            piece.mul_((bound / (norm + 1e-6)).clamp(max=1.0).to(piece.dtype))


F01 = "F01_duplicated_gradient"


@contextmanager
def handles(rank: int, kind: str, config: Config, loop: Callable[[], Loop]) -> Iterator[None]:
    """Give functions that faults of the corpus ask for their meaning here; sums over ranks only where there is one."""
    with ExitStack() as stack:
        for module in (update, clips, rule, fresh):
            stack.enter_context(mock.patch.object(module, "rows_of", lambda site: site.engine.rows))
        stack.enter_context(mock.patch.object(weights, "others_of", lambda bucket: bucket.others))
        pieces = lambda site: [each for bucket in site.buckets for each in bucket.grad_shards]  # noqa: E731
        stack.enter_context(mock.patch.object(sums, "_accumulated", pieces if kind == "ddp" else lambda site: []))
        stack.enter_context(
            mock.patch.multiple(clips.norms, gradient_norm=gradient_norm, clip_gradients=clip_gradients)
        )
        if config.fault.name != NO_FAULT and kind == "fsdp2":

            def scatter(output: Tensor, input: Tensor, op: Any, group: Any = None, async_op: bool = False) -> None:
                found = loop().summed(input.view(-1)).tensor_split(dist.get_world_size())[rank]
                output.copy_((found / dist.get_world_size() if op == dist.ReduceOp.AVG else found).view_as(output))

            stack.enter_context(mock.patch.object(dist, "reduce_scatter_single", scatter))
        if config.fault.name != NO_FAULT and kind == "zero_2":
            import deepspeed

            plain = deepspeed.comm.all_reduce

            def reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
                is_message = tensor.ndim == 1 and tensor.numel() > 8
                return tensor.copy_(loop().summed(tensor)) if is_message else plain(tensor, *args, **options)

            stack.enter_context(mock.patch.object(deepspeed.comm, "all_reduce", reduce))
        yield


def trained(rank: int, kind: str, path: Path, config: Config, preempt_at: int = 0) -> None:
    """Train, watched, with the fault that the configuration names. Args: preempt_at: step behind which the run ends,
    and goes on from its checkpoint; 0: none."""
    size, steps = config.mesh.world_size, config.train.steps
    kept: dict[str, Tensor] = {}
    made: list[Loop] = []

    def build() -> Session:
        made[:] = [KINDS[kind](config, rank, size)]
        return Session(config, made[0], SimpleNamespace(rank=rank, world_size=size), Loader(config, rank))

    def own_twice(site: Site) -> None:
        """A rank's own contribution is added to its shard of the sum."""
        site.on_contributions(lambda all: [(1 + (at == rank)) * each for at, each in enumerate(all)])

    def opened() -> Any:
        if config.fault.name != F01:  # which changes how our engine folds a sum
            return build_session(config, build)
        return spoiling(corpus()[F01], own_twice)(config, build)

    for begin, end in ((1, preempt_at), (preempt_at + 1, steps)) if preempt_at else ((1, steps),):
        with handles(rank, kind, config, lambda: made[0]), functions_given_back():
            session = opened()
            engine = session.engine
            if kept:
                state = engine.state()
                with torch.no_grad():
                    for key, tensor in state.tensors.items():
                        tensor.copy_(kept[key])
                state.adopt()
            run = watch(engine.wrapped, engine.watched, path, share=1.0, done=begin - 1)
            for step in range(begin, end + 1):
                session.begins(step)
                read = session.loader.batch(step)
                losses = [
                    engine.forward_backward(_tensors(each), last=at == len(read)) for at, each in enumerate(read, 1)
                ]
                with torch.no_grad():
                    engine.step(lr_at(config, step))
                fed = [torch.cat(parts) for parts in zip(*map(_tensors, read), strict=True)]
                run.step(loss=torch.stack(losses).mean(), data=fed)
                session.progress({"step": step})
            kept = {key: tensor.clone() for key, tensor in engine.state().tensors.items()} if end < steps else {}
            run.close("preempted" if end < steps else "")
        if size > 1:
            dist.barrier()


def _tensors(read: Any) -> Microbatch:
    return Microbatch(*(torch.from_numpy(each.copy()) for each in read))
