"""Saving and loading as people type it: right, or refused in one sentence that says what to type."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from harness.fsdp import ShardedModel
from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.state import access
from harness.fsdp.state.row_shard import RowShard
from tests.fsdp.checked import RANKS, Mutant, holds, is_found
from tests.fsdp.pairs import STRATEGIES, WIDTH, Model, Pair, data, loss_of, shard
from tests.support.mutants import each

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Normed(Model):
    """With buffers that follow each rank's own data, one that is not saved, and tied weights."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(seed)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def trained(rank: int, strategy: str) -> ShardedModel:
    model, optimizer = shard(Pair(strategy, ""), Normed())
    loss_of(model, data(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


def whole(model: ShardedModel) -> dict[str, Tensor]:
    """By way of DTensors, which other tests hold against the weights themselves."""
    return {n: v.full_tensor() if isinstance(v, RowShard) else v for n, v in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor], what: str) -> list[str]:
    if list(a) != list(b):
        return [f"{what}: names {list(a)}"]
    return [f"{what}: {name}" for name in a if not torch.equal(a[name], b[name])]


def naming(rank: int, strategy: str) -> list[str]:
    """The names torch gives, tied ones twice; the first ones are those of named_parameters and full_weights."""
    model, plain = trained(rank, strategy), Normed()
    told = [] if list(model.state_dict()) == list(plain.state_dict()) else [str(list(model.state_dict()))]
    first = [name for name, _ in plain.named_parameters()]
    told += [] if [name for name, _ in model.full_weights()] == first else ["full_weights"]
    return told + ([] if [name for name, _ in model.named_parameters()] == first else ["named_parameters"])


def buffering(rank: int, strategy: str) -> list[str]:
    """Buffers are the first rank's, at the start and in what is saved; each rank goes on with its own."""
    module = Normed()
    module.norm.running_mean.fill_(float(rank))
    model, _ = shard(Pair(strategy, ""), module)
    told = [] if not module.norm.running_mean.any() else ["not those of rank 0 at the start"]
    model(data(0, rank))
    mine = module.norm.running_mean.clone()
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, mine)
    saved = model.state_dict()["norm.running_mean"]
    told += [] if torch.equal(saved, everyone[0]) and not torch.equal(*everyone) else ["not those of rank 0"]
    return told + ([] if torch.equal(module.norm.running_mean, mine) else ["saving has changed them"])


def typing(rank: int, strategy: str) -> list[str]:
    """torch's helpers give what one process saves; it is taken back by them, by load_state_dict, and by the module."""
    model = trained(rank, strategy)
    right, told = whole(model), []
    for options in (FULL, StateDictOptions(full_state_dict=True)):
        found = get_model_state_dict(model, options=options)
        if options.cpu_offload and rank and strategy:  # torch hands these to rank 0 alone
            told += [] if not found or found.keys() == right.keys() else [f"rank {rank}: {list(found)}"]
            continue
        told += same(found, right, "get_model_state_dict")
        Normed(seed=8).load_state_dict(found)
    loads: dict[str, Callable[[ShardedModel], Any]] = {
        "load_state_dict": lambda m: m.load_state_dict(right),
        "by keyword": lambda m: m.load_state_dict(state_dict=right, strict=True),
        "of DTensors": lambda m: m.load_state_dict(model.state_dict()),
        "set": lambda m: set_model_state_dict(m, dict(right)),
        "set full": lambda m: set_model_state_dict(m, dict(right), options=FULL),
        "set from rank 0": lambda m: set_model_state_dict(
            m,
            dict(right) if rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ),
    }
    for name, load in loads.items():
        other, _ = shard(Pair(strategy, ""), Normed(seed=8))
        result = load(other)
        told += [] if result == ([], []) else [f"{name} returns {result}"]
        told += same(whole(other), right, name)
        told += [] if torch.equal(other.eval()(data(1, rank)), _plain(right)(data(1, rank))) else [f"{name}: forward"]
    return told


