"""Bounds for a model of the user's own, from a perturbed reference among neighbouring runs, or none.

Roundings of a foreign model are not counted, so their effect must be observed: by a run of `experiment=oracle`, one
fp64 process that repeats its first step with an error after every operation (`harness.probe.rounding`). One run serves
every pair with the same weights and first batch.
"""

from __future__ import annotations

from dataclasses import replace

from harness.config.schema import ModelFamily
from harness.parity.outcome import Finding, Grade, Stage
from harness.parity.record import Record, load
from harness.store.errors import StoreError

BOUNDS = "verdict bounds"


def with_reach(arm: Record, control: Record) -> Record:
    if control.config.get("model.family") != ModelFamily.ext.name or arm.moves or control.moves:
        return control
    folders = dict.fromkeys((control.path.parent, arm.path.parent))
    paths = [path for folder in folders for path in sorted(folder.glob("*/capture/rounding-000001.json"))]
    for path in paths:
        try:
            found = load(path.parents[1])
        except StoreError:
            continue
        if found.moves and _facts(found) == _facts(control):
            return replace(control, moves=found.moves, draws=found.draws)
    return control


def _facts(run: Record) -> tuple[object, ...]:
    own = [(each["kind"], each["digest"]) for each in run.provenance.get("own", ()) if each["kind"] == "model"]
    first = run.columns["data_digest"][0] if run.length else None
    return (run.provenance.get("sources_digest"), own, run.summary.get("initial_weights"), first)


def unbounded(arm: Record) -> Finding:
    model = arm.config.get("model.target")
    note = (
        f"nothing says how far rounding moves {model}; run its reference in double precision first, which any verdict "
        "on the same model, seed and data then uses"
    )
    return Finding("T0", BOUNDS, Stage.record, Grade.bad, "unknown", "known", note=note)
