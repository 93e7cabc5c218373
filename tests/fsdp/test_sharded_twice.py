"""No other engine around a sharded model, and none inside it: said where either is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.fsdp import ShardedModel, fully_shard_model, preconditions, sharding
from harness.fsdp.guards import sharded_twice
from harness.fsdp.runtime import forward_hooks
from tests.fsdp.checked import Mutant, holds, is_found, patched, said
from tests.fsdp.pairs import STRATEGIES, Block, Model, data, loss_of
from tests.support.mutants import each


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child, self.scale = child, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return self.child(x * self.scale)


FSDP1 = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
ENGINES: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": FSDP1,
    "fully_shard": fully_shard,
    "replicate": replicate,
    "replicate of FSDP2": replicate_with_fsdp,
}


def sharded(strategy: str, module: nn.Module | None = None) -> ShardedModel:
    return fully_shard_model(module or Model(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)


def places(model: ShardedModel) -> Iterator[tuple[str, nn.Module]]:
    yield "the model", model
    yield "a part", model.module.blocks[0]
    yield "a parent of a part", Parent(model.module.blocks[1])
    yield "a parent of the model", Parent(model)


def around(rank: int, strategy: str) -> list[str]:
    """Every engine around a sharded model, its module, a part of it, and a parent of each, is refused at once."""
    told = []
    for name, build in ENGINES.items():
        engine, model = name.split()[0], sharded(strategy)
        wrong = [f"{name} around {each}" for each in _around(engine, build, model)]
        if not wrong:
            loss_of(model, data(0, rank)).backward()  # it trains as if nobody had tried
            model.finish_grad_sync()
        told += wrong
    return told


def _around(engine: str, build: Callable[[nn.Module], Any], model: ShardedModel) -> Iterator[str]:
    for place, module in places(model):
        wrong = said(partial(build, module), ValueError, f"^{engine} around", f"Leave {engine} out", "outermost module")
        yield from (f"{place}: {each}" for each in wrong)


def inside(_: int, strategy: str) -> list[str]:
    """What another engine has wrapped, or manages, is not sharded."""
    told = []
    for name, build in ENGINES.items():
        wrapped = build(Model())
        inner = [wrapped.module] if name == "FullyShardedDataParallel" else []
        for module in (wrapped, Parent(wrapped), *inner):
            wrong = said(partial(sharded, strategy, module), ValueError, "another data-parallel engine", "plain module")
            told += [f"{name}: {each}" for each in wrong]
    return told


def late(rank: int, strategy: str) -> list[str]:
    """A module that DistributedDataParallel wraps, and that is sharded then: said in the first forward."""
    module = Model()
    outer = DistributedDataParallel(module)
    model = sharded(strategy, module)
    told = said(lambda: loss_of(outer, data(0, rank)), ValueError, "Leave DistributedDataParallel out")
    with torch.no_grad():
        loss_of(outer, data(0, rank))  # nothing is reduced
    loss_of(model, data(0, rank)).backward()
    return told


def beside(rank: int, strategy: str) -> list[str]:
    """What is no second engine around the model: saving, checkpointing, and an engine that does not hold the model."""
    teacher = sharded(strategy)
    get_model_state_dict(teacher)
    checkpoint(teacher.module.blocks[0])
    student = Parent(Model())
    student.child.register_forward_hook(lambda _, args, out: out + 0 * teacher(*args))
    loss_of(DistributedDataParallel(student), data(0, rank)).backward()
    FSDP1(Model())
    teacher.close()
    told = [name for name, _ in teacher.named_modules()] == [name for name, _ in Model().named_modules()]
    return [] if told else ["named_modules() after close()"]


CHECKS = {each.__name__: each for each in (around, inside, late, beside)}
_METHOD = sharded_twice._named_modules


def _asking_always(reference: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    if engine():
        sharded_twice._refuse("named_modules")
    return _METHOD(reference, engine, *args, **kwargs)


MUTANTS = {
    "parts do not answer": Mutant(
        "DistributedDataParallel, FSDP and replicate are built around a sharded model",
        patched(sharding, "answer_other_engines", lambda *_: None),
        "around",
        "no_shard",
    ),
    "DDP is not known": Mutant(
        "DistributedDataParallel is built around a sharded model, which is then reduced twice",
        lambda: mock.patch.dict(sharded_twice._ENGINES, {("torch.nn.parallel.distributed", "__init__"): ""}),
        "around",
        "optim",
    ),
    "composable APIs are not known": Mutant(
        "FSDP2 and replicate are applied to a sharded model",
        patched(sharded_twice, "_CONTRACT", ("", "")),
        "around",
        "no_shard",
    ),
    "replicate is not seen": Mutant(
        "What replicate manages is sharded once more",
        patched(preconditions, "OTHER_ENGINES", ("torch.nn.parallel", "torch.distributed.fsdp")),
        "inside",
    ),
    "what FSDP manages is not seen": Mutant(
        "The module inside an FSDP is sharded once more", patched(preconditions, "MANAGED", "nothing"), "inside"
    ),
    "nothing is said in the forward": Mutant(
        "A module is wrapped by DistributedDataParallel and sharded then, and trains wrong",
        patched(forward_hooks, "refuse_ddp_around", lambda _: None),
        "late",
        "no_shard",
    ),
    "whoever asks is refused": Mutant(
        "A sharded model's modules can be listed by nobody",
        patched(sharded_twice, "_named_modules", _asking_always),
        "beside",
    ),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_is_sharded_once(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


@pytest.mark.parametrize("name", each("Sharded twice", [(name, mutant.breaks) for name, mutant in MUTANTS.items()]))
def test_a_second_engine_that_is_not_refused_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
