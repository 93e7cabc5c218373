"""From the runs of a timed study to rows, ratios, and caveats."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.bench.record import PARTS, Process, arm_of, load, median, workload_of
from harness.bench.stats import Interval, median_ratio, spread
from harness.config.errors import refuse
from harness.config.words import ask_again
from harness.store.errors import StoreError
from harness.store.labels import details, differing, strategy_of
from harness.store.provenance import sources_digest
from harness.store.rundir import RunDir, flatten
from harness.store.study import read_study

NATIVE = "native"

SAME = ("cpu_model", "device", "cpu_capability", "threads_per_rank", "hosts", "backend")


GROWTH_LIMIT = 1e-3


@dataclass(frozen=True)
class Row:
    """One arm. Times are seconds, sizes bytes: medians over processes, of each process's own median."""

    engine: str
    strategy: str
    detail: str
    is_reference: bool
    blocks: tuple[int, ...]
    step_s: float
    iqr_steps_s: float
    """Interquartile range of steps within a process: median over processes."""
    iqr_blocks_s: float
    """Interquartile range of the processes' medians."""
    parts: dict[str, float | None]
    tokens_per_s: float
    peak_bytes: int | None
    persistent_bytes: int | None
    accounted_bytes: int
    planned: Mapping[str, int | None]
    rss_bytes: int
    sent_bytes: int
    comm: dict[str, dict[str, int]]
    loss: float
    ratio: Interval | None
    """Step time over the reference's, with its interval; None for the reference."""

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.engine, self.strategy, self.detail) if part)


@dataclass(frozen=True)
class Target:
    strategy: str
    native: str
    best: str
    peers: tuple[str, ...]
    ratio: Interval | None

    @property
    def finding(self) -> str:
        if self.ratio is None:
            return "too few blocks"
        if self.ratio.includes_one:
            return "not told apart: the interval includes 1"
        return "faster" if self.ratio.high < 1.0 else "slower"


@dataclass(frozen=True)
class Regime:
    title: str
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    targets: tuple[Target, ...]


