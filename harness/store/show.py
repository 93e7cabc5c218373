"""A run, and differences of two runs, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.store import checksums, identity, provenance, screen, status
from harness.store.errors import StoreError
from harness.store.failure import REPORT
from harness.store.reading import read_text
from harness.store.results import results
from harness.store.rundir import CONFIG, RunDir, flatten, read_summary
from harness.store.status import JobProbe, State

TOLD = (
    ("step", "steps_done", "{steps_done} of {steps}"),
    ("step", "final_loss", "loss {final_loss} nats a token"),
    ("ms/step", "ms", "{ms:.1f}"),
    ("speed", "tokens_per_s", "{tokens_per_s:,.0f} tokens/s"),
    ("speed", "tflops_per_rank", "{tflops_per_rank:.3g} TFLOP/s a rank"),
    ("speed", "mfu", "MFU {mfu:.1%}"),
    ("held out", "perplexity", "loss {loss:.6g}, perplexity {perplexity:.6g}"),
    ("held out", "best_loss", "lowest loss {best_loss:.6g} at step {best_step:.0f}"),
    ("weights", "final_weights", "{final_weights} at the end"),
    ("wall", "wall_s", "{wall_s:.1f} s"),
    ("kept", "accounted_bytes", "{accounted_bytes:,} bytes"),
    ("kept", "planned_kept_bytes", "{planned_kept_bytes:,} planned"),
    ("kept", "roles", "of it {roles}"),
    ("peak", "peak_bytes", "{peak_bytes:,.0f} bytes"),
    ("peak", "planned_peak_bytes", "{planned_peak_bytes:,} planned"),
    ("sent", "sent_bytes", "{sent_bytes:,} bytes by rank 0 in the last step"),
    ("sent", "planned_sent_bytes", "{planned_sent_bytes:,} planned"),
    ("plan", "leaves_plan", "{leaves_plan}"),
    ("engine", "engine", "{engine}"),
)
"""Name, needed fact and text of what is shown of a run's results; texts of one name make one line."""


def show(run: RunDir, jobs: JobProbe | None = None) -> str:
    """One screen: identity, state, origin, progress, results, failure.

    Raises `StoreError`: a file cannot be read, with its damage where known.
    """
    try:
        return _shown(run, jobs)
    except StoreError:
        checksums.demand(run.path)
        raise


def _attempts(numbers: Sequence[int]) -> str:
    """How many there are, and their folders."""
    folders = " to ".join(f"attempts/{number}" for number in sorted({*numbers[:1], *numbers[-1:]}))
    return f"{len(numbers)} ({folders})" if numbers else "none"


def _shown(run: RunDir, jobs: JobProbe | None) -> str:
    found = status.effective(run.path, jobs)
    lines = [
        str(run.path),
        _field("signature", run.signature()),
        _field("state", "new, never started" if found is None else f"{found.state.value}: {found.reason}"),
        *_job(run, found),
        _field("attempts", _attempts(run.attempts())),
        *([_field("wandb", found.wandb)] if found is not None and found.wandb else []),
        *([_field("record", condition)] if (condition := checksums.condition(run.path)) else []),
        *(_field("asked", override) for override in run.overrides()),
        *([_field("notes", notes)] if (notes := run.config().get("notes")) else []),
        *_origin(run),
        *_progress(run),
    ]
    return "\n".join([*lines, *_report(run, found)])


def _report(run: RunDir, found: status.Status | None) -> list[str]:
    if found is None or found.state is State.done:
        return []
    try:
        report = read_text(run.attempt_dir(found.attempt) / REPORT)
    except StoreError as error:
        return [_field("report", error)]
    return [] if report is None else ["", report.rstrip()]


def _job(run: RunDir, found: status.Status | None) -> list[str]:
    if found is None or not found.job:
        return []
    facts = provenance.read(run.path).get("environment", {})
    where = {"on": facts.get("SLURM_JOB_NODELIST"), "partition": facts.get("SLURM_JOB_PARTITION")}
    places = "".join(f", {name} {value}" for name, value in where.items() if value)
    return [_field("job", f"{found.job}{places}")]


def _field(name: str, value: object) -> str:
    return "\n".join(screen.fold(f"  {name:<10} {value}", screen.width(), " " * 13))


