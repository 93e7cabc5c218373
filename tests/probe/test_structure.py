"""Which tensors share memory: the engines' own never do, and those that were made to are named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.probe.witness import overlaps, untied


def test_neighbours_do_not_overlap_and_views_of_one_place_do() -> None:
    flat = torch.zeros(12)
    assert overlaps({"a": flat[:4], "b": flat[4:8], "c": flat[8:]}) == []
    assert overlaps({"a": flat[:5], "b": flat[4:8]}) == [("a", "b")]
    assert overlaps({"whole": flat, "b": flat[4:8], "c": torch.zeros(3)}) == [("whole", "b")]
    assert overlaps({"b": flat[4:8], "twice": flat[4:8]}) == [("b", "twice")]


def test_one_counter_may_serve_many() -> None:
    step = torch.zeros(())
    assert overlaps({"a/step": step, "b/step": step}) == []


class Tied(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, device="meta")
        self.head = nn.Linear(3, 5, bias=False, device="meta")
        if tie:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize(("fresh", "module", "found"), [(True, True, []), (False, False, []), (False, True, [])])
def test_what_is_tied_as_it_was_is_no_finding(fresh: bool, module: bool, found: list[str]) -> None:
    assert untied(Tied(fresh), Tied(module)) == found


def test_a_lost_tie_is_named_by_its_second_name() -> None:
    assert untied(Tied(True), Tied(False)) == ["head.weight"]


def test_a_parameter_that_is_gone_is_a_lost_tie() -> None:
    module = Tied(True)
    del module.head
    assert untied(Tied(True), module) == ["head.weight"]
