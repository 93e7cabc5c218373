"""Workload of each model family."""

from __future__ import annotations

from importlib import import_module

from harness.config.schema import Config, ModelFamily
from harness.models.workload import TokenWorkload

WORKLOADS = {
    ModelFamily.llama: "harness.models.workload:LlamaWorkload",
    ModelFamily.moe: "harness.models.moe:MoeWorkload",
    ModelFamily.odd: "harness.models.odd:OddWorkload",
}


def workload_for(config: Config) -> TokenWorkload:
    """Raises `ValueError`: model.family=ext without a target."""
    own = config.model.family is ModelFamily.ext
    if own and config.model.target is None:
        raise ValueError("model=ext needs model.target=package.module:Class")
    module, _, name = str(config.model.target if own else WORKLOADS[config.model.family]).partition(":")
    workload: TokenWorkload = getattr(import_module(module), name)(config)
    return workload
