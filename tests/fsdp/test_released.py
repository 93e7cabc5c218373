"""Weights that are not whole cannot be read, by any way torch has; methods besides forward gather them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fsdp import ReleasedWeightError, fully_shard_model
from harness.fsdp.runtime import handed_on
from harness.fsdp.runtime.forward import Forward
from harness.fsdp.runtime.forward_hooks import ForwardHooks
from harness.fsdp.storage import bucket, parameter_access, parameter_views, turns
from harness.fsdp.storage.parameter_access import Access, GatheredView
from tests.fsdp.checked import RANKS, ZERO3, Mutant, holds, is_found, patched
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.released_weights import Block, Marked, Net, built, tokens_of
from tests.fsdp.test_habits import said
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


# -- views that are kept -----------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda p: p.data,
    "detached": lambda p: p.detach(),
    "a slice": lambda p: p.detach()[1:3],
    "a transposed one": lambda p: p.t(),
    "rows": lambda p: p.unbind()[2],
    "a view of a view": lambda p: p.data.view(-1)[3:],
}
A_VIEW = "a view of parameter .* after the weights it shows were released.*clone"


def keeping_views(rank: int, strategy: str) -> list[str]:
    """What is kept of gathered weights is refused once they are released, and not read where nothing is."""
    model, _ = built(strategy)
    plain = Net()
    told = []
    with model.gathered():
        kept = {name: view(model.module.embed.weight) for name, view in VIEWS.items()}
        told += [n for n, view in VIEWS.items() if not torch.equal(kept[n] * 2, view(plain.embed.weight) * 2)]
        told += [n for n in VIEWS if type(copy.deepcopy(kept[n].detach())) is not Tensor]
        kept["a slice"].mul_(0.5)  # an edit like any other
        pickle.loads(pickle.dumps(kept["data"]))
    for use in (torch.sum, repr, copy.deepcopy, pickle.dumps, lambda view: torch.ones_like(view) + view):
        told += [each for view in kept.values() if strategy == ZERO3 for each in said(partial(use, view), A_VIEW)]
    with torch.no_grad():
        plain.embed.weight[1:3] *= 0.5
    with model.gathered():
        told += [
            n for n, view in VIEWS.items() if not torch.equal(view(model.module.embed.weight), view(plain.embed.weight))
        ]
    double, _ = built(strategy, double_buffer=True)
    with double.gathered("blocks.0"):
        view = double.module.blocks[0].linear.weight.data
    with torch.no_grad():
        double(tokens_of(rank))  # the others have been in its place
    return told + (said(view.sum, A_VIEW) if strategy == ZERO3 else [])


class Keeper(Block):
    """Keeps a view of its weight, and uses the first one ever after."""

    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = {"turned": [self.linear.weight.detach().t()]}
        return super().forward(x) + x @ self.kept["turned"][0]


class Yielding(Block):
    def forward(self, x: Tensor) -> Any:
        yield super().forward(x)


def keeping_attributes(rank: int, strategy: str) -> list[str]:
    """A view in an attribute is right in its unit's calls, and refused in between."""

    def train(model: nn.Module, ranks: Sequence[int]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.cat([tokens_of(step + each) for each in ranks])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, module = Net(), Net()
    plain.blocks[1], module.blocks[1] = Keeper(), Keeper()
    module.load_state_dict(plain.state_dict())
    model = fully_shard_model(module, zero_dp_strategy=strategy, fsdp_unit_modules=[Block])
    train(plain, range(RANKS))
    train(model, [rank])
    found = dict(model.full_weights())
    told = [name for name, p in plain.named_parameters() if not torch.allclose(found[name], p, atol=1e-5)]
    return told + (said(module.blocks[1].kept["turned"][0].sum, A_VIEW) if strategy == ZERO3 else [])


def yielding(rank: int, strategy: str) -> list[str]:
    """What a generator computes, it computes when the call of its unit is over."""
    model = fully_shard_model(nn.Sequential(Yielding()), zero_dp_strategy=strategy, fsdp_unit_modules=[Block])
    if strategy == ZERO3:
        return said(lambda: next(model(torch.ones(2, 6))), "unit 0 returns a generator.*a list")
    return [] if next(model(torch.ones(2, 6))).shape == (2, 6) else ["another output"]


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    each.__name__: each
    for each in (reading, describing, classes, copied, methods, keeping_views, keeping_attributes, yielding)
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


def _refuses(self: GatheredView, by: str) -> None:
    raise ReleasedWeightError(by)


@contextmanager
def _sharing_storage() -> Iterator[None]:
    with mock.patch.object(turns, "bar", return_value=None), mock.patch.object(bucket, "_is_whole", return_value=True):
        yield


MUTANTS = {
    "views of other weights": Mutant(
        "A view that is kept under double_buffer shows another unit's weights, with a torch that cannot bar storage",
        _sharing_storage,
        "keeping_views",
    ),
    "views are refused": Mutant(
        "A unit may not use a view of its weight that it keeps",
        patched(GatheredView, "_check", _refuses),
        "keeping_attributes",
    ),
    "generators": Mutant(
        "A generator finds the weights of its unit released",
        patched(handed_on, "refuse_generator", lambda unit: None),
        "yielding",
    ),
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
