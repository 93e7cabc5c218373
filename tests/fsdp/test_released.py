"""Weights that are not whole cannot be read, by any way torch has; methods besides forward gather them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fsdp import ReleasedWeightError
from harness.fsdp.runtime.forward import Forward
from harness.fsdp.runtime.forward_hooks import ForwardHooks
from harness.fsdp.storage import parameter_access, parameter_views
from harness.fsdp.storage.parameter_access import Access
from tests.fsdp.checked import RANKS, ZERO3, Mutant, holds, is_found, patched
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.released_weights import Marked, Net, built, tokens_of
from tests.support.mutants import each

READS: dict[str, Callable[[Net], Any]] = {
    "another layer's weight": lambda m: F.linear(torch.ones(1, 6), m.embed.weight),
    "a method that is not forward": lambda m: m.encode(tokens_of(0)),
    "a norm": lambda m: sum(p.square().sum() for p in m.parameters()),
    "an average": lambda m: [torch.zeros_like(p).lerp_(p.detach(), 0.5) for p in m.parameters()],
    "an average of data": lambda m: [torch.zeros_like(p).mul_(0.5).add_(p.data) for p in m.parameters()],
    "many at once": lambda m: torch._foreach_norm([p for p in m.parameters() if p.requires_grad]),
    "a vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "numpy": lambda m: [p.detach().numpy() for p in m.parameters()],
    "an index": lambda m: m.embed.weight[3],
    "a copy": lambda m: copy.deepcopy(m.embed.weight),
    "a clone": lambda m: m.embed.weight.clone(),
    "out of place": lambda m: torch.zeros(10, 6).copy_(m.embed.weight),
    "a tensor of numbers": lambda m: m.blocks[0].scale.tolist(),
    "comparison": lambda m: torch.equal(m.embed.weight, m.embed.weight),
    "its memory": lambda m: m.embed.weight.untyped_storage(),
}


def reading(rank: int, strategy: str) -> list[str]:
    """What reads otherwise than in one process, and not because it is refused by name."""
    model, _ = built(strategy)
    plain = Net()
    with torch.no_grad():
        model(tokens_of(rank))
    told = []
    for name, read in READS.items():
        try:
            found = read(model.module)
            told += [] if strategy != ZERO3 and alike(found, read(plain)) else [f"{name}: {found}"]
        except ReleasedWeightError as error:
            told += (
                [] if strategy == ZERO3 and "parameter " in str(error) and "gathered()" in str(error) else [str(error)]
            )
    return told


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, torch.UntypedStorage):
        return True
    return bool(torch.allclose(torch.as_tensor(a), torch.as_tensor(b)))


def describing(rank: int, strategy: str) -> list[str]:
    """What cannot be told of a parameter that needs no values."""
    model, _ = built(strategy)
    plain, told = Net(), []
    for (name, mine), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        for what in ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "ndim", "layout"):
            told += [] if getattr(mine, what) == getattr(other, what) else [f"{name}.{what}"]
        for call in ("size", "dim", "numel", "stride", "is_contiguous", "element_size", "__len__"):
            told += [] if getattr(mine, call)() == getattr(other, call)() else [f"{name}.{call}()"]
        told += [] if isinstance(mine, nn.Parameter) and torch.is_floating_point(mine) else [f"{name}: its class"]
        told += [] if isinstance(mine, type(other)) else [f"{name}: its own class"]
        told += [] if torch.zeros_like(mine).stride() == other.stride() else [f"{name}: zeros_like"]
        told += [] if name in repr(mine) or strategy != ZERO3 else [f"{mine!r}"]
        mine.register_hook(lambda gradient: gradient).remove() if mine.requires_grad else None
    torch.optim.AdamW(model.parameters())
    str(model)
    return told


def classes(rank: int, strategy: str) -> list[str]:
    """Parameters have their own class while they are computed with, in the backward too."""
    model, optimizer = built(strategy)
    inside: set[type] = set()
    handle = model.module.embed.register_full_backward_hook(lambda *_: inside.add(type(model.module.embed.weight)))
    for _ in range(2):
        model(tokens_of(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    seen = set().union(*(block.seen for block in model.module.blocks))
    return [] if seen == {nn.Parameter, Marked} and inside == {nn.Parameter} else [str(seen | inside)]


def copied(rank: int, strategy: str) -> list[str]:
    """A parameter at rest is copied and pickled as torch does it, into one that no engine knows; else refused."""
    model, _ = built(strategy)
    told = []
    for name, param in model.named_parameters():
        param.mine = "kept"  # type: ignore[attr-defined] # as programs mark parameters
        for how, make in {"copy": copy.copy, "pickle": lambda p: pickle.loads(pickle.dumps(p))}.items():
            try:
                found = make(param)
            except ReleasedWeightError:
                told += [] if strategy == ZERO3 else [f"{how} of {name} is refused"]
                continue
            except TypeError as error:
                told.append(f"{how} of {name}: {error}")
                continue
            alone = strategy != ZERO3 and type(found) is nn.Parameter and torch.equal(found, param)
            told += [] if alone else [f"{how}: {name}"]
            told += [] if set(vars(found)) == {"mine"} else [f"{how} of {name} has {sorted(vars(found))}"]
    return told


def methods(rank: int, strategy: str) -> list[str]:
    """`generate` and a registered method against one process, on data of each rank's own, and a step through it."""
    model, optimizer = built(strategy)
    plain, told = Net(), []
    for _ in range(2):
        told += [] if torch.equal(model.generate(tokens_of(rank)), plain.generate(tokens_of(rank))) else ["generate"]
    model.register_forward_methods("encode", "blocks.0.forward")
    with torch.no_grad():
        told += [] if torch.equal(model.encode(tokens_of(rank)), plain.encode(tokens_of(rank))) else ["encode"]
    model.encode(tokens_of(rank)).square().mean().backward()
    for other in range(RANKS):
        (plain.encode(tokens_of(other)).square().mean() / RANKS).backward()
    found = dict(model.full_gradients())
    for name, param in plain.named_parameters():
        right = torch.zeros_like(param) if param.grad is None else param.grad
        told += [name] if param.requires_grad and not torch.allclose(found[name], right, atol=1e-6) else []
    optimizer.step()
    told += [] if model._parts.memory.live_bytes == 0 else ["memory is not given back"]
    try:
        model.register_forward_methods("nothing")
        told.append("a method that is none")
    except ValueError as error:
        told += [] if "'nothing'" in str(error) else [str(error)]
    return told


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    each.__name__: each for each in (reading, describing, classes, copied, methods)
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_right_or_refused(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


# -- mutants -----------------------------------------------------------------------------------------------------------


_class_for = parameter_access.class_for


def never_released(own: type, access: Access) -> type:
    return _class_for(own, Access.resting if access is Access.released else access)


def always_resting(own: type, access: Access) -> type:
    return _class_for(own, Access.resting if access is Access.free else access)


MUTANTS = {
    "reads NaN": Mutant(
        "A released weight can be read, and is NaN", patched(parameter_views, "class_for", never_released), "reading"
    ),
    "stand-ins are tensors": Mutant(
        "The `data` of a released weight can be read, and is NaN",
        patched(parameter_access, "_stand_in", Tensor.detach),
        "reading",
    ),
    "own class lost": Mutant(
        "Weights that are computed with keep the class of those at rest",
        patched(parameter_views, "class_for", always_resting),
        "classes",
    ),
    "root let go": Mutant(
        "A forward of the model inside a method ends as one outside does",
        patched(Forward, "in_model", property(lambda self: False)),
        "methods",
    ),
    "method as it is": Mutant(
        "A registered method runs without the root",
        patched(ForwardHooks, "run_as_forward", lambda self, method, *a, **k: method(*a, **k)),
        "methods",
    ),
    "copies are the engine's": Mutant(
        "A copied parameter keeps what the engine hung on the first one",
        patched(parameter_access, "_OURS", ("nothing",)),
        "copied",
        "optim",
    ),
}


@pytest.mark.parametrize(
    "name", each("The engine, by what programs read", [(name, m.breaks) for name, m in MUTANTS.items()])
)
def test_a_wrong_engine_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
