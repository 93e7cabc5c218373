"""A sharded model is its module, under the module's names, and is gone when nobody has it any more."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp import FSDPModule, ShardedModel, fully_shard, fully_shard_model
from tests.fsdp.checked import each_holds, each_is_found, of_slips, said
from tests.fsdp.pairs import WIDTH, Block, Model, Pair, data, loss_of, shard


class Configured(Model):
    """With what models of libraries have beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"use_cache": True}
        self.scale = 1.0
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def num_blocks(self) -> int:
        return len(self.blocks)


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def watched(model: ShardedModel) -> list[weakref.ref[Any]]:
    tensors = [t for bucket in model.engine.buckets for t in (bucket.compute, *bucket.main_shards, *bucket.grad_shards)]
    hooks = model.engine.hooks
    return [weakref.ref(each) for each in (model, hooks, *tensors)]


def alive(seen: list[weakref.ref[Any]]) -> int:
    """How many there still are."""
    return sum(each() is not None for each in seen)


def deleting(rank: int, strategy: str) -> list[str]:
    """Everything is freed with the last reference, outputs and threads that look on notwithstanding."""
    told = []
    for more in ({}, {"watchdog_timeout_s": 60.0}, {"double_buffer": True}):
        with no_collector():
            model = fully_shard_model(Model(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy, **more)
            loss = loss_of(model, data(0, rank))
            loss.backward()
            other = loss_of(model, data(0, rank))  # a graph that nobody has differentiated
            model.zero_grad()
            seen = watched(model)
            del model
            told += [f"{more}: {alive(seen)} of {len(seen)} are kept"] if alive(seen) else []
        del loss, other
    model, optimizer = shard(Pair(strategy, ""))
    loss_of(model, data(0, rank)).backward()
    optimizer.step()
    seen = watched(model)
    del model, optimizer
    gc.collect()
    told += [f"with an optimizer {alive(seen)} of {len(seen)} are kept"] if alive(seen) else []
    deadline = time.monotonic() + 10
    while any("watchdog" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return told + [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]


def keeping(rank: int, strategy: str) -> list[str]:
    """A part of a model that is gone says so."""
    model = fully_shard_model(Model(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    block = model.blocks[0]
    del model
    gc.collect()
    return said(lambda: block(data(0, rank)), RuntimeError, "is gone")


def naming(rank: int, strategy: str) -> list[str]:
    """One set of names, attributes that reach the module, and what `to` may do."""
    module, plain, told = Configured(), Configured(), []
    module.blocks[0].register_forward_hook(lambda *_: None)
    model = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    told += [] if model is module is model.module and isinstance(model, Configured | FSDPModule) else ["what it is"]
    told += [] if str(inspect.signature(model.forward)) == str(inspect.signature(plain.forward)) else ["forward"]
    told += [] if len(vars(model)) - len(vars(plain)) == 2 else [f"it has {vars(model).keys() - vars(plain).keys()}"]
    for what in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        mine, right = ([name for name, _ in getattr(each, what)()] for each in (model, plain))
        told += [] if mine == right else [f"{what}: {mine}"]
    own = [[name for name, _ in each.named_parameters(recurse=False)] for each in (model, plain)]
    told += [] if own == [["gain"]] * 2 else [f"its own: {own[0]}"]
    twice = [[name for name, _ in each.named_parameters(remove_duplicate=False)] for each in (model, plain)]
    told += [] if twice[0] == twice[1] else ["tied names"]
    told += [] if model.num_blocks() == 3 and not hasattr(model, "nothing") else ["what the module has"]
    told += _moving(model)
    files = [partial(torch.save, part, io.BytesIO()) for part in (module.blocks[0], model)]
    for copies in (partial(copy.deepcopy, module.blocks[0]), *files):
        told += said(copies, TypeError, "cannot be copied")
    return told


def _moving(model: ShardedModel) -> list[str]:
    same = [model.to("cpu"), model.to("cpu:0"), model.to(torch.float32), model.float(), model.cpu()]
    told = [] if all(each is model for each in same) else ["to() gives another"]
    for change in (
        model.double,
        model.bfloat16,
        lambda: model.to("cpu:0", torch.float64),
        lambda: model.to("meta"),
    ):
        told += said(change, NotImplementedError, "cannot be cast or moved")
    return told


class Named(Model):
    """With a submodule and an attribute that a sharded model has too, and gives way with."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = nn.Linear(WIDTH, WIDTH)
        self.module = "mean"

    def forward(self, x: Tensor) -> Tensor:
        return self.engine(super().forward(x)) if self.module == "mean" else x


class Crowded(Model):
    """With a method and a submodule that the engine's would hide."""

    def __init__(self) -> None:
        super().__init__()
        self.unsharded = nn.Linear(WIDTH, WIDTH)

    def sync(self) -> int:
        return 3


def crowding(rank: int, strategy: str) -> list[str]:
    """A module that a method of the engine would take something from is refused; what gives way does."""
    words = "Crowded and a sharded model both have sync, unsharded"
    told = said(lambda: fully_shard(Crowded(), unit_modules=[Block], strategy=strategy), ValueError, words)
    model, plain = fully_shard(Named(), unit_modules=[Block], strategy=strategy), Named()
    plain.load_state_dict(dict(model.full_weights()), strict=False)
    told += [] if torch.allclose(model(data(0, rank)), plain(data(0, rank)), atol=1e-6) else ["another output"]
    return told + ([] if isinstance(model.engine, nn.Linear) else ["the module's is hidden"])


class Row(nn.Sequential):
    def __init__(self, *parts: Any) -> None:
        torch.manual_seed(0)
        super().__init__(*(parts or (nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))))


def holding(rank: int, strategy: str) -> list[str]:
    """Parts by index, one after another, counted and looked for; a model without such has no length."""
    model, plain = fully_shard_model(Row(), fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy), Row()
    if not hasattr(model, "__len__"):
        return ["it has no length"]
    told = [] if len(model) == 3 and model and model[1] in model else ["what it holds"]
    told += [] if model[-1] is [*model][-1] and type(model[:2]) is Row else ["parts"]
    x = y = torch.ones(2, 6)
    for part, other in zip(model, plain, strict=True):
        x, y = part(x), other(y)
    told += [] if torch.allclose(x, y) else ["another output"]
    model[1] = nn.Linear(6, 6)
    told += said(lambda: model(x), RuntimeError, "1.weight")
    other_model = fully_shard_model(Model(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    return told + (["it has a length"] if hasattr(other_model, "__len__") or not other_model else [])


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    each.__name__: each for each in (deleting, keeping, naming, crowding, holding)
}


test_a_sharded_module_is_as_before = each_holds(__name__, CHECKS)


MUTANTS = of_slips(
    """
    hooks keep the engine: Hooks hold what they call, so that module and engine keep each other
        fsdp.runtime.units.WeakHook: __import__("functools").partial
        deleting
    watchdog keeps the engine: The watching thread holds what it asks where the program is
        fsdp.build.Engine._wire: weakref.WeakMethod(hooks.where) => (lambda: hooks.where)
        deleting
    thread goes on: Nobody tells the watching thread that its model is gone
        fsdp.build.end_watch: lambda *_, **__: None
        deleting
    state keeps the module: A unit holds the module, which holds it
        fsdp.runtime.units.Unit.__init__: weakref.ref(module) => lambda: module
        deleting
    names of the engine: A method of the module's gives way to the engine's of the same name
        fsdp.preconditions._check_free: lambda *_, **__: None
        crowding
    slices are sharded: A slice of a sharded nn.Sequential is of the sharded class, and has no engine
        fsdp.FSDPModule.__new__: lambda kind, *_: object.__new__(kind)
        holding
    moves: A cast of the model is accepted, and does nothing
        fsdp.FSDPModule._apply: lambda self, fn, recurse=True: self
        naming
    """
)


test_a_wrong_mix_in_is_found = each_is_found(__name__, MUTANTS, "The engine, by what programs do with its mix-in")
