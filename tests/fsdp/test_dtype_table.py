"""docs/dtypes.md says what the engine does today."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fsdp import dtype_table

ROOT = Path(__file__).parents[2]


def test_the_committed_table_is_what_is_observed() -> None:
    assert (ROOT / "docs" / "dtypes.md").read_text() == dtype_table.main(), (
        "run: python benchmarks/fsdp/dtype_table.py > docs/dtypes.md"
    )
