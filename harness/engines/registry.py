"""Engines by name; a class is imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module

from harness.config.schema import EngineName
from harness.engines.protocol import Engine

ENGINES: dict[EngineName, str] = {
    EngineName.native: "harness.engines.adapters.native:NativeEngine",
    EngineName.fsdp2: "harness.engines.adapters.fsdp2:Fsdp2Engine",
    EngineName.fsdp1: "harness.engines.adapters.fsdp1:Fsdp1Engine",
    EngineName.megatron_fsdp: "harness.engines.adapters.megatron:MegatronEngine",
    EngineName.deepspeed: "harness.engines.adapters.deepspeed:DeepspeedEngine",
    EngineName.ddp: "harness.engines.adapters.ddp:DdpEngine",
    EngineName.single: "harness.engines.adapters.single:SingleEngine",
}
"""Where each engine lives, as `module:class`; `ext` is wherever `engine.adapter` says."""


def engine_class(name: EngineName, adapter: str | None = None) -> type[Engine]:
    """The class behind an engine's name; of `ext`, the one that `adapter` names as `package.module:Class`.

    Raises:
        ValueError: engine=ext without an adapter.
    """
    if name is EngineName.ext and adapter is None:
        raise ValueError("engine=ext needs engine.adapter=package.module:Class")
    module, _, attribute = (adapter if name is EngineName.ext and adapter else ENGINES[name]).partition(":")
    found: type[Engine] = getattr(import_module(module), attribute)
    return found
