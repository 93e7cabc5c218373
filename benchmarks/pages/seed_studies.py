"""Experiments others published, asked of this machine: docs/records/seed_studies.md, benchmarks/data/seed_studies.json.

    python benchmarks/pages/seed_studies.py --run            every study, its timed half in blocks, then the page
    python benchmarks/pages/seed_studies.py --run hybrid     these studies alone, then the page
    python benchmarks/pages/seed_studies.py                  the page, from the runs that are there

A study `X` is judged by the comparator, and timed under the name `X_time`. Times are shown where at least three blocks
were timed and no more than half of their runs were disturbed by other programs; bytes and verdicts do not depend on
that. What was not run is named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.pages.engines_table import CONFIRMED
from benchmarks.pages.seed_evidence import Arm, Found, find
from benchmarks.pages.seed_published import SEEDS, Seed
from harness.bench.render import interval_text, markdown_table, mib, ms
from harness.bench.report import Row, finite
from harness.parity.outcome import percent
from harness.store.files import write_atomic, write_json

ROOT = Path(__file__).resolve().parents[2]
NAN_GUARD = ROOT / "benchmarks" / "data" / "nan_guard.json"
NAN_TARGET = 0.02
ARM_HEAD = (
    "engine",
    "strategy",
    "arm",
    "seeds",
    "verdict",
    "loss",
    "loss off",
    "norm",
    "norm off",
    "inside",
    "outside",
)
TIME_HEAD = (
    "engine",
    "strategy",
    "arm",
    "blocks",
    "ms/step",
    "IQR blocks",
    "peak MiB",
    "kept MiB",
    "sent MiB",
    "ratio",
)
LEGEND = (
    "loss, norm: of the last step, first seed; off: relative difference from the control there, by seed; inside, "
    "outside: MiB that rank 0 sends in a step along the inner and the outer axis; - where the engine "
    "does not tell them "
    "apart, all of it then stands inside."
)
TIME_LEGEND = (
    "peak, kept: bytes of tensor storage within and between steps, of the rank that holds most; ratio: of step times "
    "to the control's, with its interval over whole blocks."
)


def main(argv: Sequence[str]) -> int:
    """Run what is asked for and write both files; returns 0, or 3 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs", metavar="DIR", help="where runs are stored (default: runs)")
    parser.add_argument("--out", type=Path, default=ROOT, metavar="DIR", help="the checkout to write into")
    names = [seed.study for seed in SEEDS]
    parser.add_argument(
        "--run", nargs="*", choices=names, metavar="STUDY", help=f"of {', '.join(names)}; all by default"
    )
    arguments = parser.parse_args(argv)
    if arguments.run is not None:
        carry_out([seed for seed in SEEDS if not arguments.run or seed.study in arguments.run], arguments.root)
    found = [find(seed, arguments.root) for seed in SEEDS]
    data, page = (
        arguments.out / "benchmarks" / "data" / "seed_studies.json",
        arguments.out / "docs" / "records" / "seed_studies.md",
    )
    for path in (data, page):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(data, finite(as_json(found)))
    write_atomic(page, markdown(found))
    lacking = [f"{one.seed.study}: {len(one.missing)} cells not run" for one in found if one.missing]
    lacking += [f"{one.seed.study}: times {one.why_not_timed}" for one in found if one.why_not_timed]
    print(f"{page}: {sum(len(one.arms) for one in found)} arms", *lacking, sep="\n")
    return 3 if lacking else 0


def requests(seed: Seed, root: str) -> list[list[str]]:
    """The command lines of a study: to be judged, and to be timed."""
    where = [] if root == "runs" else [f"launch.root={root}"]
    judged = ["run.py", "-m", f"study={seed.study}", *where]
    if not seed.timed:
        return [judged]
    return [judged, ["run.py", "-m", f"study={seed.study}", f"study.name={seed.study}_time", *seed.timed, *where]]


def carry_out(seeds: Sequence[Seed], root: str) -> None:
    """Run studies one after the other: those to be judged first, so that the timed ones stand together."""
    for number in (0, 1):
        for seed in seeds:
            for words in requests(seed, root)[number : number + 1]:
                subprocess.run([sys.executable, *words], cwd=ROOT, check=False)


# -- figures beside figures ----------------------------------------------------------------------------------------


def figures(found: Found) -> list[tuple[str, str, str]]:
    """What, published, ours."""
    return _FIGURES[found.seed.study](found)