def _plain(weights: dict[str, Tensor]) -> nn.Module:
    module = Normed()
    module.load_state_dict(weights)
    return module.eval()


def filing(rank: int, strategy: str) -> list[str]:
    """Files of pieces are refused; whole tensors are saved and loaded as from one process."""
    model = trained(rank, strategy)
    right, told, place = whole(model), [], io.BytesIO()
    try:
        torch.save(model.state_dict(), place)
        place.seek(0)
        told += same(torch.load(place), right, "torch.load") if strategy == "no_shard" else ["pieces are saved"]
    except RuntimeError as error:
        told += [] if strategy != "no_shard" and "full_tensor()" in str(error) else [str(error)]
    path = Path("/tmp") / f"saving-{dist.get_rank()}-{id(model)}.safetensors"
    try:
        save_file(model.state_dict(), path)
        told.append("safetensors of DTensors")
    except RuntimeError as error:
        told += [] if "full_tensor()" in str(error) else [str(error)]
    once = {name: value for name, value in right.items() if name != "exit.weight"}  # safetensors has no ties
    save_file(once, path)
    other, _ = shard(Pair(strategy, ""), Normed(seed=8))
    other.load_state_dict(load_file(path))
    path.unlink()
    return told + same(whole(other), right, "safetensors")


def strictness(rank: int, strategy: str) -> list[str]:
    """Missing, unexpected and misshapen names, buffers too, are told, and nothing is loaded."""
    model = trained(rank, strategy)
    right, told = whole(model), []
    wrong: dict[str, dict[str, Tensor]] = {
        "missing norm.running_var": {n: v for n, v in right.items() if n != "norm.running_var"},
        "missing blocks.0.up.bias": {n: v for n, v in right.items() if n != "blocks.0.up.bias"},
        "unexpected nobody": {**right, "nobody": torch.zeros(1)},
        "norm.running_mean is [3]": {**right, "norm.running_mean": torch.zeros(3)},
        "entry.weight is [3]": {**right, "entry.weight": torch.zeros(3)},
    }
    for says, given in wrong.items():
        shifted = {name: value + 1 for name, value in given.items()}
        for kind in (ValueError, RuntimeError):
            try:
                model.load_state_dict(shifted)
                told.append(f"{says}: loaded")
            except kind as error:
                told += [] if says in str(error) and "nothing was loaded" in str(error) else [str(error)]
    told += same(whole(model), right, "after what was refused")
    found = model.load_state_dict(wrong["missing norm.running_var"] | {"nobody": torch.zeros(1)}, strict=False)
    told += [] if found == (["norm.running_var"], ["nobody"]) else [str(found)]
    tied = {name: value for name, value in right.items() if name != "entry.weight"}
    told += [] if model.load_state_dict(tied) == ([], []) else ["one name of a tied weight"]
    return told + same(whole(model), right, "in the end")


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    check.__name__: check for check in (naming, buffering, typing, filing, strictness)
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_is_saved_and_loaded_or_refused(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


_saved_tensors = access.saved_tensors

MUTANTS = {
    "own buffers": Mutant(
        "Buffers are saved as each rank has them",
        lambda: mock.patch.object(Communicator, "from_first", lambda self, value, purpose: value),
        "buffering",
    ),
    "names once": Mutant(
        "A tied weight is saved under its first name alone",
        lambda: mock.patch.object(
            access,
            "saved_tensors",
            lambda module: {id(t): (n, t) for n, t in reversed([*_saved_tensors(module)])}.values(),
        ),
        "naming",
    ),
    "pieces in a file": Mutant(
        "torch.save writes the rows that a rank has",
        lambda: mock.patch.object(RowShard, "_whole", lambda self, what: self._local_tensor),
        "filing",
    ),
    "missing is missed": Mutant(
        "A name that is missing is not told",
        lambda: mock.patch.object(access, "check_fit"),
        "strictness",
    ),
}


@pytest.mark.parametrize(
    "name", each("The engine, by what programs save and load", [(name, m.breaks) for name, m in MUTANTS.items()])
)
def test_wrong_saving_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
