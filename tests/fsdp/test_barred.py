"""What uses values that are not there ends in an error, also where torch asks no class: nobody ends by a signal."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.fsdp import fully_shard_model
from harness.fsdp.runtime import forward_hooks
from harness.fsdp.storage import barred, memory, parameter_views, turns
from tests.fsdp.checked import ZERO3, Mutant, holds, is_found, patched
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.test_habits import said
from tests.support.mutants import each

ANY = f"{'|'.join(barred.TORCHS_WORDS)}|released|not gathered"
"""What torch says, or the engine."""

USES: dict[str, Callable[[Tensor], Any]] = {
    "torch.tensor": torch.tensor,
    "a list of it": lambda view: torch.tensor([view.view(-1)[0]]),
    "new_tensor": lambda view: torch.ones(1).new_tensor(view),
    "torch.Tensor": lambda view: torch.Tensor(view).sum(),
    "torch.asarray": lambda view: torch.asarray(view, copy=True),
    "as_subclass": lambda view: view.as_subclass(Tensor).sum(),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "numpy": lambda view: np.asarray(view.detach()),
    "an edit": lambda view: view.detach().mul_(1),
    "a product": lambda view: view.detach() @ torch.ones(6, 2),
    "a nested one": lambda view: torch.nested.nested_tensor([view]),
}


class Capturing(nn.Module):
    """Leaves what uses its weight later in a closure, and in a list that is nobody's attribute."""

    def __init__(self, kept: list[Tensor], later: list[Callable[[], Tensor]]) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(6, 6), (lambda view: (kept.append(view), later.append(lambda: view @ view)))

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self.linear.weight.detach())
        return self.linear(x)


def made(strategy: str, units: int = 2, **more: Any) -> tuple[Any, list[Tensor], list[Callable[[], Tensor]]]:
    kept: list[Tensor] = []
    later: list[Callable[[], Tensor]] = []
    torch.manual_seed(0)
    module = nn.Sequential(*(Capturing(kept, later) for _ in range(units)))
    return fully_shard_model(module, zero_dp_strategy=strategy, fsdp_unit_modules=[Capturing], **more), kept, later


