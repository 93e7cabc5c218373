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
        yield Violation(request.show("fault.name"), "is not a known fault", ", ".join(near), f"fault={near[0]}")
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


@rule("fault.begins_at", "train.steps", "fault.name")
def fault_begins(request: Request) -> Iterator[Violation]:
    """A fault that begins at some step has that step, and no moment of its own to act at."""
    config, path = request.config, "fault.begins_at"
    begins, fault = config.fault.begins_at, corpus().get(config.fault.name)
    if begins == 1 or fault is None:
        return
    if fault.resumes or fault.ends:
        moment = "when a run is resumed" if fault.resumes else "when the last step is done"
        yield Violation(request.show(path), f"is no step of {fault.name}, which acts {moment}", "1", f"{path}=1")
    elif begins > config.train.steps:
        text, steps = "begins after the run has ended", config.train.steps
        yield Violation(request.show(path), f"{text}, train.steps={steps}", f"1 to {steps}", f"{path}={steps}")


RULES: tuple[Rule, ...] = (fault_acts, fault_begins)
