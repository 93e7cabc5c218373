"""The tours of docs/engine_alone.md: loops of other engines, before and after, run as printed, and compared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.fsdp.pairs import Block, Model
from tests.support.covering import once
from tests.support.spawn import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "engine_alone.md"
MOST_CHANGED = {"DDP": 2, "FSDP2": 4}
"""Lines of the other engine's loop that are not in ours."""
RANKS, STEPS = 2, 3


def batches_of(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        yield torch.randn(4, 6, generator=generator), torch.randint(2, (4,), generator=generator)


@once
def tours() -> dict[str, list[str]]:
    """Lines of each block of the page that says `diff`, by the word after that."""
    found = re.findall(r"^```diff (\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return {name: text.splitlines() for name, text in found}


def side(lines: list[str], sign: str) -> str:
    """A diff's text before ("-") or after ("+") the change."""
    return "\n".join(line[1:] for line in lines if line[:1] in (" ", sign, "")) + "\n"


def weights_of(model: Any) -> dict[str, Tensor]:
    if hasattr(model, "full_weights"):  # our engine's
        return dict(model.full_weights())
    named = getattr(model, "module", model).named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in named}


def drive(rank: int, texts: list[str]) -> list[dict[str, Tensor]]:
    """Run each text; the weights its model has in the end."""
    found = []
    for text in texts:
        space: dict[str, Any] = {"Model": Model, "Block": Block, "batches": list(batches_of(rank))}
        exec(text, space)
        found.append(weights_of(space["model"]))
    return found


@pytest.mark.parametrize("engine", MOST_CHANGED)
def test_few_lines_change(engine: str) -> None:
    lines = tours()[engine]
    taken, given = (sum(line.startswith(sign) for line in lines) for sign in "-+")
    assert 0 < max(taken, given) <= MOST_CHANGED[engine]


@pytest.mark.parametrize("engine", MOST_CHANGED)
def test_both_loops_run_as_printed_and_train_the_same(engine: str) -> None:
    texts = [side(tours()[engine], sign) for sign in "-+"]
    start = weights_of(Model())
    for before, after in run_ranks(drive, RANKS, texts):
        for name, weight in before.items():
            torch.testing.assert_close(after[name], weight, rtol=1e-5, atol=1e-6)
            assert not torch.equal(weight, start[name])
