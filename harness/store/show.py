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
NODES = (("on", "SLURM_JOB_NODELIST"), ("partition", "SLURM_JOB_PARTITION"))


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
    found, facts = status.effective(run.path, jobs), provenance.read(run.path)
    place = facts.get("environment", {})
    nodes = [f"{word} {place[name]}" for word, name in NODES if name in place]
    machine = [", ".join(dict.fromkeys(facts.get("hosts", ()))), facts.get("cpu_model"), facts.get("device")]
    fields = {
        "signature": run.signature(),
        "state": "new, never started" if found is None else f"{found.state.value}: {found.reason}",
        "job": ", ".join([found.job, *nodes]) if found and found.job else "",
        "attempts": _attempts(run.attempts()),
        "wandb": found.wandb if found else "",
        "record": checksums.condition(run.path),
        "asked": " ".join(run.overrides()),
        "notes": run.config().get("notes"),
        "code": _code(facts) if facts else "",
        "stale": "the sources that can change its numbers are others now" * provenance.is_stale(run.path),
        "versions": ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items()),
        "machine": "; ".join(map(str, machine)) if "hosts" in facts else "",
        **_progress(run),
    }
    lines = [line for name, text in fields.items() if text for line in _field(name, text)]
    return "\n".join([str(run.path), *lines, *_report(run, found)])


def _report(run: RunDir, found: status.Status | None) -> list[str]:
    if found is None or found.state is State.done:
        return []
    try:
        report = read_text(run.attempt_dir(found.attempt) / REPORT)
    except StoreError as error:
        return _field("report", error)
    return [] if report is None else ["", report.rstrip()]


def _field(name: str, text: object) -> list[str]:
    return screen.fold(f"  {name:<10} {text}", screen.width(), " " * 13)


def _code(facts: Mapping[str, Any]) -> str:
    if (series := facts.get(provenance.SERIES)) is not None:
        named = ", ".join(f"{name} is {column}" for name, column in series["columns"].items())
        return f"another program; {series['kind']} file {series['file']}: {named}"
    if provenance.WATCHED in facts:
        return "another program, whose loop harness.capture recorded"
    git = facts.get("git") or {}
    return (git["sha"][:12] if git else "no repository") + " with local changes (diff.patch)" * bool(git.get("dirty"))


def _progress(run: RunDir) -> dict[str, str]:
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
    return {name: ", ".join(texts) for name, texts in told.items()} | _network(summary)


def _network(summary: Mapping[str, Any]) -> dict[str, str]:
    """Requested and effective settings of NCCL: `auto -> none (why)`."""
    told = {}
    for name, entry in (summary.get("network") or {}).items():
        if name != "nccl" and (entry["requested"] not in ("none", "default") or entry["effective"] != "none"):
            reason = f" ({entry['reason']})" if entry.get("reason") else ""
            told[name] = f"{entry['requested']} -> {entry['effective']}{reason}"
    return told


ALIKE = "no difference in configuration, sources, versions or machine"


def diff(a: RunDir, b: RunDir) -> str:
    """Differences of two runs: configuration, sources, versions and machine; one line each, `key: a -> b`.

    Raises `StoreError`: the record of one is damaged.
    """
    for run in (a, b):
        checksums.demand(run.path, CONFIG, run.provenance.name)
    configured = _pairs(flatten(a.config()), flatten(b.config()))
    sections = {"configuration": configured, "origin": _pairs(_comparable(a), _comparable(b))}
    room, lines = screen.width(), list[str]()
    for title, pairs in sections.items():
        rows = (f"  {key}: {_text(left, room)} -> {_text(right, room)}" for key, left, right in pairs)
        if pairs:
            lines += [f"{title}:", *(line for each in rows for line in screen.fold(each, room, " " * 6)), ""]
    return "\n".join([f"a  {a.path}", f"b  {b.path}", "", *(lines or [ALIKE])]).rstrip()


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
