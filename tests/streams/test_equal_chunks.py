"""NCCL moves equal chunks: buckets that the ranks do not divide are copied, and nothing of them is lost or made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.fsdp.comm.parts import Cut, Evened, Part
from tests.streams.cases import Case
from tests.streams.test_races import check
from tests.streams.visits import run_all
from tests.support.mutants import each
from tests.support.spawn import run_ranks

CASE = Case("no_shard", "no_shard", more="inner axis of three ranks", k=2)
"""Three ranks reduce-scatter and gather whole buckets."""
CUTS = st.one_of(
    st.builds(
        lambda size, lengths: Cut.at([min(rank * lengths[0], lengths[1]) for rank in range(size + 1)]),
        st.integers(1, 9),
        st.tuples(st.integers(1, 5), st.integers(0, 45)),
    ),
    st.builds(
        lambda size, length, gap, begin: Cut(
            (begin + rank * (length + gap), begin + rank * (length + gap) + length) for rank in range(size)
        ),
        st.integers(1, 9),
        st.integers(0, 5),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.builds(
        lambda lengths: Cut.at([sum(lengths[:end]) for end in range(len(lengths) + 1)]),
        st.lists(st.integers(0, 5), min_size=1, max_size=9),
    ),
)
"""Short at the end, with gaps between, and of any lengths."""


@given(CUTS)
def test_equal_chunks_begin_with_what_each_rank_has(cut: Cut) -> None:
    given_ = Part(torch.arange(1.0, 1 + max(end for _, end in cut.spans)), cut)
    size = len(cut.sizes)
    chunks = [given_.chunk(rank).clone() for rank in range(size)]
    assert torch.equal(given_.closed_up, torch.cat(chunks))
    evened = Evened.all_of([given_])
    if evened is None:
        assert len(set(cut.sizes)) > 1
        return
    (made,) = evened
    assert made.part.cut.is_even
    assert made.is_copy or made.part.tensor.data_ptr() == given_.chunk(0).data_ptr() or not any(cut.sizes)
    made.copy_in()
    assert all(torch.equal(made.part.chunk(rank)[: len(chunk)], chunk) for rank, chunk in enumerate(chunks))
    for rank, chunk in enumerate(chunks):  # one alone
        made.part.chunk(rank)[: len(chunk)] = -chunk
        made.copy_back(rank)
        assert torch.equal(given_.chunk(rank), -chunk)
        given_.chunk(rank).copy_(3 * chunk)
        made.copy_in(rank)
    if made.is_copy:
        given_.tensor.zero_()
        made.copy_back()
    assert torch.equal(given_.closed_up, 3 * torch.cat(chunks))


MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "not copied in": (
        "What is gathered into a longer buffer is not put there",
        lambda: mock.patch.object(Evened, "copy_in"),
    ),
    "not copied back": (
        "What came into a longer buffer stays there",
        lambda: mock.patch.object(Evened, "copy_back"),
    ),
}


def _with_mistake(rank: int, name: str) -> Any:
    with MISTAKES[name][1]():
        return run_all(rank, [CASE], False)


@pytest.mark.parametrize("name", each("The engine where chunks differ", [(n, m[0]) for n, m in MISTAKES.items()]))
def test_a_mistake_is_found(name: str) -> None:
    found = [of_rank[0] for of_rank in run_ranks(_with_mistake, CASE.world, name)]
    with pytest.raises(AssertionError, match=r"weight|sums|gradients"):
        check(CASE, found)
