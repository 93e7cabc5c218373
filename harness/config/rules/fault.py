"""A fault is known, and acts in the cell it is put into: an injected fault that does nothing teaches nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from harness.config.derived import microbatches_per_rank
from harness.config.errors import Violation
from harness.config.faults import NONE, corpus
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import EngineName


@rule("train.global_batch_size", "train.microbatch_size", "mesh.world_size", "mesh.tp")
def fault_acts(request: Request) -> Iterator[Violation]:
    """The fault exists, is put into our own engine, and finds what it spoils."""
    config = request.config
    if config.fault.name == NONE:
        return
    fault = corpus().get(config.fault.name)
    if fault is None:
        near = difflib.get_close_matches(config.fault.name, corpus(), 3, 0.3) or list(corpus())[:3]
        yield Violation(request.show("fault.name"), "is no fault of the corpus", ", ".join(near), f"fault={near[0]}")
        return
    if config.engine.name is not EngineName.native:
        text = f"is put into our own engine, and engine={config.engine.name.name} is another"
        yield Violation(request.show("fault.name"), text, fix="engine=native")
        return
    if fault.strategies and config.sharding.strategy.name not in fault.strategies:
        text = f"does nothing under sharding={config.sharding.strategy.name}"
        yield Violation(
            request.show("fault.name"), text, ", ".join(fault.strategies), f"sharding={fault.strategies[0]}"
        )
    recipe = config.dtype.fp8
    if fault.recipes and (recipe is None or recipe.name not in fault.recipes):
        text = f"does nothing under dtype.fp8={'null' if recipe is None else recipe.name}"
        yield Violation(request.show("fault.name"), text, ", ".join(fault.recipes), f"dtype=fp8_{fault.recipes[0]}")
    if fault.tensor_parallel and config.mesh.tp == 1:
        text = "does nothing without tensor parallelism"
        yield Violation(request.show("fault.name"), text, "mesh.tp of 2 or more", "mesh.world_size=4 mesh.tp=2")
    if fault.microbatches > microbatches_per_rank(config):
        text = f"needs {fault.microbatches} microbatches a rank and step"
        half = max(1, config.train.microbatch_size // 2)
        yield Violation(request.show("fault.name"), text, fix=f"train.microbatch_size={half}")


RULES: tuple[Rule, ...] = (fault_acts,)
