"""What programs change about a module after it was sharded: right, or said at the next forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.utils.checkpoint import checkpoint

from harness.fsdp import fully_shard
from tests.fsdp.checked import each_holds, each_is_found, of_slips, said
from tests.fsdp.habits.world import Block, Habits, Net, Run, differing, run_of

CHECKS = Habits()
FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Adapted(Block):
    """A frozen layer, and a trained one beside it, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.adapter, self.out = nn.Linear(6, 6), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.tanh(x)) + self.adapter(x)
        return out


def reentrant(net: Any, x: Tensor) -> Tensor:
    for unit in (net.before, net.first, net.second):
        x = checkpoint(unit, x, use_reentrant=True)
    return x


def adapted() -> Net:
    return Net((Adapted, Block), reentrant, before=lambda: nn.Linear(6, 6), first=Adapted, second=Adapted)


def trained(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in module.parameters() if param.requires_grad], lr=0.2)


@CHECKS.right(adapted, optimize=trained)
def adapting_in_reentrant_checkpoints(run: Run) -> None:
    """A unit's trained gradients have all come while its frozen weights are needed for its inputs' gradient."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x.requires_grad_()).square().mean()
        return out

    run.train(3, loss)


def blocks(model: nn.Module) -> None:
    apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))


def layers(model: nn.Module) -> None:
    apply_activation_checkpointing(model, check_fn=lambda part: type(part) is nn.Linear)


def one_block(model: Any) -> None:
    model.first = checkpoint_wrapper(model.first)


@CHECKS.check
def checkpointing_after_sharding(rank: int, strategy: str) -> list[str]:
    """As under FSDP2: training and state are those of a model that was not wrapped."""
    found = []
    for wrap in (blocks, layers, one_block):
        plain, run = Net(), run_of(Net, rank, strategy)
        alone = Run(plain, plain, torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9), (0, 1))
        wrap(run.model)
        for each in (alone, run):
            each.train(2)
        told = differing(run.model, plain)
        saved = run.model.state_dict()
        told += [f"state_dict has {[*saved]}"] if saved.keys() != plain.state_dict().keys() else []
        kept = {name: value.clone() for name, value in plain.state_dict().items()}
        alone.train(1)
        run.model.load_state_dict(plain.state_dict())
        told += [f"{each} after load_state_dict" for each in differing(run.model, plain)]
        set_model_state_dict(run.model, {**kept} if rank == 0 else {}, options=FULL)
        now = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True))
        told += [
            f"{name} differs after set_model_state_dict" for name in kept if not torch.allclose(now[name], kept[name])
        ]
        found += [f"{wrap.__name__}: {each}" for each in told]
    return found


def tie(model: Any) -> None:
    model.second.out.weight = model.first.linear.weight


def share(model: Any) -> None:
    model.second.out = model.first.linear


def swap(model: Any) -> None:
    model.first, model.second = model.second, model.first


def replace(model: Any) -> None:
    model.first = Block()


def nest(model: Any) -> None:
    model.first = nn.Sequential(model.first)


@CHECKS.check
def rearranging(rank: int, strategy: str) -> list[str]:
    """Said at the next forward, not by the first `state_dict()` hours later."""
    found = []
    for change, *parts in (
        (share, "first.linear.weight is called second.out.weight"),
        (swap, "second.linear.weight is called first.linear.weight"),
        (replace, "first.linear.weight was added or replaced after sharding"),
        (nest, "first.linear.weight is called first.0.linear.weight"),
    ):
        run = run_of(Net, rank, strategy)
        run.train(1)
        change(run.model)
        found += [f"{change.__name__}: {each}" for each in said(partial(run.model, run.data(0)), RuntimeError, *parts)]
    return found


@CHECKS.check
def tying_after_sharding(rank: int, strategy: str) -> list[str]:
    run = run_of(Net, rank, strategy)
    tie(run.model)
    told = "first.linear.weight is called second.out.weight since it was sharded.*: tie,"
    return said(partial(run.model, run.data(0)), RuntimeError, told)


@CHECKS.check
def buffers_on_meta(rank: int, strategy: str) -> list[str]:
    """`initial_value` gives parameters, and buffers would stay on meta until a forward fails in torch."""
    with torch.device("meta"):
        module = Net(mask=lambda: nn.Buffer(torch.ones(6)))

    def initial(name: str, shape: torch.Size) -> Tensor:
        return torch.zeros(shape)

    cpu = torch.device("cpu")
    shard = partial(fully_shard, module, strategy=strategy, device=cpu, initial_value=initial)
    found = said(shard, ValueError, "buffer mask is on the meta device.*register_buffer")
    module.mask = torch.ones(6)
    model = shard()
    model(torch.ones(2, 6))
    return found


test_it_is_right_or_said_at_once = each_holds(__name__, CHECKS)


MUTANTS = of_slips(
    """
    frozen weights of a recomputation: Frozen weights go when trained gradients of a recomputed unit have come
        fsdp.runtime.hooks.Hooks._watch_recomputed: lambda *_, **__: None
        adapting_in_reentrant_checkpoints
    wrapped later: Names that checkpoint_wrapper changes are names of other parameters
        fsdp.storage.parameter_access.CHECKPOINTED: "?"
        checkpointing_after_sharding
    tied later: A weight tied after sharding is used as it lies
        fsdp.storage.parameter_access._contents: held, list(map( => [], list(map(
        tying_after_sharding / optim
    swapped later: Blocks that were swapped train until their state is saved
        fsdp.storage.parameter_access.Whereabouts.check: lambda *_, **__: None
        rearranging
    """
)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by habits of programs")
