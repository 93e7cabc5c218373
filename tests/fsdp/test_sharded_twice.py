"""No other engine reduces what a sharded model does: it is refused, or leaves the model alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.fsdp import ShardedModel, fully_shard_model
from tests.fsdp.checked import each_holds, each_is_found, of_slips, said
from tests.fsdp.pairs import Block, Model, close, data, loss_of, plain_gradients


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child, self.scale = child, nn.Parameter(torch.ones(1))

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


def around(rank: int, strategy: str) -> list[str]:
    """DDP around a sharded model is refused at once, and it trains as if nobody had tried; so is a second sharding."""
    model = sharded(strategy)
    told = said(lambda: DistributedDataParallel(model), ValueError, "^DistributedDataParallel around", "Leave .* out")
    told += said(lambda: sharded(strategy, model), ValueError, "is sharded already")
    told += said(lambda: sharded(strategy, Parent(model)), ValueError, "is sharded already")
    loss_of(model, data(0, rank)).backward()
    right = plain_gradients([data(0, other) for other in range(dist.get_world_size())], 1 / dist.get_world_size())
    return told + close(dict(model.full_gradients()), right)


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


def beside(rank: int, strategy: str) -> list[str]:
    """What is no second engine around the model: saving, checkpointing, and one that does not hold it."""
    teacher = sharded(strategy)
    get_model_state_dict(teacher)
    checkpoint(teacher.module.blocks[0])
    student = Parent(Model())
    student.child.register_forward_hook(lambda _, args, out: out + 0 * teacher(*args))
    loss_of(DistributedDataParallel(student), data(0, rank)).backward()
    FSDP1(Model())
    return []


CHECKS = {each.__name__: each for each in (around, inside, beside)}
MUTANTS = of_slips(
    """
    DDP is not known: DistributedDataParallel is built around a sharded model, which is then reduced twice
        fsdp.module.IGNORED_BY_DDP: ""
        around / no_shard
    replicate is not seen: What replicate manages is sharded once more
        fsdp.preconditions.OTHER_ENGINES: ("torch.nn.parallel", "torch.distributed.fsdp")
        inside
    what FSDP manages is not seen: The module inside an FSDP is sharded once more
        fsdp.preconditions.MANAGED: "nothing"
        inside
    """
)


test_a_model_is_sharded_once = each_holds(__name__, CHECKS)


test_a_second_engine_that_is_not_refused_is_found = each_is_found(__name__, MUTANTS, "Sharded twice")
