"""Saving and loading as people type it: right, or refused in one sentence that says what to type."""

from __future__ import annotations

import io
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from harness.fsdp import RanksDisagree, ShardedModel
from tests.fsdp.checked import RANKS, Mutant, each_holds, each_is_found, of_slips, patched, said
from tests.fsdp.pairs import WIDTH, Model, Pair, data, loss_of, shard


class Normed(Model):
    """With buffers that follow each rank's own data, one that is not saved, and tied weights."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(seed)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Telling(Normed):
    """Says more of itself than tensors, by a method and by hooks, and is checkpointed in part."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(seed)
        self.seen = 0
        self.blocks[1] = checkpoint_wrapper(self.blocks[1])
        self.register_state_dict_post_hook(lambda _, found, prefix, __: found.update({f"{prefix}note": torch.ones(1)}))
        self.register_load_state_dict_pre_hook(lambda _, given, prefix, *__: given.pop(f"{prefix}note"))
        self.register_load_state_dict_post_hook(lambda part, _: setattr(part, "loads", getattr(part, "loads", 0) + 1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Holder(nn.Module):
    """A module of the program's around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def trained(rank: int, strategy: str) -> ShardedModel:
    model, optimizer = shard(Pair(strategy, ""), Normed())
    loss_of(model, data(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


def whole(model: ShardedModel) -> dict[str, Tensor]:
    """By way of DTensors, which other tests hold against the weights themselves."""
    return {n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in model.state_dict().items()}


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
    """torch.save keeps a rank's rows, safetensors refuses them; whole tensors are saved as from one process."""
    model = trained(rank, strategy)
    right, told, place = whole(model), [], io.BytesIO()
    torch.save(model.state_dict(), place)
    place.seek(0)
    read = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in torch.load(place).items()}
    told += same(read, right, "torch.load")
    path = Path("/tmp") / f"saving-{dist.get_rank()}-{id(model)}.safetensors"
    told += said(
        lambda: save_file(model.state_dict(), path), RuntimeError, "" if strategy == "no_shard" else r"full_tensor\(\)"
    )
    once = {name: value for name, value in right.items() if name != "exit.weight"}  # safetensors has no ties
    save_file(once, path)
    other, _ = shard(Pair(strategy, ""), Normed(seed=8))
    other.load_state_dict(load_file(path))
    path.unlink()
    return told + same(whole(other), right, "safetensors")


def strictness(rank: int, strategy: str) -> list[str]:
    """Missing, unexpected and misshapen names, buffers too, are told as torch tells them."""
    model = trained(rank, strategy)
    right, told = whole(model), []
    wrong: dict[str, dict[str, Tensor]] = {
        'Missing key.*"norm.running_var"': {n: v for n, v in right.items() if n != "norm.running_var"},
        'Missing key.*"blocks.0.up.bias"': {n: v for n, v in right.items() if n != "blocks.0.up.bias"},
        'Unexpected key.*"nobody"': {**right, "nobody": torch.zeros(1)},
        "size mismatch for norm.running_mean": {**right, "norm.running_mean": torch.zeros(3)},
        "size mismatch for entry.weight": {**right, "entry.weight": torch.zeros(3)},
    }
    for says, given in wrong.items():
        told += said(lambda given=given: model.load_state_dict(given), RuntimeError, says)
    given = {name: value for name, value in right.items() if name != "norm.running_var"}
    found = model.load_state_dict(given | {"nobody": torch.zeros(1)}, strict=False)
    told += [] if found == (["norm.running_var"], ["nobody"]) else [str(found)]
    tied = {name: value for name, value in right.items() if name != "entry.weight"}
    told += [] if model.load_state_dict(tied) == ([], []) else ["one name of a tied weight"]
    return told + same(whole(model), right, "in the end")


def telling(rank: int, strategy: str) -> list[str]:
    """What modules say by methods and hooks is saved and loaded as torch does it, also by a module around the model."""
    (model, optimizer), plain = shard(Pair(strategy, ""), Telling()), Telling()
    loss_of(model, data(0, rank)).backward()
    optimizer.step()
    held, names = Holder(model).state_dict(), list(Holder(plain).state_dict())
    told = [] if list(held) == names else [f"a module around it saves {list(held)}"]
    saved, (other, _) = model.state_dict(), shard(Pair(strategy, ""), Telling(seed=8))
    told += [] if list(saved) == list(plain.state_dict()) else [f"it saves {list(saved)}"]
    result = other.load_state_dict(saved)
    told += [] if result == ([], []) and (other.module.seen, other.module.loads) == (1, 1) else [f"loaded: {result}"]
    told += same(dict(other.full_weights()), dict(model.full_weights()), "weights")
    around, _ = shard(Pair(strategy, ""), Telling(seed=9))
    told += [] if Holder(around).load_state_dict(held) == ([], []) else ["a module around it loads otherwise"]
    told += same(dict(around.full_weights()), dict(model.full_weights()), "weights of a module around it")
    return told + ([] if torch.equal(around.eval()(data(1, rank)), other.eval()(data(1, rank))) else ["a forward"])


class Aged(Normed):
    """Has ways of its own to save and to load, by names that are not those it saves."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return type(found)((name, value) for name, value in found.items() if "entry" not in name)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override] # as people write it
        return super().load_state_dict({name.removeprefix("module."): v for name, v in state_dict.items()}, strict)


def having_ones_own_ways(rank: int, strategy: str) -> list[str]:
    """What a module does in place of torch's saving and loading counts here too."""
    (model, _), plain = shard(Pair(strategy, ""), Aged()), Aged(seed=8)
    seen: list[Any] = []
    model.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    saved = model.state_dict()
    told = [] if list(saved) == list(plain.state_dict()) else [f"it saves {list(saved)}"]
    told += [] if seen == ["saved"] else [f"hooks hung on the model heard {seen}"]
    given = {f"module.{name}": value for name, value in nn.Module.state_dict(plain).items()}
    model.load_state_dict(given)
    return told + same(dict(model.full_weights()), {n: p.detach() for n, p in plain.named_parameters()}, "loaded")


def saving_beside(rank: int, strategy: str) -> list[str]:
    """torch's async_save copies what is saved, and weights may change before it is on disk."""
    model, told = trained(rank, strategy), list[str]()
    right, held = whole(model), model.state_dict()
    places: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(places)
    saving = dcp.async_save({"model": held}, checkpoint_id=places[0])
    for value in held.values():
        value.zero_()
    saving.result()
    other, _ = shard(Pair(strategy, ""), Normed(seed=8))
    loaded = other.state_dict()
    dcp.load({"model": loaded}, checkpoint_id=places[0])
    other.load_state_dict(loaded)
    told += same(whole(other), right, "async_save")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(places[0])
    return told


def loading_early(rank: int, strategy: str) -> list[str]:
    """A rank that is done with a forward loads weights while another one has yet to read the last unit's old ones."""
    module, plain = Normed(), Normed()
    module.blocks[1].register_forward_hook(lambda *_: time.sleep(0.2 * rank))
    model, _ = shard(Pair(strategy, ""), module)
    zeros = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    found = model.eval()(data(0, rank))
    model.load_state_dict(zeros)
    return [] if torch.allclose(found, plain.eval()(data(0, rank)), atol=1e-5) else ["a forward with loaded weights"]


def parted(rank: int, strategy: str) -> list[str]:
    """Arguments that are others on other ranks are told before anything is sharded."""
    other = "optim" if strategy != "optim" else "no_shard"
    says = rf"argument strategy is {strategy} on rank 0, {other} on rank 1"
    return said(lambda: shard(Pair((strategy, other)[rank], ""), Normed()), RanksDisagree, says)


def uneven(rank: int, strategy: str) -> list[str]:
    """Buffers of other shapes on other ranks are told at the start."""
    longer = Normed()
    longer.register_buffer("cache", torch.zeros(2 + rank))
    says = r"buffer cache is float32 \[2\] on rank 0, float32 \[3\] on rank 1"
    return said(lambda: shard(Pair(strategy, ""), longer), RanksDisagree, says)


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    check.__name__: check
    for check in (
        naming,
        buffering,
        typing,
        filing,
        strictness,
        telling,
        having_ones_own_ways,
        parted,
        uneven,
        saving_beside,
        loading_early,
    )
}


