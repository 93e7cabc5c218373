"""A run, and differences of two runs, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from harness.store import checksums, identity, provenance, screen, status
from harness.store.errors import StoreError
from harness.store.failure import REPORT
from harness.store.fields import with_unit
from harness.store.metrics import last_record
from harness.store.reading import read_text
from harness.store.rundir import CONFIG, RunDir, flatten, read_summary
from harness.store.status import JobProbe, State
from harness.store.step_time import beside_plan, leaves_plan, median_step_time, rates

SPEEDS = {"tokens": "{:,.0f} tokens/s", "tflops": "{:.3g} TFLOP/s a rank", "mfu": "MFU {:.1f} %"}


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


def _listed(name: str, values: Sequence[str]) -> list[str]:
    return [_field(name, ", ".join(values))] if values else []


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
    last, summary = last_record(run.metrics), read_summary(run)
    lines = []
    if last is not None:
        loss = with_unit("loss", last.get("loss"))
        lines.append(_field("step", f"{last['step']} of {run.setting('train.steps')}, loss {loss}"))
        counters = {name: value for name, value in last.get("counters", {}).items() if value is not None}
        lines += _listed(
            "counters", [f"{name} {with_unit(f'counters/{name}', each)}" for name, each in counters.items()]
        )
        seconds = median_step_time(run)
        if seconds is not None:
            lines.append(_field("ms/step", f"{1e3 * seconds:.1f}"))
            lines += _listed("speed", [SPEEDS[name].format(value) for name, value in rates(last, seconds).items()])
    if held_out := (summary or {}).get("validation"):
        text = "loss {loss:.6g}, perplexity {perplexity:.6g}; lowest loss {best_loss:.6g} at step {best_step:.0f}"
        lines.append(_field("held out", text.format(**{name: float(value) for name, value in held_out.items()})))
    if summary is not None:
        kept = ("final_weights", "wall_s")
        lines += [_field(key, _plain(summary[key])) for key in kept if summary.get(key)]
        for name, key in (("checks", "step_checks"), ("again", "worked_out_again")):
            if found := summary.get(key):
                now = "" if found.get("every", 1) == 1 else f", at the end two in {found['every']}"
                text = f"{screen.counted(found['steps'], 'step')} in {found['seconds']:.2f} s{now}"
                lines.append(_field(name, f"{text}, beside the steps' own time"))
        lines += _cost(summary) if summary.get("accounted_bytes") else []
    if traces := sorted(each.name for each in (run.path / "trace").glob("step-*")):
        lines.append(_field("trace", f"{', '.join(traces)} in {run.path.name}/trace: ui.perfetto.dev opens it"))
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def _cost(summary: dict[str, Any]) -> list[str]:
    kept = summary["accounted_bytes"]
    memory = ", ".join(f"{role} {count:,}" for role, count in kept.items())
    lines = [_field("memory", f"{memory} bytes")] if kept else []
    if peaks := (summary.get("tensor_bytes") or {}).get("peak"):
        lines += [_field("peak", beside_plan(summary, "peak", f"{max(peaks):,} bytes"))]
    if summary.get("planned"):
        lines += [_field("kept", beside_plan(summary, "kept", f"{sum(kept.values()):,} bytes"))]
    lines += [_field("plan", off)] if (off := leaves_plan(summary)) else []
    lines += [
        _field(name, _asked(entry))
        for name, entry in (summary.get("network") or {}).items()
        if name != "nccl" and not (entry["requested"] in ("none", "default") and entry["effective"] == "none")
    ]
    if summary.get("engine"):
        lines.append(_field("engine", ", ".join(f"{name}: {value}" for name, value in summary["engine"].items())))
    rows = summary.get("collectives") or []
    total = sum(row["bytes"] for row in rows)
    if rows:
        lines += [
            _field("traffic", f"{beside_plan(summary, 'sent', f'{total:,} bytes')} sent in the last step:"),
            *_traffic(rows),
        ]
    return lines


def _traffic(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    texts = [
        (str(row["bucket"] or "(no bucket)"), str(row["count"]), str(row["kind"]), f"{row['bytes']:,}") for row in rows
    ]
    name, count, kind, size = (max(map(len, column)) for column in zip(*texts, strict=True))
    name = min(name, max(screen.LEAST, screen.width() - count - kind - size - len("      bytes") - 5))
    return [
        f"    {screen.shorten(bucket, name):<{name}}  {times:>{count}} {what:<{kind}}  {sent:>{size}} bytes"
        for bucket, times, what, sent in texts
    ]


def _asked(entry: dict[str, Any]) -> str:
    """Requested and effective setting of NCCL: `auto -> none (why)`."""
    more = "; ".join(
        f"{key}: {', '.join(value) if isinstance(value, list) else value}"
        for key, value in entry.items()
        if key not in ("requested", "effective", "reason")
    )
    reason = f" ({entry['reason']})" if entry.get("reason") else ""
    return f"{entry['requested']} -> {entry['effective']}{reason}" + (f"; {more}" if more else "")


ALIKE = "no difference in configuration, sources, versions or machine"


def diff(a: RunDir, b: RunDir) -> str:
    """Differences of two runs: configuration, sources, versions and machine; one line each, `key: a -> b`."""
    lines = [f"a  {a.path}", f"b  {b.path}", *_damaged(a, b), ""]
    begin = len(lines)
    configured = _pairs(flatten(a.config()), flatten(b.config()))
    sections = {"configuration": configured, "origin": _pairs(_comparable(a), _comparable(b))}
    room = screen.width()
    for title, pairs in sections.items():
        rows = (f"  {key}: {' -> '.join(_short(left, right, room))}" for key, left, right in pairs)
        if pairs:
            lines += [f"{title}:", *(line for each in rows for line in screen.fold(each, room, " " * 6)), ""]
    if len(lines) == begin:
        lines.append(ALIKE)
    return "\n".join(lines).rstrip()


def _damaged(*runs: RunDir) -> list[str]:
    texts = [(checksums.damage(run.path, CONFIG, run.provenance.name) or {}).values() for run in runs]
    return [f"{name}  damaged: {text}" for name, each in zip("ab", texts, strict=True) for text in each]


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


def _short(left: Any, right: Any, room: int) -> tuple[str, str]:
    size = max(20, min(80, room - 8))
    texts = [value if isinstance(value, str) else json.dumps(value) for value in (left, right)]
    if max(map(len, texts)) <= size:
        return texts[0], texts[1]
    parts = next((at for at, pair in enumerate(zip_longest(*texts)) if pair[0] != pair[1]), 0)
    begin = max(0, parts - size // 4) if parts > size // 2 else 0
    cut = [f"{'...' * bool(begin)}{text[begin:]}" for text in texts]
    shown = [text if len(text) <= size else f"{text[: size - 3]}..." for text in cut]
    return shown[0], shown[1]
