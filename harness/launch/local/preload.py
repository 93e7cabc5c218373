"""Imports for the server of which ranks are forks: no code of ours, which may change from run to run.

An import that fails here fails again in each rank, whose log has it.
"""

import contextlib
import importlib
import warnings

NAMES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "safetensors.torch",
    "pydantic",
)
"""Every optimizer imports `torch._dynamo` at its first step."""

with warnings.catch_warnings(), contextlib.suppress(Exception):
    warnings.simplefilter("ignore")
    for name in NAMES:
        importlib.import_module(name)
