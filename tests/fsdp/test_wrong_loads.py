"""An engine that loads a checkpoint wrongly is caught by a cell of tests/checkpoint/test_matrix.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from harness.fsdp import state as states
from harness.fsdp.storage import dtensors
from harness.fsdp.storage.layout import LocalSlice, Slot
from harness.fsdp.storage.param_group import ParamGroup
from tests.support.layouts import SINGLE, Cell, Layout, read_all, write_all, write_reference
from tests.support.mutants import each
from tests.support.spawn import run_ranks

Saved = tuple[Path, dict[str, Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder with the reference and a checkpoint of one process, for reading alone; weights after one more update."""
    root = tmp_path_factory.mktemp("saved")
    after = write_reference(root / "reference")
    run_ranks(write_all, 1, root, [SINGLE])
    return root, after


TARGET = Layout("native", "optim", 3)
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "counters kept": (states, "optimizer_entries", lambda *args: _copies_of_counters(*args)),
    "weights not installed": (ParamGroup, "is_stale", False),
    "first moments alone": (states, "optimizer_entries", lambda *args: _first_moments(*args)),
    "rows of the neighbour": (dtensors, "_rows", lambda slot, local: _swapped(slot, local)),
}
_ROWS, _ENTRIES = dtensors._rows, states.optimizer_entries


def _first_moments(*args: Any) -> dict[str, Tensor]:
    return {key: value for key, value in _ENTRIES(*args).items() if not key.endswith("exp_avg_sq")}


def _copies_of_counters(*args: Any) -> dict[str, Tensor]:
    return {key: value if value.dim() else value.clone() for key, value in _ENTRIES(*args).items()}


def _swapped(slot: Slot, local: LocalSlice) -> tuple[int, int]:
    """Rows of a matrix numbered from its end: no overlap and no hole, so that nothing but the elements shows it."""
    begin, end = _ROWS(slot, local)
    rows = slot.spec.shape[0]
    return (rows - end, rows - begin) if len(slot.spec.shape) == 2 and begin < end else (begin, end)


def loaded_by_a_mutant(rank: int, root: Path, how: str, after: dict[str, Tensor]) -> list[Cell]:
    owner, name, wrong = MUTANTS[how]
    with mock.patch.object(owner, name, wrong):
        try:
            return [*read_all(rank, root, [(TARGET, [SINGLE])], after)]
        except ValueError as error:
            if "nothing was loaded" not in str(error):
                raise
            return []


@pytest.mark.parametrize("how", each("The engine, by saved state", ((name, f"loading: {name}") for name in MUTANTS)))
def test_an_engine_that_loads_wrongly_is_caught(saved: Saved, how: str) -> None:
    root, after = saved
    cells = run_ranks(loaded_by_a_mutant, 3, root, how, after)
    assert not any(cell.holds for of_rank in cells for cell in of_rank)


def test_without_a_mutant_the_same_cell_holds(saved: Saved) -> None:
    root, after = saved
    cells = run_ranks(read_all, 3, root, [(TARGET, [SINGLE])], after)
    assert all(cell.holds for of_rank in cells for cell in of_rank)
