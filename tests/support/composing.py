"""`compose` for tests that ask for hundreds of cells: Hydra reads each choice of groups once, as in a study.

`tests/study/test_cells.py` holds that this is what Hydra itself gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from harness.config.catalog import ROOT
from harness.config.compose import Cell, register
from harness.config.overrides import check_overrides
from harness.study.cells import Composer


def compose(overrides: Sequence[str] = ()) -> Cell:
    """`harness.config.compose.compose`, with its refusals."""
    check_overrides(overrides)
    return _composer().cell(list(overrides))


@cache
def _composer() -> Composer:
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return Composer(loader, loader.load_configuration("config", [], RunMode.MULTIRUN))
