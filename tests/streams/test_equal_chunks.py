"""NCCL moves equal chunks: buckets that the ranks do not divide are copied, and nothing of them is lost or made up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.streams.cases import Case
from tests.streams.test_races import check
from tests.streams.visits import run_all
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

CASE = Case("no_shard", "no_shard", more="inner axis of three ranks", k=2)
"""Three ranks reduce-scatter and gather whole buckets."""
MISTAKES = slips(
    """
    not copied in: What is gathered into a longer buffer is not put there
        fsdp.comm.communicator.Evened.copy_in: if self.is_copy: => if False:
    not copied back: What came into a longer buffer stays there
        fsdp.comm.communicator.Evened.copy_back: if self.is_copy: => if False:
    """
)


def _with_mistake(rank: int, name: str) -> Any:
    with MISTAKES[name].patched():
        return run_all(rank, [CASE], False)


@pytest.mark.parametrize("name", each("The engine where chunks differ", MISTAKES))
def test_a_mistake_is_found(name: str) -> None:
    found = [of_rank[0] for of_rank in run_ranks(_with_mistake, CASE.world, name)]
    with pytest.raises(AssertionError, match=r"weight|sums|gradients"):
        check(CASE, found)
