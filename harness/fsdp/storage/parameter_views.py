"""Parameters of one bucket as the program has them: views of whole weights, or released, and what was done to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from harness.fsdp.storage.layout import BucketLayout
from harness.fsdp.storage.memory import unreadable
from harness.fsdp.storage.parameter_access import HOME, Access, by_engine, class_for
from harness.fsdp.tensor_parallel.parameters import Plain, handling_of


class Sharded(Protocol):
    """Sharded parameters of a bucket; see `harness.fsdp.runtime.at_rest`."""

    params: list[nn.Parameter]

    def show(self, *, unsharded: bool) -> None:
        """Put sharded parameters into the modules' slots, or unsharded ones."""

    def flags(self) -> list[bool]:
        """`requires_grad` of each parameter, as the program has set it."""

    def sync_flags(self) -> None:
        """Let unsharded parameters be trained or frozen as the program has set it."""

    def moved(self) -> None:
        """Main weights lie elsewhere now."""


class ParameterViews:
    """What the parameters of one bucket point at, what they let the program do, and whether it edited them.

    Args:
        params: first names and parameters; their data is replaced.
        unit: its name, for messages.
    """

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]], unit: str) -> None:
        self._params = params
        self._own = [type(param) for _, param in params]
        self._handlings = [handling_of(param) for _, param in params]
        self._bare = [param for _, param in params] if all(each is Plain for each in self._handlings) else []
        """The parameters, where torch itself counts the edits of all of them."""
        self._classes: dict[Access, list[type]] = {}
        self.access = Access.free
        """What the parameters let the program do now."""
        self._views: list[list[Tensor]] = []
        """For each side of the bucket a view of the whole weight of each parameter, in order, with storage or without.
        """
        self._placeholders: list[Tensor] = []
        self._pointed_at: list[Tensor] = []
        """What the parameters were last pointed at."""
        self._versions: list[int] = []
        self.sharded: Sharded | None = None
        """What stands in the modules' slots while parameters are not in use; None: the parameters themselves."""
        for name, param in params:
            setattr(param, HOME, (name, unit))

    def build(self, sides: list[list[Tensor]], device: torch.device) -> None:
        """Whole weights lie here from now on, of each side; parameters are what they were until `point`."""
        self._views = sides
        self._placeholders = [unreadable(view.shape, view.dtype, device) for view in sides[0]]

    def renew(self, side: int, views: list[Tensor]) -> None:
        """Whole weights of a side have moved to these views; parameters are what they were until `point`."""
        self._views[side] = views

    @by_engine
    def point(self, side: int | None) -> None:
        """Let parameters be views of the whole weights of a side; None: released, and one NaN."""
        targets = self._placeholders if side is None else self._views[side]
        self._pointed_at = targets
        for (_, param), handling, target in zip(self._params, self._handlings, targets, strict=True):
            handling.point(param, target)
        self.give(Access.released if side is None else Access.free)

    def give(self, access: Access) -> None:
        """Let the program do with parameters what `access` says."""
        if access is self.access:
            return
        if self.sharded is not None:
            self.sharded.show(unsharded=access is Access.free)
            self.access = access
            return
        if access not in self._classes:
            self._classes[access] = [class_for(own, access) for own in self._own]
        for (_, param), wanted in zip(self._params, self._classes[access], strict=True):
            param.__class__ = wanted
        self.access = access

    @by_engine
    def check_untouched(self) -> None:
        """Raise RuntimeError where somebody moved or cast a parameter after it was sharded."""
        if self._bare and all(map(_is_same, self._bare, self._pointed_at)):
            return
        each = zip(self._params, self._handlings, self._placeholders, *self._views, strict=True)
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
        if self.sharded is not None:
            return self.sharded.flags()
        return [param.requires_grad for _, param in self._params]

    @by_engine
    def forget_edits(self) -> None:
        """Take parameters as they are now for unedited: the engine itself has written to them, or main weights know."""
        self._versions = self._counts()

    def _counts(self) -> list[int]:
        if self._bare:
            return [param._version for param in self._bare]
        return [handling.edits(param) for (_, param), handling in zip(self._params, self._handlings, strict=True)]

    def edited(self) -> list[str]:
        """Parameters edited in place since, by themselves or their `data`, as far as torch's counters tell."""
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
