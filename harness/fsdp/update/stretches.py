"""What the optimizer steps in place of parameters: stretches of this rank's main weights.

[Note: Stretches] A stretch is as long as it can be: all neighbouring parameters of one optimizer group. It is cut for
good where its parameters stop being treated alike: one of them got no gradient on any rank in a step, or what was
loaded counts its steps otherwise. What the optimizer keeps of a stretch is cut with it: moments become views of what
they were, counters are copied. Updates go element by element and parameters begin where fused kernels may be cut (see
[Note: Bits and cuts]), so no bit depends on how stretches are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor

from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.layout import LocalSlice, Slot, Stretch


@dataclass(frozen=True, eq=False)
class FlatStretch:
    """Elements of one bucket that one parameter group updates: a view of main weights, and one of main gradients."""

    bucket: Bucket
    stretch: Stretch
    weight: Tensor

    @classmethod
    def over(cls, bucket: Bucket, stretch: Stretch) -> FlatStretch:
        """A stretch over a bucket's main weights."""
        shard = bucket.main_shards[stretch.segment]
        return cls(bucket, stretch, shard[stretch.start : stretch.end].detach().requires_grad_())

    @property
    def name(self) -> str:
        """Bucket, segment and range."""
        return name_of_stretch(self.bucket.name, self.stretch)

    @cached_property
    def grad(self) -> Tensor:
        """The stretch's main gradients, while there are any."""
        return self.bucket.grad_shards[self.stretch.segment][self.stretch.start : self.stretch.end]

    @cached_property
    def members(self) -> list[tuple[int, Slot, LocalSlice]]:
        """Parameters with rows here, as they lie: place in the bucket, slot, and this rank's rows."""
        layout, rank, stretch = self.bucket.layout, self.bucket.cuts.layout_rank, self.stretch
        here = ((each, slot, layout.local_slice(slot, rank)) for each, slot in enumerate(layout.slots))
        found = (
            each
            for each in here
            if each[2].numel and each[1].segment == stretch.segment and stretch.start <= each[2].offset < stretch.end
        )
        return sorted(found, key=lambda each: each[2].offset)

    @property
    def param_numel(self) -> int:
        """Elements of parameters in it; the rest is padding."""
        return sum(local.numel for _, _, local in self.members)

    def lies_in(self, places: frozenset[int]) -> bool:
        """Whether the stretch has parameters, all of them among `places` in the bucket."""
        return bool(places and self.members) and all(index in places for index, _, _ in self.members)

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient of its parameters came in this step, as far as this rank knows."""
        gradients = self.bucket.gradients
        return gradients is not None and any(
            index in gradients.came and index not in gradients.unused for index, _, _ in self.members
        )

    @property
    def without_zeros(self) -> frozenset[int]:
        """Parameters of its bucket that have no gradient of zeros from before; see `Gradients.keep_zeros`."""
        gradients = self.bucket.gradients
        return frozenset[int]() if gradients is None else frozenset(range(len(gradients.params))) - gradients.zeros

    def cut_between(self, kind: Callable[[int, Slot], Hashable]) -> list[FlatStretch]:
        """The stretch cut wherever neighbouring parameters are of different kinds; padding stays with what it follows.

        Args:
            kind: of a parameter, by its place in the bucket and its slot.
        """
        kinds = [(kind(index, slot), local.offset) for index, slot, local in self.members]
        return self.cut_at({offset for (one, _), (other, offset) in pairwise(kinds) if one != other})

    def cut_at(self, places: set[int]) -> list[FlatStretch]:
        """The stretch cut at places of the shard of its segment; those outside it are left out."""
        stretch = self.stretch
        edges = [stretch.start, *sorted(place for place in places if stretch.start < place < stretch.end), stretch.end]
        if len(edges) == 2:
            return [self]
        return [FlatStretch.over(self.bucket, replace(stretch, start=a, end=b)) for a, b in pairwise(edges)]

    def state_of(self, piece: FlatStretch, state: Mapping[str, Any]) -> dict[str, Any]:
        """A piece's part of what an optimizer keeps of this stretch."""
        begin, end = piece.stretch.start - self.stretch.start, piece.stretch.end - self.stretch.start
        return {entry: _part(value, self.weight, begin, end) for entry, value in state.items()}


def name_of_stretch(bucket: str, stretch: Stretch) -> str:
    """Bucket, segment and range."""
    return f"{bucket}:{stretch.segment}:{stretch.start}-{stretch.end}"


def is_moment(value: Any, weight: Tensor) -> bool:
    """Whether an optimizer keeps a number an element in it; else one for all elements."""
    return isinstance(value, Tensor) and value.shape == weight.shape


def _part(value: Any, weight: Tensor, begin: int, end: int) -> Any:
    if is_moment(value, weight):
        return value[begin:end]
    return value.detach().clone() if isinstance(value, Tensor) else value
