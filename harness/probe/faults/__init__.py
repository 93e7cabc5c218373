"""Faults on purpose: what `fault=NAME` does to the engine, through hooks that no normal run has. One function a fault,
a file a part of the step; the decorator `@fault(...)` says what the fault is, and nothing else in the repository does.

`inject` is called by the worker after the engine is built, and only where a fault is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from harness.probe.faults.site import INJECTORS, Site

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")


def inject(session: Any) -> Any:
    """Put the configured fault into the engine of a session (`harness.train.Session`) that has not begun; returns the
    session to run, in which the fault is told when steps begin and end.

    Raises:
        KeyError: there is no such fault.
    """
    site = Site(session.config, session.engine, session.ranks.rank, session.ranks.world_size, session.loader)
    INJECTORS[session.config.fault.name](site)

    def progress(told: Any) -> None:
        site.end(told.step)
        session.progress(told)

    return replace(session, begins=site.begin, progress=progress)


__all__ = ["INJECTORS", "Site", "inject"]