def _origin(run: RunDir) -> list[str]:
    facts = provenance.read(run.path)
    if not facts:
        return []
    git = facts.get("git") or {}
    if (series := facts.get(provenance.SERIES)) is not None:
        named = ", ".join(f"{name} is {column}" for name, column in series["columns"].items())
        return [_field("code", f"another program; {series['kind']} file {series['file']}: {named}")]
    if provenance.WATCHED in facts:
        return [_field("code", "another program, whose loop harness.capture recorded"), *_machine(facts)]
    code, dirty = git["sha"][:12] if git else "no repository", bool(git.get("dirty"))
    lines = [_field("code", code + " with local changes (diff.patch)" * dirty)]
    if provenance.is_stale(run.path):
        lines.append(_field("stale", "the sources that can change its numbers are others now"))
    return [*lines, *_machine(facts)]


def _machine(facts: Mapping[str, Any]) -> list[str]:
    versions = facts.get("versions", {})
    lines = [_field("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))]
    if "hosts" in facts:
        hosts = ", ".join(dict.fromkeys(facts["hosts"]))
        lines.append(_field("machine", f"{hosts}; {facts.get('cpu_model')}; {facts.get('device')}"))
    return lines


def _progress(run: RunDir) -> list[str]:
    summary = read_summary(run) or {}
    facts = results(run) | {"steps": run.setting("train.steps"), "final_weights": summary.get("final_weights")}
    facts["ms"] = 1e3 * (facts["step_time_s"] or 0.0)
    facts |= {name: float(value) for name, value in (summary.get("validation") or {}).items()}
    facts["roles"] = ", ".join(f"{role} {count:,}" for role, count in (summary.get("accounted_bytes") or {}).items())
    facts["engine"] = ", ".join(f"{name}: {value}" for name, value in (summary.get("engine") or {}).items())
    told: dict[str, list[str]] = {}
    for name, needed, text in TOLD:
        if facts.get(needed):
            told.setdefault(name, []).append(text.format_map(facts))
    return [*(_field(name, ", ".join(texts)) for name, texts in told.items()), *_network(summary)]


def _network(summary: Mapping[str, Any]) -> list[str]:
    """Requested and effective settings of NCCL: `auto -> none (why)`."""
    lines = []
    for name, entry in (summary.get("network") or {}).items():
        if name != "nccl" and (entry["requested"] not in ("none", "default") or entry["effective"] != "none"):
            reason = f" ({entry['reason']})" if entry.get("reason") else ""
            lines.append(_field(name, f"{entry['requested']} -> {entry['effective']}{reason}"))
    return lines


ALIKE = "no difference in configuration, sources, versions or machine"


def diff(a: RunDir, b: RunDir) -> str:
    """Differences of two runs: configuration, sources, versions and machine; one line each, `key: a -> b`.

    Raises `StoreError`: the record of one is damaged.
    """
    for run in (a, b):
        checksums.demand(run.path, CONFIG, run.provenance.name)
    lines = [f"a  {a.path}", f"b  {b.path}", ""]
    begin = len(lines)
    configured = _pairs(flatten(a.config()), flatten(b.config()))
    sections = {"configuration": configured, "origin": _pairs(_comparable(a), _comparable(b))}
    room = screen.width()
    for title, pairs in sections.items():
        rows = (f"  {key}: {_text(left, room)} -> {_text(right, room)}" for key, left, right in pairs)
        if pairs:
            lines += [f"{title}:", *(line for each in rows for line in screen.fold(each, room, " " * 6)), ""]
    if len(lines) == begin:
        lines.append(ALIKE)
    return "\n".join(lines).rstrip()


def _comparable(run: RunDir) -> dict[str, Any]:
    """Origin of a run without what always differs, such as the numbers of jobs."""
    facts = flatten(provenance.read(run.path)).items()
    apart = ("environment.SLURM_", "created")
    return {key: value for key, value in facts if not key.startswith(apart) and value != {}}


def _pairs(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys that differ. What the signature leaves out comes last: it seldom explains a number."""
    keys = sorted({*left, *right}, key=lambda key: (key.split(".")[0] in identity.EXCLUDED, key))
    pairs = ((key, left.get(key, "(absent)"), right.get(key, "(absent)")) for key in keys)
    return [pair for pair in pairs if pair[1] != pair[2]]


def _text(value: Any, room: int) -> str:
    return screen.shorten(value if isinstance(value, str) else json.dumps(value), max(20, min(80, room - 8)))
