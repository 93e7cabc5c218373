"""Faults on purpose: what `fault=NAME` does to the engine, through hooks that no normal run has. One function a fault,
a file a part of the step; the decorator `@fault(...)` says what the fault is, and nothing else in the repository does.

`inject` is called by the worker after the engine is built, and only where a fault is asked for.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from harness.config.schema import Config
from harness.probe.faults.site import INJECTORS, Site

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")


def inject(config: Config, engine: Any, rank: int, size: int) -> None:
    """Put the configured fault into an engine that was just built.

    Raises:
        KeyError: there is no such fault.
    """
    INJECTORS[config.fault.name](Site(config, engine, rank, size))


__all__ = ["INJECTORS", "Site", "inject"]
