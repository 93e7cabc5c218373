"""A run against its baseline: made, judged as any two runs are, and refreshed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.config.errors import refuse
from harness.parity import baseline
from harness.parity.compare import compare, compare_versions
from harness.parity.outcome import Finding, Verdict, percent
from harness.parity.record import Record, load
from harness.store import commands
from harness.store.rundir import RunDir

PRIVATE = ("launch", "wandb", "notes", "hosts", "submit_host", "created", "git", "platform", "own", "environment")
"""Groups of settings and facts of the origin that say who ran it and where, and change no number."""
SUMMARY = ("initial_weights", "final_weights", "decayed", "other_replicas", "restored")


def made(run: Path) -> bytes:
    """A run's baseline.

    Raises `BadRequest`: the run is not whole, or does not fit. `StoreError`: it is no run.
    """
    record = load(run)
    if record.problems:
        fix = f"a finished run; {commands.verb(f'show {commands.shown(run)}')}"
        raise refuse(f"baseline {record.name}", record.problems[0], fix=fix)
    if record.stream is None:
        problem = "has no sketches of its tensors, so that its baseline could find little"
        raise refuse(f"baseline {record.name}", problem, fix="run it with measure.step_checks=true")
    return baseline.encoded(record.name, _facts(record), record.stream)


def _facts(run: Record) -> dict[str, Any]:
    origin = {key: value for key, value in run.provenance.items() if key not in PRIVATE}
    environment = run.provenance.get("environment") or {}
    origin["environment"] = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}
    origin["own"] = [{key: each[key] for key in ("name", "kind", "digest")} for each in run.provenance.get("own", ())]
    config = {key: value for key, value in run.config.items() if key.partition(".")[0] not in PRIVATE}
    config |= {"measure.capture_steps": [], "measure.update_steps": []}  # whole tensors stay with the run
    summary = {key: run.summary[key] for key in SUMMARY if key in run.summary}
    parts = {key: getattr(run, key) for key in ("columns", "moves", "draws", "attempts")}
    forward = None if run.forward is None else asdict(run.forward)
    return {"config": config, "provenance": origin, "summary": summary, "forward": forward, **parts}


def gate(run: Path, golden: Path, *, bitwise: bool = False) -> Verdict:
    """Verdict on a run against a baseline: of this harness's own runs as on two versions of the code.

    Args: bitwise: bits are owed wherever one code would owe them.

    Raises `BadRequest`, `StoreError`: as `compare`.
    """
    if load(golden).is_watched or load(run).is_watched:
        if bitwise:
            raise refuse("--bitwise", "another program promises no bits", fix="leave it out")
        return compare(run, golden)
    return compare_versions(run, golden, (RunDir(run).name, golden.name), bitwise=bitwise, one_request=False)


def changes(verdict: Verdict, run: Path, golden: Path) -> list[tuple[str, str, str, str]]:
    """Rows of a refresh: name, before and after; of a measured difference its size and its part of the bound."""
    old, new = load(golden), load(run)
    measured = [
        (_named(found), "", f"off by {percent(found.observed)}", percent(found.ratio))
        for found in verdict.evidence
        if verdict.tier != "T0" and isinstance(found.observed, float) and isinstance(found.allowed, float)
        and found.observed
    ]  # fmt: skip
    facts = [_shown(each) for each in (old, new)]
    pairs = [(key, *(str(each.get(key, "(absent)")) for each in facts)) for key in {**facts[0], **facts[1]}]
    return [*measured, *((key, left, right, "") for key, left, right in pairs if left != right)]


def _named(found: Finding) -> str:
    where = [*([f"step {found.step}"] if found.step is not None else []), *([found.tensor] if found.tensor else [])]
    return f"{found.check} ({', '.join(where)})" if where else found.check


def _shown(run: Record) -> dict[str, Any]:
    """Settings, versions, last numbers and digests of a run."""
    hidden = (*PRIVATE, "measure", "run", "study")
    config = {key: value for key, value in run.config.items() if key.partition(".")[0] not in hidden}
    versions = {f"{name} version": each for name, each in (run.provenance.get("versions") or {}).items()}
    numbers = {f"last {key}": run.columns[key][-1] for key in ("loss", "grad_norm") if run.length}
    digests = {key: str(run.summary.get(key))[:16] for key in ("initial_weights", "final_weights")}
    return {**config, **versions, "cpu_model": run.provenance.get("cpu_model"), **numbers, **digests}