def unread(use: Callable[[], Any], strategy: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if strategy == ZERO3:
            return said(use, ANY)
        use()
        return []


def evaluating(rank: int, strategy: str) -> list[str]:
    """Views that a program without a backward keeps, in closures too: refused while nothing is there."""
    model, kept, later = made(strategy)
    with torch.no_grad():
        model(torch.ones(2, 6))
    if told := unread(kept[0].data_ptr, strategy):  # before anything could end the process
        return told
    for view, closure in zip(kept, later, strict=True):
        told += unread(closure, strategy)
        for use in USES.values():
            told += unread(partial(use, view), strategy)
    return told


def training(rank: int, strategy: str) -> list[str]:
    """The same where a backward has read them, which trains as it does without them; right while they are there."""
    model, kept, later = made(strategy)
    plain, _, _ = made("no_shard")
    for net in (model, plain):
        net(torch.full((2, 6), 1.0 + rank)).square().sum().backward()
    one, other = dict(model.full_gradients()), dict(plain.full_gradients())
    told = [name for name in one if not torch.allclose(one[name], other[name])]
    told += unread(kept[0].data_ptr, strategy)
    if told:
        return told
    told += [wrong for use in USES.values() for wrong in unread(partial(use, kept[1]), strategy)]
    with model.gathered():
        told += [] if torch.equal(later[0](), kept[0] @ kept[0]) and kept[0].isfinite().all() else ["not there"]
    return told


def taking_turns(rank: int, strategy: str) -> list[str]:
    """The same where units take turns in two buffers: a view never shows another unit's weights."""
    model, kept, later = made(strategy, 4, double_buffer=True)
    right = [w for n, w in model.full_weights() if n.endswith("weight")]
    seen: list[Any] = []
    hook = model.module[0].linear.register_forward_hook(
        lambda linear, *_: seen.append(linear.weight.detach().numpy()), always_call=True
    )
    with torch.no_grad():
        model(torch.ones(2, 6))
    hook.remove()
    told = [] if np.array_equal(seen[0], right[0].numpy()) else ["what numpy has seen is other weights"]
    for view, closure in zip(kept[1:], later[1:], strict=True):  # the first shows what numpy holds
        told += unread(closure, strategy) + unread(view.sum, strategy) + unread(partial(torch.tensor, view), strategy)
    for unit in "123":
        with model.gathered(unit):
            told += [] if torch.equal(kept[int(unit)], right[int(unit)]) else [f"weights of {unit} are not there"]
            told += [] if unit == "1" else unread(later[1], strategy)
    x = torch.full((2, 6), 1.0 + rank)
    plain, _, _ = made("no_shard", 4)
    for net in (model, plain):
        net(x).square().sum().backward()
    one, other = dict(model.full_gradients()), dict(plain.full_gradients())
    told += [name for name in one if not torch.allclose(one[name], other[name])]
    return told


def released_parameters(rank: int, strategy: str) -> list[str]:
    """What C++ reads of a released parameter itself."""
    model, _, _ = made(strategy)
    told = []
    for name, param in model.named_parameters():
        uses = {n: u for n, u in USES.items() if name.endswith("weight") or n != "a product"}
        for n, use in uses.items():
            with torch.no_grad():
                told += [f"{n}: {wrong}" for wrong in unread(partial(use, param), strategy)]
    return told


def named(rank: int, strategy: str) -> list[str]:
    """A forward that uses such a view is told whose it is."""

    class Later(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + sum(each().sum() for each in later)

    kept: list[Tensor] = []
    later: list[Callable[[], Tensor]] = []
    model = fully_shard_model(
        nn.Sequential(Later(), Capturing(kept, later)), zero_dp_strategy=strategy, fsdp_unit_modules=[Capturing]
    )
    with torch.no_grad():
        model(torch.ones(2, 6))
    try:
        model(torch.ones(2, 6))
    except RuntimeError as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return [] if "parameter 1.linear.weight of unit 1" in notes and "clone()" in notes else [f"{error}: {notes}"]
    return [] if strategy != ZERO3 else ["nothing is said"]


class Addresses(TorchDispatchMode):
    """Takes the address of every tensor that an operation is given or gives, as `torch.cuda._sanitizer` does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, found)):
            if isinstance(value, Tensor):
                value.data_ptr()
        return found


def sanitized(rank: int, strategy: str) -> list[str]:
    """A training under torch's stream sanitizer, which would end at the first address that may not be taken."""
    with mock.patch.dict(os.environ, {barred.SANITIZER: "1"}):
        barred.can_bar.cache_clear()
        try:
            model, _, _ = made(strategy)
            with Addresses():  # type: ignore[no-untyped-call] # torch leaves the mode's constructor unannotated
                for _ in range(2):
                    model(torch.full((2, 6), 1.0 + rank)).square().sum().backward()
                    model.zero_grad()
        finally:
            barred.can_bar.cache_clear()
    return []


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    check.__name__: check for check in (evaluating, training, taking_turns, released_parameters, named, sanitized)
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_that_are_not_there_are_not_read(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


def test_a_torch_without_the_mark_empties_storage_as_before() -> None:
    with mock.patch.object(barred, "can_bar", return_value=False):
        tensor = memory.BucketMemory(torch.device("cpu")).transient(4, torch.float32)
        there = memory.BucketMemory(torch.device("cpu"))
        there.empty(tensor)
        assert tensor.untyped_storage().nbytes() == 0
        there.refill(tensor)
        assert tensor.untyped_storage().nbytes() == 16
        assert there.live_bytes == 16
        there.free(tensor)
        there.free(tensor)
        assert there.live_bytes == 0


MUTANTS = {
    "memory is taken and no more": Mutant(
        "A view that outlives its weights reads address zero", patched(memory, "bar", lambda device: None), "evaluating"
    ),
    "a bar stays": Mutant(
        "Weights that are gathered again cannot be read through earlier views",
        patched(memory.BucketMemory, "refill", lambda self, bucket: None),
        "training",
    ),
    "units share a storage": Mutant(
        "Under double_buffer a view in a closure shows another unit's weights",
        patched(turns, "bar", lambda device: None),
        "taking_turns",
    ),
    "a turn does not end": Mutant(
        "Under double_buffer a view stays readable after its unit's weights were released",
        patched(turns.Turn, "end", lambda self: setattr(self._buffer, "user", None)),
        "taking_turns",
    ),
    "numpy sees on": Mutant(
        "Under double_buffer an array of numpy's shows another unit's weights",
        patched(turns.Turn, "renew", lambda self, bucket: False),
        "taking_turns",
    ),
    "a NaN stands in": Mutant(
        "What C++ reads of a released parameter is NaN",
        patched(parameter_views, "unreadable", memory.placeholder),
        "released_parameters",
    ),
    "nobody is named": Mutant(
        "A forward that uses a view of released weights is not told whose they are",
        patched(forward_hooks, "explain_stale_view", lambda buckets, unit: None),
        "named",
    ),
}


@pytest.mark.parametrize(
    "name", each("The engine, by what programs read", [(name, m.breaks) for name, m in MUTANTS.items()])
)
def test_a_wrong_engine_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
