"""Ways to disturb the engine's timing and memory that must not change a bit.

Each is a context manager over the calls of this process, so that a test can hold a disturbed run against an undisturbed
one in the same processes. Delays are drawn from a generator seeded by rank: the same in every run of a test.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from harness.fsdp import Observer
from harness.fsdp.storage.memory import BucketMemory

LONGEST_S = 0.004


class Delays:
    """Short sleeps before some calls on some ranks.

    Args:
        share: of calls that are delayed. ranks: None for all.
    """

    def __init__(self, rank: int, seed: int, *, share: float = 0.3, ranks: Sequence[int] | None = None) -> None:
        self._random = random.Random(1_000 * seed + rank)
        self._share = share if ranks is None or rank in ranks else 0.0

    def __call__(self, *_: Any) -> None:
        if self._random.random() < self._share:
            time.sleep(self._random.random() * LONGEST_S)

    @contextmanager
    def before_collectives(self) -> Iterator[None]:
        """Before any logical collective is issued."""
        observer = Observer()
        observer.collective = self  # type: ignore[method-assign]
        observer.attach()
        try:
            yield
        finally:
            observer.detach()

    @contextmanager
    def around(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """After any forward of any part of a module, and before an optimizer's update."""
        handles = [each.register_forward_hook(lambda *_: self()) for each in module.modules()]
        handles.append(optimizer.register_step_pre_hook(lambda *_: self()))  # type: ignore[arg-type]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _poison(tensor: Tensor | None) -> None:
    if tensor is None or not tensor.untyped_storage().nbytes():
        return
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    raw.fill_(0xFF)  # NaN in every float format, -1 in integers


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """What is freed, given back, or about to be reused, holds NaN: nobody may read it, nor count on what it held."""

    def before(name: str, poison: Callable[..., None]) -> Any:
        original = getattr(BucketMemory, name)

        def call(self: BucketMemory, *args: Any) -> Any:
            poison(*args)
            return original(self, *args)

        return mock.patch.object(BucketMemory, name, call)

    take, refill = BucketMemory.take, BucketMemory.refill

    def poisoned_take(self: BucketMemory, *args: Any) -> Tensor:
        bucket = take(self, *args)
        _poison(bucket)
        return bucket

    def poisoned_refill(self: BucketMemory, bucket: Tensor) -> None:
        refill(self, bucket)
        _poison(bucket)

    with (
        before("free", _poison),
        before("give_back", _poison),
        mock.patch.object(BucketMemory, "take", poisoned_take),
        mock.patch.object(BucketMemory, "refill", poisoned_refill),
    ):
        yield


class Branches(nn.Module):
    """A unit of three branches over disjoint parts of its input, run in the order `order`.

    Autograd reaches the parameters in the reverse of that order. No bit depends on it: every branch has an input of its
    own, and outputs are added in one fixed order.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))
        self.order: list[int] = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(3, dim=-1)
        outputs = {place: torch.tanh(self.branches[place](parts[place])) for place in self.order}
        return x + (outputs[0] + outputs[1] + outputs[2])


class Branching(nn.Module):
    """A few such units in a row, with parameters of the root before and behind them."""

    def __init__(self, width: int = 4, num_units: int = 3) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.stem = nn.Linear(3 * width, 3 * width)
        self.units = nn.ModuleList(Branches(width) for _ in range(num_units))
        self.head = nn.Linear(3 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for unit in self.units:
            x = unit(x)
        head: Tensor = self.head(x)
        return head

    def shuffle(self, source: random.Random) -> None:
        """Draw a new order for every unit."""
        for unit in self.units:
            assert isinstance(unit, Branches)
            source.shuffle(unit.order)