test_state_is_saved_and_loaded_or_refused = each_holds(__name__, CHECKS)


MUTANTS = of_slips(
    """
    own buffers: Buffers are saved as each rank has them
        fsdp.comm.communicator.Communicator.from_first: lambda self, value, purpose: value
        buffering
    pieces in a file: safetensors is given the memory of the rows that a rank has
        fsdp.ragged.RaggedTensor.untyped_storage: lambda self: self._local_tensor.untyped_storage()
        filing
    destinations: A module around the model saves nothing of it
        fsdp.FSDPModule.state_dict: lambda self, **_: was(self)
        telling / no_shard
    all names: A tied weight is missing where one of its names is
        fsdp.module._with_tied: lambda given, held: given
        strictness / no_shard
    one's own rows: async_save takes a shard for memory that it knows, and keeps what changes meanwhile
        fsdp.ragged.RaggedTensor.data_ptr: lambda self: self._local_tensor.data_ptr()
        saving_beside
    other arguments: Each rank shards as it is told, whatever others are told
        fsdp.build._check_same_request: lambda *_, **__: None
        parted
    """
) | {
    "extra state": Mutant(
        "What modules say by get_extra_state is not saved",
        patched(Telling, "get_extra_state", nn.Module.get_extra_state),
        "telling",
        "no_shard",
    ),
}


test_wrong_saving_is_found = each_is_found(__name__, MUTANTS, "The engine, by what programs save and load")
