"""DTensors handed out by the engine, right or refused; weights taken back whole, as DTensors, from other layouts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.fsdp import state as states
from harness.fsdp.ragged import RaggedTensor
from harness.fsdp.ragged.tensor import local_of
from tests.fsdp.pairs import PAIRS, Model, Pair, by_pair, data, loss_of, same, shard
from tests.support.mutants import each
from tests.support.spawn import run_ranks

WORLD = 4


def whole(value: Tensor) -> Tensor:
    """All of it; plain where nothing is cut."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def handed_out(rank: int, pair: Pair) -> list[str]:
    """What is wrong with a trained model's DTensors."""
    model, optimizer = shard(pair)
    loss_of(model, data(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    told = []
    right, held = dict(model.full_weights()), model.state_dict()
    right["exit.weight"] = right["entry.weight"]  # torch has tied weights under each of their names
    told += same({name: whole(value) for name, value in held.items()}, right)
    told += [name for name, value in held.items() if value.shape != right[name].shape]
    state = model.sharded_state().tensors
    keys: list[Any] = [None] * WORLD
    dist.all_gather_object(keys, sorted(state))
    if any(each != keys[0] for each in keys):
        return ["ranks have other keys"]
    moments = {key: whole(value) for key, value in state.items() if key.endswith("/exp_avg")}
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, {key: value.double().sum().item() for key, value in moments.items()})
    told += ["moments differ between ranks"] if any(each != everyone[0] for each in everyone) else []
    told += ["no moment is there"] if not moments or not any(everyone[0].values()) else []
    model.close()
    return told


def taken_back(rank: int, pair: Pair) -> list[str]:
    """Weights of another seed, given whole, as DTensors, and with faults."""
    model, _ = shard(pair)
    other, _ = shard(pair, Model(seed=8))
    whole = dict(other.full_weights())
    told = []
    for given in (whole, other.state_dict()):
        model.load_state_dict(dict(shard_of(model)))  # what it has: nothing changes
        model.load_state_dict(given)
        told += same(dict(model.full_weights()), whole)
        x = data(0, rank)
        told += [] if torch.equal(model(x), other(x)) else ["the next forward is another one"]
    before = dict(model.full_weights())
    first = next(iter(whole))
    wrong: dict[str, tuple[dict[str, Tensor], str]] = {
        "missing": ({name: value for name, value in whole.items() if name != first}, f"missing {first}"),
        "unexpected": ({**whole, "nobody": torch.zeros(2)}, "unexpected nobody"),
        "shape": ({**whole, first: torch.zeros(3)}, f"{first} is [3]"),
    }
    for what, (given, says) in wrong.items():
        try:
            model.load_state_dict(given)
            told.append(f"{what}: loaded")
        except ValueError as error:
            told += [] if says in str(error) and "nothing was loaded" in str(error) else [str(error)]
    told += same(dict(model.full_weights()), before)
    relaxed = model.load_state_dict({**wrong["missing"][0], "nobody": torch.zeros(2)}, strict=False)
    told += [] if relaxed == ([first, "exit.weight"], ["nobody"]) else [str(relaxed)]
    try:
        model.load_state_dict(whole, assign=True)
        told.append("assign was taken")
    except ValueError:
        pass
    model.close()
    other.close()
    return told


def _as_torch_cuts(self: RaggedTensor, **_: Any) -> Tensor:
    """What `Shard(0)` promises: even chunks in rank order."""
    group = self.device_mesh.get_group(self.device_mesh.ndim - 1)
    size, place = dist.get_world_size(group), dist.get_rank(group)
    even = torch.zeros(self.shape, dtype=self.dtype).chunk(size)
    found = [torch.zeros_like(each) for each in even] + [even[0][:0]] * (size - len(even))
    mine, rows = found[place], min(len(found[place]), len(self._local_tensor)) if self.shape else 0
    mine[:rows] = self._local_tensor[:rows]
    whole = torch.cat(found)
    dist.all_reduce(whole, group=group)
    return whole.reshape(self.shape)


_add = states.add_optimizers


def _only_what_lies_here(found: states.ShardedState, *args: Any) -> None:
    _add(found, *args)
    moments = [key for key, value in found.tensors.items() if key.startswith(states.OPTIMIZER) and value.dim()]
    for key in moments:
        if not local_of(found.tensors[key]).numel():
            del found.tensors[key]


MUTANTS = {
    "as torch cuts": (
        "A whole tensor is put together as torch's placement says", RaggedTensor, "full_tensor", _as_torch_cuts
    ),
    "what lies here alone": (
        "Parameters of which a rank holds no row have no key there", states, "add_optimizers", _only_what_lies_here
    ),
}  # fmt: skip


def mistaken(rank: int, name: str) -> list[str]:
    with mock.patch.object(*MUTANTS[name][1:]):
        return handed_out(rank, Pair("optim_grads_params", "optim"))


@pytest.mark.parametrize("name", each("The engine, by saved state", ((n, m[0]) for n, m in MUTANTS.items())))
def test_a_mutant_is_found(name: str) -> None:
    assert all(run_ranks(mistaken, WORLD, name))


def shard_of(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


every_pair = pytest.mark.parametrize("pair", PAIRS, ids=str)


@every_pair
def test_every_dtensor_gathers_rightly(pair: Pair) -> None:
    assert by_pair(handed_out)[pair] == [[]] * WORLD


@every_pair
def test_weights_are_taken_whole_or_as_dtensors_or_refused(pair: Pair) -> None:
    assert by_pair(taken_back)[pair] == [[]] * WORLD
