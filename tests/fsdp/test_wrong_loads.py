"""An engine that loads a checkpoint wrongly is caught by a cell of tests/checkpoint/test_matrix.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from harness.fsdp.storage import dtensors
from harness.fsdp.storage.layout import LocalSlice, Slot
from tests.support.layouts import SINGLE, Cell, Layout, read_all, write_all, write_reference
from tests.support.mutants import Slip, each, slips
from tests.support.spawn import run_ranks

Saved = tuple[Path, dict[str, Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder with the reference and a checkpoint of one process, for reading alone; weights after one more update."""
    root = tmp_path_factory.mktemp("saved")
    after = write_reference(0, root / "reference")
    run_ranks(write_all, 1, root, [SINGLE])
    return root, after


TARGET = Layout("native", "optim", 3)
_ROWS = dtensors._rows


def _swapped(slot: Slot, local: LocalSlice) -> tuple[int, int]:
    """Rows of a matrix numbered from its end: no overlap and no hole, so that nothing but the elements shows it."""
    begin, end = _ROWS(slot, local)
    rows = slot.spec.shape[0]
    return (rows - end, rows - begin) if len(slot.spec.shape) == 2 and begin < end else (begin, end)


MUTANTS = slips(
    """
    counters kept: Counters of steps are copied, and a load leaves them as they are
        fsdp.module.optimizer_entries: value.detach() => value.detach() if value.dim() else value.clone()
    weights not installed: Loaded weights do not reach compute weights that are kept
        fsdp.storage.param_group.ParamGroup.is_stale: False
    first moments alone: Second moments are not loaded
        fsdp.module.optimizer_entries: owner[id(param)].state.get(param) or {}
            => {n: v for n, v in owner[id(param)].state[param].items() if n != "exp_avg_sq"}
    """
) | {
    "rows of the neighbour": Slip(
        dtensors, "_rows", "", lambda _: _swapped, "Rows of a matrix are numbered from its end"
    )
}


def loaded_by_a_mutant(rank: int, root: Path, how: str, after: dict[str, Tensor]) -> list[Cell]:
    with MUTANTS[how].patched():
        try:
            return [*read_all(rank, root, [(TARGET, [SINGLE])], after)]
        except ValueError as error:
            if "nothing was loaded" not in str(error):
                raise
            return []


@pytest.mark.parametrize("how", each("The engine, by saved state", MUTANTS))
def test_an_engine_that_loads_wrongly_is_caught(saved: Saved, how: str) -> None:
    root, after = saved
    cells = run_ranks(loaded_by_a_mutant, 3, root, how, after)
    assert not any(cell.holds for of_rank in cells for cell in of_rank)


def test_without_a_mutant_the_same_cell_holds(saved: Saved) -> None:
    root, after = saved
    cells = run_ranks(read_all, 3, root, [(TARGET, [SINGLE])], after)
    assert all(cell.holds for of_rank in cells for cell in of_rank)
