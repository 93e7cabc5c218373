"""Rules of a user's own model, data, optimizer and callbacks."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.adapter import capabilities_of
from harness.config.capabilities import ENGINES
from harness.config.errors import Violation
from harness.config.own import describe, described, targets
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import DataKind, EngineName, MeasureMode, ModelFamily, OptimizerName


@rule()
def own_things_are_named(request: Request) -> Iterator[Violation]:
    config = request.config
    for kind, asked, name in (
        ("model", config.model.family is ModelFamily.ext, config.model.target),
        ("data", config.data.kind is DataKind.ext, config.data.target),
        ("optimizer", config.optimizer.name is OptimizerName.ext, config.optimizer.target),
    ):
        if asked and name is None:
            fix = f"{kind}.target=package.module:Class"
            yield Violation(f"{kind}=ext", "needs a class of yours", fix, "see docs/own.md")


@rule()
def own_things_can_be_used(request: Request) -> Iterator[Violation]:
    for target in targets(request.config):
        found = describe(target, request.config)
        if isinstance(found, Violation):
            yield found


@rule()
def parameters_are_counted(request: Request) -> Iterator[Violation]:
    if "model.parameters" in request.named:
        typed = request.named["model.parameters"]
        yield Violation(f"model.parameters={typed}", "is counted from the model and cannot be set", fix="leave it out")


@rule()
def the_engine_takes_the_optimizer(request: Request) -> Iterator[Violation]:
    config = request.config
    if config.optimizer.name is not OptimizerName.ext:
        return
    if config.sharding.strategy not in capabilities_of(config).own_optimizers:
        whole = {name: set(can.own_optimizers) == set(can.strategies) for name, can in ENGINES.items()}
        takers = [
            f"engine={name.name}"
            + ("" if whole[name] else f" sharding={' or '.join(s.name for s in can.own_optimizers)}")
            for name, can in ENGINES.items()
            if can.own_optimizers
        ]
        yield Violation(
            "optimizer=ext",
            f"is not taken by engine={config.engine.name.name} sharding={config.sharding.strategy.name}",
            ", ".join(takers),
            "engine=native, or optimizer=adamw",
        )
        return
    found = described("optimizer", config)
    if found is not None and config.engine.name is EngineName.native and not found.told["elementwise"]:
        yield Violation(
            f"optimizer.target={found.name}",
            "is not known to update each element on its own, and engine=native steps flat pieces of parameters",
            fix="elementwise = True in the class if it does, or engine=ddp, engine=single",
        )


@rule()
def callbacks_are_not_timed(request: Request) -> Iterator[Violation]:
    config = request.config
    if config.measure.callbacks and config.measure.mode is MeasureMode.bench:
        yield Violation(request.show("measure.callbacks"), "would run between timed steps", fix="measure=default")


RULES: tuple[Rule, ...] = (
    own_things_are_named,
    own_things_can_be_used,
    parameters_are_counted,
    the_engine_takes_the_optimizer,
    callbacks_are_not_timed,
)
