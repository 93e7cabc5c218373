"""Sketches of what modules give out are those of the whole batch, whoever computes which part of it and how often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.probe.step_checks.local import ForwardWatch
from harness.probe.step_checks.sketch import SKETCHES, Signs
from tests.support.mutants import finds

SEQUENCES, TOKENS = 6, 4
ROWS = SEQUENCES * TOKENS


class Small(nn.Module):
    """Two layers, the second computed again in the backward or not."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again = again
        self.embedding = nn.Embedding(11, 6, dtype=torch.float64)
        self.up = nn.Sequential(nn.Linear(6, 5, dtype=torch.float64), nn.Tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.embedding(tokens)
        return checkpoint(self.up, found, use_reentrant=False) if self.again else self.up(found)


def seen(cuts: Sequence[Sequence[int]], *, again: bool = False, rows: int = ROWS) -> dict[str, Tensor]:
    """Sketches, added over ranks, where each rank has so many sequences in each of its microbatches."""
    torch.manual_seed(0)
    model, tokens = Small(again=again), torch.randint(0, 11, (SEQUENCES, TOKENS))
    found: dict[str, Tensor] = {}
    begin = 0
    for microbatches in cuts:
        with ForwardWatch(model, Signs(), rows, begin * TOKENS) as watch:
            for count in microbatches:
                model(tokens[begin : begin + count]).square().sum().backward()
                begin += count
        for name, values in watch.found.items():
            found[name] = found.get(name, torch.zeros(SKETCHES + 1, dtype=torch.float64)) + values
    return found


def wrong_sketches() -> Iterator[str]:
    """What is not the same however the batch is cut, lazily."""
    whole = seen([[SEQUENCES]])
    if [*whole] != ["embedding", "up.0", "up.1", "up", ""]:
        yield f"modules in the order of their calls: {[*whole]}"
    for cuts, again in (([[2, 4]], False), ([[3], [3]], False), ([[2, 1], [1, 2]], False), ([[3, 3]], True)):
        for name, found in seen(cuts, again=again).items():
            if not torch.allclose(found, whole[name], rtol=1e-12, atol=1e-12):
                yield f"{name or 'the model'} of {cuts}, {again=}"
    part = seen([[SEQUENCES]], rows=5)
    for cuts in ([[1, 5]], [[1], [5]], [[2, 4]]):
        for name, found in seen(cuts, rows=5).items():
            if not torch.allclose(found, part[name], rtol=1e-12, atol=1e-12):
                yield f"{name or 'the model'} of {cuts}, of the first five positions"


test_a_mutant_is_found = finds(
    "The comparator: forwards in 16 bits",
    wrong_sketches="""
        what is computed again counts again: A call in the backward counts as one more
            probe.step_checks.local.ForwardWatch._hook: name in self._called or =>
        of the last microbatch: Sketches of a microbatch replace those of the one before
            probe.step_checks.local.ForwardWatch._look: torch.float64)) + row => torch.float64)) * 0 + row
        every microbatch is the first: Microbatches begin where the first one does
            probe.step_checks.local.ForwardWatch._new: self.next += inputs
            => self.next = self.next if self.next else inputs
        every rank is the first: A rank's place is not looked at
            probe.step_checks.local.ForwardWatch.__init__: min(rows, ROWS), first => min(rows, ROWS), 0
        every microbatch is cut alike: Positions beyond those that are looked at are looked at too
            probe.step_checks.local.ForwardWatch._look: min(self._begin + count, self.rows)
            => self._begin + min(count, self.rows)
    """,
)