@dataclass(frozen=True)
class Report:
    study: str
    question: str
    order_seed: int | None
    regimes: tuple[Regime, ...]
    processes: tuple[Process, ...]
    missing: dict[str, str]
    notes: tuple[str, ...]
    """Caveats: disturbed blocks, arms rerun later, tensors that still grew."""
    mixed: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 complete, 3 with missing cells, 4 where the runs cannot be compared."""
        return 4 if self.mixed else 3 if self.missing else 0

    def as_json(self) -> dict[str, Any]:
        facts = asdict(self) | {"processes": [_process_json(process) for process in self.processes]}
        plain: dict[str, Any] = finite(facts | {"machine": machine(self.processes)})
        return plain


def report(root: Path | str, study: str) -> Report:
    """Raises `BadRequest`: there is no such study, or none of its runs is timed and done."""
    record = read_study(Path(root), study)
    if record is None:
        from harness.parity.study import unknown  # loads numpy

        raise unknown(f"bench {study}", Path(root), study)
    folder = Path(root) / study
    loaded = {cell["signature"]: _load(folder / cell["directory"]) for cell in record["cells"]}
    if all(isinstance(found, str) for found in loaded.values()):
        reasons = "; ".join(sorted({str(found) for found in loaded.values()}))
        raise refuse(
            f"bench {study}",
            f"has no timed run that is done ({reasons})",
            fix=f"measure: bench under base: in the study's file, then {ask_again(root, study)}",
        )
    missing = {c["directory"]: found for c in record["cells"] if isinstance(found := loaded[c["signature"]], str)}
    processes = [found for found in loaded.values() if isinstance(found, Process)]
    processes, other_sources = _of_one_source(processes)
    missing |= dict.fromkeys(other_sources, "stale: made by other sources than most runs")
    references = _references(record["cells"], loaded)
    return Report(
        study=study,
        question=record["question"],
        order_seed=record.get("order_seed"),
        regimes=tuple(_regimes(processes, references)),
        processes=tuple(processes),
        missing=missing,
        notes=tuple(_notes(processes)),
        mixed=tuple(_mixed(processes)),
    )


def _load(path: Path) -> Process | str:
    if not (path / "config.yaml").exists():
        return "never started"
    try:
        if RunDir(path).setting("measure.mode") != "bench":
            return "not timed: measure.mode=record"
        return load(path)
    except StoreError as error:
        return str(error)


def _of_one_source(processes: Sequence[Process]) -> tuple[list[Process], list[str]]:
    digests = Counter(process.origin.get("sources_digest") for process in processes)
    common = digests.most_common(1)[0][0]
    kept = [process for process in processes if process.origin.get("sources_digest") == common]
    rest = [process.run.partition("/")[2] for process in processes if process not in kept]
    return kept, rest


def _references(cells: Iterable[Mapping[str, Any]], loaded: Mapping[str, Process | str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for cell in cells:
        arm, control = loaded[cell["signature"]], loaded.get(cell["control"] or "")
        if isinstance(arm, Process) and isinstance(control, Process):
            found |= {arm.arm: control.arm, control.arm: control.arm}
    return found


def _regimes(processes: Sequence[Process], references: Mapping[str, str]) -> Iterable[Regime]:
    groups = _groups(processes, references)
    settings = [_settings(group, references) for group in groups]
    keys = differing(settings)
    for group, own in sorted(zip(groups, settings, strict=True), key=lambda pair: title(pair[1], keys)):
        arms: dict[str, list[Process]] = {}
        for process in group:
            arms.setdefault(process.arm, []).append(process)
        details_of = details({arm: same[0].config for arm, same in arms.items()})
        rows = {arm: _row(arms, arm, references.get(arm), details_of[arm]) for arm in arms}
        ordered = sorted(rows.values(), key=lambda row: (row.strategy, not row.is_reference, row.engine, row.detail))
        yield Regime(title(own, keys), own, tuple(ordered), tuple(_targets(arms, rows)))


def title(settings: Mapping[str, Any], keys: Sequence[str]) -> str:
    named = [key for key in keys if key.endswith(".name")]
    named += [key for key in keys if key == "mesh.world_size"]
    return ", ".join(f"{key}={settings[key]}" for key in named or keys) or str(settings["model.name"])


def _groups(processes: Sequence[Process], references: Mapping[str, str]) -> list[list[Process]]:
    configs = {process.arm: process.config for process in processes}
    groups: dict[str, list[Process]] = {}
    for process in processes:
        reference = references.get(process.arm, process.arm)
        groups.setdefault(workload_of(configs.get(reference, process.config)), []).append(process)
    return list(groups.values())


def _settings(group: Sequence[Process], references: Mapping[str, str]) -> dict[str, Any]:
    process = next((one for one in group if references.get(one.arm) == one.arm), group[0])
    kept = ("model", "data", "optimizer", "train", "dtype", "numerics", "mesh", "measure")
    found = flatten({name: process.config[name] for name in kept})
    policies = {one.config["dtype"]["name"] for one in group} - {found["dtype.name"]}
    return found | {"dtype.name": " or ".join([found["dtype.name"], *sorted(policies)])}


def _row(arms: Mapping[str, Sequence[Process]], arm: str, reference: str | None, detail: str) -> Row:
    group = sorted(arms[arm], key=lambda process: process.block)
    config, last = group[0].config, group[-1]
    step_s = statistics.median([process.median_s for process in group])
    return Row(
        engine=config["engine"]["name"],
        strategy=strategy_of(config),
        detail=detail,
        is_reference=arm == reference,
        blocks=tuple(process.block for process in group),
        step_s=step_s,
        iqr_steps_s=statistics.median([spread(process.step_s) for process in group]),
        iqr_blocks_s=spread([process.median_s for process in group]),
        parts={part: median([process.parts[part] for process in group]) for part in PARTS},
        tokens_per_s=last.tokens / step_s,
        peak_bytes=_whole(median([process.peak_bytes for process in group])),
        persistent_bytes=_whole(median([process.persistent_bytes for process in group])),
        accounted_bytes=last.accounted_bytes,
        planned=dict(last.planned),
        rss_bytes=max(process.rss_bytes for process in group),
        sent_bytes=last.sent_bytes,
        comm={kind: dict(row) for kind, row in last.comm.items()},
        loss=last.loss,
        ratio=_ratio(arms, arm, [reference]) if reference in arms and arm != reference else None,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _ratio(arms: Mapping[str, Sequence[Process]], arm: str, others: Sequence[str | None]) -> Interval | None:
    by_block = {
        key: {process.block: process.median_s for process in arms[key]} for key in (arm, *others) if key is not None
    }
    shared = sorted(set.intersection(*(set(times) for times in by_block.values())))
    return median_ratio(
        [by_block[arm][block] for block in shared],
        [[by_block[key][block] for block in shared] for key in others if key is not None],
    )


def _targets(arms: Mapping[str, Sequence[Process]], rows: Mapping[str, Row]) -> Iterable[Target]:
    for arm, row in sorted(rows.items(), key=lambda item: item[1].name):
        if row.engine != NATIVE:
            continue
        own = _splits(arms[arm][0])
        peers = [key for key in arms if rows[key].engine != NATIVE and _splits(arms[key][0]) == own]
        if peers:
            best = min(peers, key=lambda key: rows[key].step_s)
            names = tuple(sorted(rows[key].name for key in peers))
            yield Target(row.strategy, row.name, rows[best].name, names, _ratio(arms, arm, peers))


def _splits(process: Process) -> list[Any]:
    return [process.config[group] for group in ("sharding", "dtype", "mesh")]


def _notes(processes: Sequence[Process]) -> Iterable[str]:
    for process in processes:
        if process.disturbance:
            yield f"block {process.block} is disturbed: {process.run}: {process.disturbance}"
        if process.leaves_plan:
            yield f"{process.run}: {process.leaves_plan}"
    yield from _late(processes)
    for process in processes:
        if process.persistent_bytes and abs(process.growth_bytes or 0) > GROWTH_LIMIT * process.persistent_bytes:
            yield f"{process.run}: tensor storage still grew by {process.growth_bytes} bytes in the last warm-up step"
    if processes[0].origin.get("sources_digest") not in (None, sources_digest()):
        yield "the sources have changed since these runs were made"


def _late(processes: Sequence[Process]) -> Iterable[str]:
    begun: dict[int, str] = {}
    for process in processes:
        begun[process.block] = min(begun.get(process.block, process.ended), process.ended)
    for process in processes:
        later = [block for block, end in begun.items() if block > process.block and end < process.ended]
        if later:
            yield f"block {process.block}: {process.run} ran after block {min(later)} had begun"


def _mixed(processes: Sequence[Process]) -> Iterable[str]:
    for key in SAME:
        found = sorted({str(_fact(process, key)) for process in processes})
        if len(found) > 1:
            yield f"{key}: {' and '.join(found)}"
    versions = sorted({str(process.origin.get("versions", {}).get("torch")) for process in processes})
    if len(versions) > 1:
        yield f"torch: {' and '.join(versions)}"


def _fact(process: Process, key: str) -> Any:
    held = process.origin.get(key)
    return sorted(set(held)) if key == "hosts" and held is not None else held


def machine(processes: Sequence[Process]) -> dict[str, Any]:
    origin = processes[0].origin
    git = origin.get("git") or {}
    return {
        **{key: origin.get(key) for key in ("platform", "cpu_model", "cpu_count", *SAME[1:], "environment", "nccl")},
        "versions": origin.get("versions", {}),
        "commit": git.get("sha"),
        "dirty": git.get("dirty"),
        "sources_digest": origin.get("sources_digest"),
        "first_run_ended": min(process.ended for process in processes),
        "last_run_ended": max(process.ended for process in processes),
    }


def _process_json(process: Process) -> dict[str, Any]:
    left_out = ("config", "origin", "step_s", "comm")
    facts = {key: value for key, value in vars(process).items() if key not in left_out}
    config = process.config
    return facts | {
        "arm": arm_of(config)[:8],
        "engine": config["engine"]["name"],
        "strategy": strategy_of(config),
        "dtype": config["dtype"]["name"],
        "ranks": config["mesh"]["world_size"],
        "step_s": list(process.step_s),
        "disturbance": process.disturbance,
    }


def finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
