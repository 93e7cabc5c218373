"""An FSDP engine: ZeRO 0-3 over flat, row-preserving shards, on gloo and NCCL. It imports torch and nothing else.

Names are imported on first use, so that `harness.fsdp.storage.layout` stays free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "ShardedModel": "model",
    "fully_shard": "api",
    "fully_shard_model": "api",
    "fully_shard_optimizer": "api",
    "MixedPrecisionPolicy": "policy",
    "Groups": "comm.mesh",
    "Numerics": "vocabulary",
    "Options": "options",
    "OuterStrategy": "vocabulary",
    "Strategy": "vocabulary",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
