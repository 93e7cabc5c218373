"""Rules of faults: a known sample that fits engine and mesh, and begins within the run."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.catalog import ROOT
from harness.config.errors import Violation
from harness.config.hints import nearest
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import NO_FAULT, EngineName


@rule("fault.name", "engine.name", "mesh.tp")
def sample_acts(request: Request) -> Iterator[Violation]:
    config = request.config
    name, subject = config.fault.name, request.show("fault.name")
    if name == NO_FAULT or ":" in name:
        return
    samples = sorted(path.stem for path in (ROOT / "conf" / "fault").glob("*.yaml"))
    if name not in samples:
        near = nearest(name, samples)
        fix = f"did you mean fault={near[0]}?" if near else "fault.name=package.module:function"
        yield Violation(subject, "is no sample", f"{', '.join(samples)}, or package.module:function", fix)
    elif config.engine.name is not EngineName.native:
        text = f"is put into our own engine, and engine={config.engine.name.name} is another"
        yield Violation(subject, text, fix="engine=native")
    elif config.mesh.tp > 1:
        yield Violation(subject, f"is not implemented with mesh.tp={config.mesh.tp}", fix="mesh.tp=1")


@rule("fault.begins_at", "train.steps")
def fault_begins(request: Request) -> Iterator[Violation]:
    begins, steps = request.config.fault.begins_at, request.config.train.steps
    if begins > steps:
        text, path = f"begins after the run has ended, train.steps={steps}", "fault.begins_at"
        yield Violation(request.show(path), text, f"1 to {steps}", f"{path}={steps}")


RULES: tuple[Rule, ...] = (sample_acts, fault_begins)
