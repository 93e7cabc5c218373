"""Engines by name; classes are imported at first use."""

from __future__ import annotations

from importlib import import_module

from harness.config import capabilities
from harness.config.schema import EngineName
from harness.engines.protocol import Engine

ENGINES: dict[EngineName, str] = {name: can.adapter for name, can in capabilities.ENGINES.items() if can.adapter}


def engine_class(name: EngineName, adapter: str | None = None) -> type[Engine]:
    """Raises `ValueError`: engine=ext without an adapter."""
    if name is EngineName.ext and adapter is None:
        raise ValueError("engine=ext needs engine.adapter=package.module:Class")
    module, _, attribute = (adapter if name is EngineName.ext and adapter else ENGINES[name]).partition(":")
    found: type[Engine] = getattr(import_module(module), attribute)
    return found
