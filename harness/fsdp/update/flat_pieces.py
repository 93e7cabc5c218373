"""Flat pieces that an optimizer steps in place of sharded parameters; see `harness.fsdp.update.flat_step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.gradients import Gradients


@dataclass(eq=False)
class Span:
    """Flat moments of neighbours in one segment of a bucket that one optimizer updates."""

    bucket: Bucket
    segment: int
    start: int
    end: int
    flats: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shards = self.bucket.main_shards
        """Others, once the bucket was laid out anew."""

    def part(self, key: str, dtype: torch.dtype, start: int, end: int) -> Tensor:
        """Elements of a moment, by their place in the shard of the segment."""
        if key not in self.flats:
            like = self.bucket.main_shards[self.segment][self.start : self.end]
            self.flats[key] = torch.zeros_like(like, dtype=dtype, requires_grad=False)
        return self.flats[key][start - self.start : end - self.start]


@dataclass(eq=False)
class Piece:
    """A run of parameters that are stepped as one flat tensor."""

    span: Span
    start: int
    end: int
    params: list[Tensor]
    entries: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flat = self.span.shards[self.span.segment][self.start : self.end].detach().requires_grad_()

    @property
    def grad(self) -> Tensor:
        """Main gradients of the run, wherever they lie now."""
        return cast(Gradients, self.span.bucket.gradients).main_shards[self.span.segment][self.start : self.end]


class Counter:
    """One counter, such as `step`, of pieces and of their parameters, of one dtype and device."""

    def __init__(self, key: str, pieces: Sequence[Piece], state: Any) -> None:
        self.of_pieces = torch.stack([piece.entries[key] for piece in pieces])
        places = [place for place, piece in enumerate(pieces) for _ in piece.params]
        self.index = torch.tensor(places, device=self.of_pieces.device)
        self.of_params = self.of_pieces[self.index]
        for piece, element in zip(pieces, self.of_pieces.unbind(), strict=True):
            piece.entries[key] = element
        self.elements = self.of_params.unbind()
        """What parameters have: kept, so that nothing that replaces one has its identity."""
        params = (param for piece in pieces for param in piece.params)
        for param, element in zip(params, self.elements, strict=True):
            state[param][key] = element
        self.version = self.of_params._version

    def tell_params(self) -> None:
        """Pieces have counted: so have their parameters."""
        torch.index_select(self.of_pieces, 0, self.index, out=self.of_params)
        self.version = self.of_params._version

    @property
    def is_edited(self) -> bool:
        """The program has edited the counter of a parameter in place."""
        return self.of_params._version != self.version
