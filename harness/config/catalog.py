"""What can be chosen: groups and their options, as files of `conf/` and `sweeps/`, and faults as code declares them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from harness.config.faults import NONE, corpus

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: `conf/` and `sweeps/` lie beside the package."""

NULLABLE = ("study", "experiment", "debug")
"""Groups that need no option."""


@dataclass(frozen=True)
class Catalog:
    """Options of each group, by name."""

    options: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[str, ...]:
        """Every group, in alphabetical order."""
        return tuple(sorted(self.options))

    def groups_with(self, option: str) -> list[str]:
        """Groups that have an option of this name."""
        return [group for group in self.groups if option in self.options[group]]


@functools.cache
def load_catalog() -> Catalog:
    """Read the names of all options."""
    folders = [p for p in (ROOT / "conf").iterdir() if p.is_dir()]
    named = {"study": _stems(ROOT / "sweeps"), "fault": tuple(sorted((*corpus(), NONE)))}
    return Catalog({folder.name: _stems(folder) for folder in folders} | named)


def _stems(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(p.stem for p in folder.glob("*.yaml")))
