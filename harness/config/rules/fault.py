"""A fault is known, and acts in the cell it is put into: an injected fault that does nothing teaches nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from harness.config.derived import microbatches_per_rank
from harness.config.errors import Violation
from harness.config.faults import NONE, corpus
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import EngineName


@rule("train.global_batch_size", "train.microbatch_size", "mesh.world_size")
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
    if fault.microbatches > microbatches_per_rank(config):
        text = f"needs {fault.microbatches} microbatches a rank and step"
        half = max(1, config.train.microbatch_size // 2)
        yield Violation(request.show("fault.name"), text, fix=f"train.microbatch_size={half}")


RULES: tuple[Rule, ...] = (fault_acts,)
