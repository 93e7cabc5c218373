"""Unsharded parameters of one bucket: views of whole weights, and whether the program edited them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from harness.fsdp.storage.layout import BucketLayout
from harness.fsdp.storage.parameter_access import HOME, by_engine
from harness.fsdp.tensor_parallel.parameters import Plain, handling_of


class Sharded(Protocol):
    """Sharded parameters of a bucket; see `harness.fsdp.storage.at_rest`."""

    params: list[nn.Parameter]
    shows_unsharded: bool

    def show(self, *, unsharded: bool) -> None:
        """Put sharded parameters into the modules' slots, or unsharded ones."""

    def count_edits(self) -> None:
        """Let unsharded parameters count edits through `data`, and copy what is assigned to it."""

    def flags(self) -> list[bool]:
        """`requires_grad` of each parameter, as the program has set it."""

    def sync_flags(self) -> None:
        """Let unsharded parameters be trained or frozen as the program has set it."""

    def moved(self) -> None:
        """Main weights lie elsewhere now."""

    def check(self) -> None:
        """Raise RuntimeError where modules hold other parameters, or a parameter was cast or moved."""


class ParameterViews:
    """What the unsharded parameters of one bucket point at, and whether the program edited them.

    Args:
        params: first names and parameters; their data is replaced.
        unit: its name, for messages.
    """

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]], unit: str) -> None:
        self._params = params
        self._handlings = [handling_of(param) for _, param in params]
        self._bare = [param for _, param in params] if all(each is Plain for each in self._handlings) else []
        """The parameters, where torch itself counts the edits of all of them."""
        self._views: list[list[Tensor]] = []
        """For each encoding of the bucket a view of each parameter's whole weight, with storage or without."""
        self._pointed_at: list[Tensor] = []
        self._versions: list[int] = []
        self.sharded: Callable[[], Sharded | None] = lambda: None
        """A weak reference, once the model is built."""
        for name, param in params:
            setattr(param, HOME, (name, unit))

    def build(self, views: list[list[Tensor]]) -> None:
        """Whole weights lie here from now on, of each encoding; parameters are what they were until `point`."""
        self._views = views

    def renew(self, encoding: int, views: list[Tensor]) -> None:
        """Whole weights of an encoding have moved to these views; parameters are what they were until `point`."""
        self._views[encoding] = views

    @by_engine
    def point(self, encoding: int) -> None:
        """Let parameters be views of the whole weights of an encoding, with storage or without."""
        targets = self._views[encoding]
        if self._pointed_at is not targets:
            self._pointed_at = targets
            for (_, param), handling, target in zip(self._params, self._handlings, targets, strict=True):
                handling.point(param, target)

    @property
    def shows_unsharded(self) -> bool:
        """See `Sharded.show`."""
        return (sharded := self.sharded()) is not None and sharded.shows_unsharded

    @property
    def is_sharded(self) -> bool:
        """Between passes modules hold other parameters."""
        return any(at_rest is not param for at_rest, (_, param) in zip(self.at_rest, self._params, strict=True))

    @property
    def at_rest(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return [param for _, param in self._params] if (sharded := self.sharded()) is None else sharded.params

    @by_engine
    def check_untouched(self) -> None:
        """Raise RuntimeError where somebody moved or cast a parameter after it was sharded."""
        if self._bare and all(map(_is_same, self._bare, self._pointed_at)):
            return
        each = zip(self._params, self._handlings, *self._views, strict=True)
        for (name, param), handling, *known in each:
            values = handling.values(param)
            if any(_is_same(values, one) for one in known):
                continue
            raise RuntimeError(
                f"parameter {name} was changed after sharding: its data is no longer the engine's (cast, moved,"
                " parametrized or replaced); change it before sharding"
            )

    def flags(self) -> list[bool]:
        """`requires_grad` of each parameter, as the program has set it."""
        sharded = self.sharded()
        return [param.requires_grad for _, param in self._params] if sharded is None else sharded.flags()

    @by_engine
    def forget_edits(self) -> None:
        """Take parameters as they are now for unedited: the engine itself has written to them, or main weights know."""
        self._versions = self._counts()

    def _counts(self) -> list[int]:
        if self._bare:
            return [param._version for param in self._bare]
        return [handling.edits(param) for (_, param), handling in zip(self._params, self._handlings, strict=True)]

    def edited(self) -> list[str]:
        """Parameters edited in place since, as far as torch's counters tell."""
        now = self._counts()
        if now == self._versions:
            return []
        return [name for (name, _), was, count in zip(self._params, self._versions, now, strict=True) if was != count]


def _is_same(values: Tensor, target: Tensor) -> bool:
    """Whether values lie where `target` does, as it does. Nothing looks for them."""
    return values.dtype == target.dtype and values.is_set_to(target)


def views_of(bucket: Tensor, layout: BucketLayout) -> list[Tensor]:
    """Every parameter's place in a whole bucket, in its shape."""
    first = bucket.storage_offset()
    return [bucket.as_strided(shape, strides, first + begin) for shape, strides, begin in layout.views]