def _dtype_policies(found: Found) -> list[tuple[str, str, str]]:
    narrow, wide = (found.arm("native", ZERO3, f"dtype={name}") for name in ("bf16_comm", "bf16"))
    summed = found.arm("native", "optim", "dtype=bf16_comm")
    slow = found.row("native", ZERO3, "dtype=bf16_comm")
    return [
        ("loss at step 100, bf16 over fp32 wire", "2.234128 / 2.233609: +0.023 %", _off(narrow, "loss")),
        ("gradient norm", "26.477 / 26.389: +0.33 %", _off(narrow, "norm")),
        ("loss and norm where sums travel (ZeRO-1)", "not said", f"{_off(summed, 'loss')}; {_off(summed, 'norm')}"),
        ("bytes a step", "0.75 by the formula", _bytes_ratio(narrow, wide)),
        ("step time", "2559.1 / 3300.5 ms: 0.775 (1.29x)", _time(found, slow)),
        ("is it the same run; under ZeRO-1", "not said", f"{_outcomes(narrow)}; {_outcomes(summed)}"),
    ]


def _hybrid(found: Found) -> list[tuple[str, str, str]]:
    plain, hybrid, full = (
        found.arm("native", *which) for which in ((ZERO3, ""), ("hfsdp", "dtype=bf16"), ("hfsdp", "dtype=fp32"))
    )
    rows = found.row("native", ZERO3), found.row("native", "hfsdp")
    return [
        ("loss, HFSDP over FSDP", "5.475965 / 5.476863: -0.016 %", _off(hybrid, "loss")),
        ("gradient norm", "9.424 / 9.411: +0.14 %", _off(hybrid, "norm")),
        ("loss and norm, fp32 throughout", "not said", f"{_off(full, 'loss')}; {_off(full, 'norm')}"),
        ("memory, HFSDP over FSDP", "39,176 / 39,934 MB reserved; 33,573 MB in the same text", _memory(*rows)),
        ("bytes inside and outside", "not said", _axes(plain, hybrid)),
        ("step time", "3779.1 / 3789.9 ms: 0.997", _time(found, rows[1])),
        ("4 nodes, a global batch", "3.62x faster", "not measured: one machine"),
        ("is it the same run", "not said", _outcomes(hybrid)),
    ]


def _grad_buffer(found: Found) -> list[tuple[str, str, str]]:
    flat = found.arm("native", ZERO3, "engine.grad_buffer=flat")
    whole, rows = (
        [found.row("native", strategy, f"engine.grad_buffer={name}") for name in ("concat", "flat")]
        for strategy in ("no_shard", ZERO3)
    )
    return [
        ("memory at the peak, flat over concat", "15.1 / 17.4 GB reserved: -13.2 %", _memory(*rows)),
        ("the same where gradients stay whole (no_shard)", "not said", _memory(*whole)),
        ("throughput", "440 / 382 TFLOP/s: +15 %", _time(found, rows[1])),
        ("loss", "equal to 16 digits", _outcomes(flat)),
    ]


def _nan_check(found: Found) -> list[tuple[str, str, str]]:
    looking = found.row("native", ZERO3, "engine.report_nan_in_param_grad=True")
    return [
        ("step time, looking over not", "about +5 %", _time(found, looking)),
        ("its own work, by itself, as a share of a step", f"target: below {percent(NAN_TARGET)}", _alone()),
        (
            "is it the same run",
            "not said",
            _outcomes(found.arm("native", ZERO3, "engine.report_nan_in_param_grad=True")),
        ),
    ]


def _user_buffers(found: Found) -> list[tuple[str, str, str]]:
    asked = [arm for arm in found.arms if not arm.is_control]
    outcomes = [outcome for arm in asked for outcome in arm.outcomes]
    network = [facts for arm in asked for facts in arm.network.values() if facts["requested"] != "none"]
    told = {f"{facts['requested']}: {facts['effective']}" for facts in network}
    same = f"{outcomes.count('EQUAL')} of {len(outcomes)} arms EQUAL" if outcomes else NOT_RUN
    gain = "gather 1.86x at 2 MiB, 1.06x at 128 MiB; reduce-scatter 1.72x, 1.12x at 32 MiB"
    return [
        ("time of a collective, symmetric over plain", gain, "not measured: needs GPUs under NCCL"),
        ("bits, asked for over not", "megatron-fsdp's tests: equal", same),
        ("requested: effective, as recorded", "not said", ", ".join(sorted(told)) or NOT_RUN),
    ]


