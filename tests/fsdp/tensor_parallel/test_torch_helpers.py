"""torch's own state-dict helpers, and gradients that a program keeps, under tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map_only

from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.tensor_parallel.models import Shape, loss_of
from tests.fsdp.tensor_parallel.test_state import differing, stepped
from tests.fsdp.tensor_parallel.training import Case, mesh_of, rows_of, sharded, whole_of
from tests.support.spawn import run_ranks

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
WAYS = {
    "sharded": (StateDictOptions(), StateDictOptions()),
    "full": (FULL, FULL),
    "full, of rank 0": (ON_RANK_0, FROM_RANK_0),
}
"""Options to get and to set with."""


def once_more(case: Case, model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Weights after a further step."""
    mesh = mesh_of(case)
    loss_of(model, rows_of(case, 5, 0, mesh.get_local_rank("inner"))).backward()
    optimizer.step()
    optimizer.zero_grad()
    return dict(model.full_weights())


def helped(rank: int, case: Case) -> dict[str, list[str]]:
    """What a model that gets another one's state has after a step that the other one has not."""
    found = {}
    model, optimizer = stepped(case)
    saved = {}
    for way, (options, _) in WAYS.items():
        state = (
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        )
        saved[way] = tree_map_only(Tensor, torch.clone, state)
    wanted = once_more(case, model, optimizer)
    model.close()
    for way, (_, options) in WAYS.items():
        model, optimizer = sharded(case, mesh_of(case))
        set_model_state_dict(model, saved[way][0], options=options)
        set_optimizer_state_dict(model, optimizer, saved[way][1], options=options)
        found[way] = differing(once_more(case, model, optimizer), wanted)
        model.close()
    return found


def kept(rank: int, case: Case) -> list[str]:
    """Gradients, and views of them, that others than their program's have come after."""
    mesh = mesh_of(case)
    model, optimizer = stepped(case)
    found = []
    for views in (False, True):
        loss_of(model, rows_of(case, 3, 0, mesh.get_local_rank("inner"))).backward()
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        grads = {name: grad.detach() if views else grad for name, grad in named}
        del named
        before = {name: whole_of(grad).clone() for name, grad in grads.items()}
        optimizer.zero_grad()
        loss_of(model, rows_of(case, 4, 0, mesh.get_local_rank("inner"))).backward()
        found += [name for name, grad in grads.items() if not torch.equal(whole_of(grad), before[name])]
        optimizer.zero_grad()
    model.close()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_helpers_of_torch_move_state(strategy: str) -> None:
    for found in run_ranks(helped, 4, Case(2, 2, strategy=strategy, shape=Shape(layers=1))):
        assert found == {way: [] for way in WAYS}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_kept_stay(strategy: str) -> None:
    assert run_ranks(kept, 4, Case(2, 2, strategy=strategy, shape=Shape(layers=1))) == [[]] * 4
