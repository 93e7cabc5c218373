"""Programs about this rank's rows, and about what is no `RaggedTensor` beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from harness.fsdp import fully_shard_model
from tests.fsdp.local_step.programs import adamw, over
from tests.fsdp.local_step.world import WIDE, WORLD, Program, World, data
from tests.support.mutants import slips

OF_ROWS: dict[str, Program] = {}
unbound = over(lambda model: adamw(model.parameters()), among=OF_ROWS, binds=False)


@unbound
def edited_by_rows(world: World, model: Any, optimizer: Any) -> None:
    """This rank's rows, of a parameter and of views of it, between two evaluations."""
    views: list[Callable[[Any], Any]] = [lambda p: p, lambda p: p.data, lambda p: p.detach().view(p.shape)]
    for view in views:
        world.loop(model, optimizer, 1)
        with torch.no_grad():
            world.extras.append(model(data(7, 7)))
            for param in model.parameters():
                held = view(param)
                (held.to_local() if isinstance(held, DTensor) else held).mul_(0.9)
            world.extras.append(model(data(7, 7)))


@unbound
def loaded_whole(world: World, model: Any, optimizer: Any) -> None:
    """The whole state of an optimizer, as torch's DTensors in another that nobody hands over."""
    options = StateDictOptions(full_state_dict=True)
    world.loop(model, optimizer, 2)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other = adamw(model.parameters())
    set_optimizer_state_dict(model, other, state, options=options)
    world.loop(model, other, 2)


def rows_without_elements(world: World) -> None:
    """A matrix of three, of the rarest words."""
    torch.manual_seed(0)
    model: Any = nn.AdaptiveLogSoftmaxWithLoss(5, 9, [3, 6]).double()
    if world.rank is not None:
        model = fully_shard_model(model, zero_dp_strategy=world.stage, mixed_precision_policy=WIDE)
    world.models.append(model)
    optimizer = world.bind(adamw(model.parameters()))
    for step in range(2):
        ranks = range(WORLD) if world.rank is None else [world.rank]
        torch.stack([model(data(step, rank), torch.arange(6)).loss for rank in ranks]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


OF_ROWS["rows_without_elements"] = rows_without_elements
SLIPS = slips(
    """
    edits of views uncounted: Edits of the rows of a view are not counted
        fsdp.ragged.tensor.RaggedTensor._rows: local if local is base else => local if True else
        edited by rows
    loaded state stays: torch's DTensors that meet sharded ones are copies
        fsdp.ragged.operations._elementwise: if in_place and isinstance(args[0], DTensor):
            => if in_place and isinstance(args[0], RaggedTensor):
        loaded whole
    rows without shape: A tensor without elements has no rows
        fsdp.ragged.tensor.RaggedTensor.whole: return rows.reshape(self.shape) => return rows
        rows without elements
    """
)