ZERO3 = "optim_grads_params"
NOT_RUN = "not run"
_FIGURES = {
    "dtype_policies": _dtype_policies,
    "hybrid": _hybrid,
    "grad_buffer": _grad_buffer,
    "nan_check": _nan_check,
    "user_buffers": _user_buffers,
}


def _off(arm: Arm | None, what: str) -> str:
    if arm is None or arm.is_control:
        return NOT_RUN
    return _signed(arm.loss_off if what == "loss" else arm.norm_off)


def _signed(values: Sequence[float]) -> str:
    """Median of the seeds, and from where to where they reach."""
    shown = [_sign(value) for value in (statistics.median(values), min(values), max(values))]
    return shown[0] if len(values) == 1 else f"{shown[0]} ({shown[1]} to {shown[2]} over {len(values)} seeds)"


def _sign(value: float) -> str:
    return "0" if value == 0 else ("+" if value > 0 else "") + percent(value)


def _outcomes(arm: Arm | None) -> str:
    if arm is None or not arm.outcomes:
        return NOT_RUN
    return ", ".join(f"{arm.outcomes.count(name)} {name}" for name in dict.fromkeys(arm.outcomes))


def _bytes_ratio(arm: Arm | None, control: Arm | None) -> str:
    if arm is None or control is None:
        return NOT_RUN
    return f"{arm.sent:,} / {control.sent:,}: {arm.sent / control.sent:.4f}"


def _axes(plain: Arm | None, hybrid: Arm | None) -> str:
    if plain is None or hybrid is None or hybrid.outside is None:
        return NOT_RUN
    return f"{mib(hybrid.inside)} and {mib(hybrid.outside)} MiB; FSDP {mib(plain.inside)} over all four"


def _memory(before: Row | None, after: Row | None) -> str:
    if before is None or after is None or not before.peak_bytes or not after.peak_bytes:
        return "not measured"
    change = _sign(after.peak_bytes / before.peak_bytes - 1.0)
    kept = _sign((after.persistent_bytes or 0) / (before.persistent_bytes or 1) - 1.0)
    return f"{mib(after.peak_bytes)} / {mib(before.peak_bytes)} MiB at the peak: {change}; kept: {kept}"


def _time(found: Found, row: Row | None) -> str:
    if found.why_not_timed or row is None:
        return found.why_not_timed or "not measured"
    return interval_text(row.ratio)


def _alone() -> str:
    if not NAN_GUARD.exists():
        return "not measured: python benchmarks/costs/nan_guard.py"
    rows = json.loads(NAN_GUARD.read_text(encoding="utf-8"))["rows"]
    shares = [row["alone_share"] for row in rows.values()]
    met = "met" if max(shares) < NAN_TARGET else "missed"
    return f"{percent(min(shares))} to {percent(max(shares))} over {len(rows)} strategies (nan_guard.json): {met}"


# -- the page --------------------------------------------------------------------------------------------------------


def as_json(found: Sequence[Found]) -> dict[str, Any]:
    """Every number of the page; times that are not shown are not in it."""
    return {
        "command": "python benchmarks/pages/seed_studies.py --run",
        **_origin(found),
        "studies": [_study_json(f) for f in found],
    }


def _study_json(found: Found) -> dict[str, Any]:
    rows = [row for regime in found.timed.regimes for row in regime.rows] if found.timed else []
    return {
        **asdict(found.seed),
        "question": found.question,
        "figures": [dict(zip(("what", "published", "ours"), line, strict=True)) for line in figures(found)],
        "arms": [asdict(arm) for arm in found.arms],
        "over_seeds": found.over_seeds,
        "missing": found.missing,
        "times": found.why_not_timed or ("measured" if found.timed else "none"),
        "rows": [_row_json(row, shown=not found.why_not_timed) for row in rows],
        "disturbed": list(found.timed.notes) if found.timed and not found.why_not_timed else [],
    }


def _row_json(row: Row, *, shown: bool) -> dict[str, Any]:
    times = ("step_s", "iqr_steps_s", "iqr_blocks_s", "parts", "tokens_per_s", "ratio", "rss_bytes")
    return {key: value for key, value in asdict(row).items() if shown or key not in times}


def _origin(found: Sequence[Found]) -> dict[str, Any]:
    """Versions, commit and machine of the runs; no names of machines, no paths."""
    origins = [origin for one in found for origin in one.origins]
    origins += [process.origin for one in found if one.timed for process in one.timed.processes]
    first: Mapping[str, Any] = origins[0] if origins else {}
    git = first.get("git") or {}
    facts = {key: first.get(key) for key in ("cpu_model", "cpu_count", "device", "backend", "threads_per_rank")}
    return {
        "versions": first.get("versions", {}),
        "commit": git.get("sha"),
        "dirty": git.get("dirty"),
        "sources_digest": first.get("sources_digest"),
        "machine": facts,
    }


