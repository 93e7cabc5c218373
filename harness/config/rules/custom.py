"""Rules of a user's own engine, model, data, optimizer, callbacks and faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.config.capabilities import ENGINES
from harness.config.catalog import load_catalog
from harness.config.errors import Violation
from harness.config.hints import explain_option
from harness.config.own import described, trials
from harness.config.rules.request import Request, rule
from harness.config.schema import NO_FAULT, EngineName, OptimizerName


@rule()
def own_things_can_be_used(request: Request) -> Iterator[Violation]:
    yield from (found for found in trials(request.config).values() if isinstance(found, Violation))


@rule()
def parameters_are_counted(request: Request) -> Iterator[Violation]:
    if "model.parameters" in request.named:
        typed = request.named["model.parameters"]
        yield Violation(f"model.parameters={typed}", "is counted from the model and cannot be set", fix="leave it out")


@rule()
def the_engine_takes_the_optimizer(request: Request) -> Iterator[Violation]:
    config, name = request.config, request.config.optimizer.name.name
    if config.optimizer.name not in (OptimizerName.ext, OptimizerName.muon):
        return
    if not request.can.own_optimizers:
        takers = [f"engine={name.name}" for name, can in ENGINES.items() if can.own_optimizers]
        why = ", which steps parts of matrices, or adds their products in an order of its own" * (name == "muon")
        problem = f"is not taken by engine={config.engine.name.name}{why}"
        yield Violation(f"optimizer={name}", problem, ", ".join(takers), "engine=native, or optimizer=adamw")
        return
    found = described("optimizer", config)
    if found is not None and config.engine.name is EngineName.native and not found.answer["elementwise"]:
        yield Violation(
            f"optimizer.target={found.name}",
            "is not known to update each element on its own, and engine=native steps rows of parameters",
            fix="elementwise = True in the class if it does; needs_whole(param), if it needs some whole; or engine=ddp",
        )


@rule("fault.name", "engine.name", "mesh.tp")
def sample_acts(request: Request) -> Iterator[Violation]:
    config = request.config
    name, subject = config.fault.name, request.show("fault.name")
    if name == NO_FAULT or ":" in name:
        return
    if name not in load_catalog()["fault"]:
        yield replace(explain_option("fault", name), subject=subject)
    elif config.engine.name is not EngineName.native:
        text = f"is put into our own engine, and engine={config.engine.name.name} is another"
        yield Violation(subject, text, fix="engine=native")
    elif config.mesh.tp > 1:
        yield Violation(subject, f"is not implemented with mesh.tp={config.mesh.tp}", fix="mesh.tp=1")
