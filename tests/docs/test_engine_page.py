"""docs/engine.md says what the engine does: its tables are made again, its code is run, its formulas are tested."""

from __future__ import annotations

import pytest

from benchmarks.fsdp import engine_page
from benchmarks.fsdp.engine_formulas import Axis, Setup, kept, sent
from tests.fsdp import test_communication as counted


def test_the_page_is_what_the_engine_does_and_its_code_runs() -> None:
    page = engine_page.PAGE.read_text()
    assert engine_page.render(page) == page, "run: python benchmarks/fsdp/engine_page.py"


@pytest.mark.parametrize("case", counted.CASES, ids=counted.name_of)
def test_the_formulas_are_those_that_are_counted_to_the_byte(case: counted.Case) -> None:
    inner = case.world_size // case.outer
    w, c = counted.B_W[case.dtype], counted.B_G[case.dtype]
    s = Setup(case.strategy, case.outer_strategy, inner, case.outer, case.k, w=w, c=c, g=counted.B_MAIN_GRAD)
    numel = 5040 * inner
    for last in (False, True):
        rows = counted.expected(case, "unit", numel, numel, "unit" if last else "other")
        outside = sum(sent for (name, _), (_, sent) in rows.items() if name.endswith(counted.OUTER))
        inside = sum(sent for _, sent in rows.values()) - outside
        assert sent(s, Axis.inner, numel, numel if last else 0) * case.world_size == pytest.approx(inside)
        assert sent(s, Axis.outer, numel) * case.world_size == pytest.approx(outside)


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
@pytest.mark.parametrize("inner", counted.STRATEGIES)
def test_state_is_split_by_every_axis_that_splits(inner: str, outer: str) -> None:
    """What `tests/fsdp/test_communication.py` measures on ranks, in the same words."""
    found = kept(Setup(inner, outer, 2, 3), 600.0)
    by = (1 if inner == "no_shard" else 2) * (3 if outer == "optim" else 1)
    assert found["optimizer"] == 600 * 8 / by
    assert found["main_grads"] == 600 * 4 / (2 if inner.startswith("optim_grads") else 1)