def markdown(found: Sequence[Found]) -> str:
    """The page."""
    data = "[seed_studies.json](../../benchmarks/data/seed_studies.json)"
    origin = _origin(found)
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items() if version)
    machine = origin["machine"]
    dirty = " with changes" if origin["dirty"] else ""
    minutes = sum(one.seed.minutes for one in found)
    parts = [
        "# Published experiments, asked of this machine",
        "*Record. What published experiments show when they are repeated here. Made by `python"
        f" benchmarks/pages/seed_studies.py --run`; every number in {data}.*",
        f"The timed halves take about {minutes:.0f} minutes on two cores that do nothing else. Here is one machine, "
        "gloo, and models of "
        "0.2 M weights "
        "(judged) and 12.7 M (timed): this shows whether an effect is there and what it is made of, never "
        "how large it is "
        "on the published machine.",
        f"- {machine['cpu_model']}, {machine['cpu_count']} cores, {machine['backend']}, {machine['device']}\n"
        f"- {versions}; commit {str(origin['commit'])[:12]}{dirty}, sources {str(origin['sources_digest'])[:12]}",
    ]
    for one in found:
        parts += _section(one)
    return "\n\n".join(parts) + "\n"


def _section(found: Found) -> list[str]:
    seed = found.seed
    parts = [
        f"## {seed.title}",
        f"`study={seed.study}`. {found.question}".strip(),
        f"Published: {seed.source}; {seed.setting}.",
        markdown_table(("what", "published", "here"), figures(found)),
        f"- comparable: {seed.comparable}\n- not comparable: {seed.incomparable}",
    ]
    if found.arms:
        parts += ["### Arms", markdown_table(ARM_HEAD, [_arm_cells(arm) for arm in found.arms]), LEGEND]
    odd = [line for arm in found.arms for line in _odd(arm)]
    parts += ["\n".join(odd)] if odd else []
    parts += ["Over seeds:\n\n" + "\n".join(f"- {text}" for text in found.over_seeds)] if found.over_seeds else []
    parts += _timed_section(found)
    if found.missing:
        parts.append("Not run:\n\n" + "\n".join(f"- {name}" for name in found.missing))
    return parts


def _odd(arm: Arm) -> list[str]:
    """What is not the same run, and the report that confirms it where the fault is a released engine's."""
    lines = []
    for text in arm.sentences:
        links = [
            f" [[{name}](upstream/{name}.md)]"
            for name, engine, says in CONFIRMED
            if engine == arm.engine and says in text
        ]
        if not text.startswith(("EQUAL", "EQUIVALENT")):
            lines.append(f"- {text}{''.join(links)}")
    return lines


def _timed_section(found: Found) -> list[str]:
    if not found.seed.timed:
        return []
    parts = ["### Time and memory", f"Times {found.why_not_timed}."] if found.why_not_timed else ["### Time and memory"]
    if found.timed is None:
        return parts
    rows = [row for regime in found.timed.regimes for row in regime.rows]
    table = markdown_table(TIME_HEAD, [_row_cells(row, shown=not found.why_not_timed) for row in rows])
    against = [] if found.why_not_timed else list(found.timed.notes)
    return [*parts, table, TIME_LEGEND, *(["\n".join(f"- {note}" for note in against)] if against else [])]


def _arm_cells(arm: Arm) -> tuple[str, ...]:
    return (
        arm.engine,
        arm.strategy,
        arm.detail,
        str(max(len(arm.outcomes), 1)),
        "control" if arm.is_control else _outcomes(arm),
        f"{arm.loss:.6f}",
        "" if arm.is_control else _signed(arm.loss_off),
        f"{arm.grad_norm:.4f}",
        "" if arm.is_control else _signed(arm.norm_off),
        mib(arm.inside),
        "-" if arm.outside is None else mib(arm.outside),
    )


def _row_cells(row: Row, *, shown: bool) -> tuple[str, ...]:
    times = (ms(row.step_s), ms(row.iqr_blocks_s)) if shown else ("not measured", "")
    ratio = ("control" if row.is_reference else interval_text(row.ratio)) if shown else ""
    sizes = (mib(row.peak_bytes), mib(row.persistent_bytes), mib(row.sent_bytes))
    return (row.engine, row.strategy, row.detail, str(len(row.blocks)), *times, *sizes, ratio)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
