"""A cut of dimension 0 at row bounds of the engine's layout: unevenly, on some ranks without a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from harness.private_torch import UnevenShard

Span = tuple[int, int]
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on


class RaggedShard(UnevenShard):
    """Rank r of one mesh axis has rows spans[r][0] to spans[r][1] of dimension 0; never equal to a `Shard`.

    Args:
        spans: by rank; or what computes them when first asked, since there may be thousands of ranks.
        name: parameter and unit, for error messages.
    """

    def __new__(cls, *_: object) -> RaggedShard:
        return cast(RaggedShard, cast(Any, super().__new__)(cls, 0))

    def __init__(self, spans: Sequence[Span] | Callable[[], Sequence[Span]], name: str = "") -> None:
        super().__init__(0)
        self._spans = spans
        self.name = name

    @property
    def spans(self) -> tuple[Span, ...]:
        if not isinstance(self._spans, tuple):
            found = self._spans() if callable(self._spans) else self._spans
            self._spans = tuple((begin, end) for begin, end in found)
        return self._spans

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, RaggedShard) and self.spans == other.spans)

    def __hash__(self) -> int:
        return hash(self.spans)

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self.spans, self.name)

    def __deepcopy__(self, _: object) -> RaggedShard:
        return self

    def __repr__(self) -> str:
        return f"RaggedShard({', '.join(f'{begin}:{end}' for begin, end in self.spans)})"

    __str__ = __repr__

    def gather(self, local: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        """All rows on every rank, shape [rows, *local.shape[1:]]. Collective over the axis."""
        most = max(end - begin for begin, end in self.spans)
        padded = local
        if len(local) < most:
            padded = local.new_zeros((most, *local.shape[1:]))
            padded[: len(local)] = local
        found = local.new_empty((len(self.spans), most, *local.shape[1:]))
        all_gather(found.flatten(0, 1), padded.contiguous(), group=mesh.get_group(axis))
        parts = sorted(zip(self.spans, found, strict=True), key=lambda each: each[0])
        return torch.cat([rows[: end - begin] for (begin, end), rows in parts])
