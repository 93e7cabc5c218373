"""What the studies of `seed_published` left on disk: every arm against its control, and the timed half of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.pages.seed_published import Seed
from harness.bench import Report, report
from harness.bench.report import Row
from harness.bench.stats import LEAST_BLOCKS
from harness.config.errors import BadRequest
from harness.parity.compare import judge
from harness.parity.record import Record, load
from harness.parity.tiers.seeds import SEED, over_seeds
from harness.store import provenance
from harness.store.identity import EXCLUDED
from harness.store.labels import details, strategy_of
from harness.store.rundir import RunDir
from harness.store.study import read_study


@dataclass(frozen=True)
class Arm:
    """One arm over its seeds; a control is held against nothing. Bytes are of rank 0 in one step."""

    engine: str
    strategy: str
    detail: str
    ranks: int
    is_control: bool
    outcomes: list[str]
    sentences: list[str]
    loss: float
    grad_norm: float
    loss_off: list[float]
    """At the last step, arm over control less one, by seed."""
    norm_off: list[float]
    inside: int
    outside: int | None
    """None where the engine does not tell its axes apart."""
    network: dict[str, Any]

    @property
    def sent(self) -> int:
        """Bytes along both axes."""
        return self.inside + (self.outside or 0)


@dataclass(frozen=True)
class Found:
    """What one study says."""

    seed: Seed
    question: str = ""
    arms: tuple[Arm, ...] = ()
    over_seeds: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    timed: Report | None = None
    why_not_timed: str = ""
    """Why its times are not shown; bytes may be there."""
    origins: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    def arm(self, engine: str, strategy: str, has: str) -> Arm | None:
        """The arm of this engine and strategy whose detail has these words."""
        fits = (a for a in self.arms if (a.engine, a.strategy) == (engine, strategy) and has in a.detail.split())
        return (
            next(fits, None)
            if has
            else next((a for a in self.arms if (a.engine, a.strategy) == (engine, strategy)), None)
        )

    def row(self, engine: str, strategy: str, has: str = "") -> Row | None:
        """The same of the timed half."""
        rows = [row for regime in self.timed.regimes for row in regime.rows] if self.timed else []
        fits = (r for r in rows if (r.engine, r.strategy) == (engine, strategy))
        return next((row for row in fits if not has or has in row.detail.split()), None)


def find(seed: Seed, root: str) -> Found:
    """Read a study as it was last asked for, as far as it was run."""
    record = read_study(Path(root), seed.study)
    timed, why = _timed(seed, root)
    if record is None:
        return Found(seed, missing=("the whole study",), timed=timed, why_not_timed=why)
    folder, digest = Path(root) / seed.study, provenance.sources_digest()
    runs, missing = {}, []
    for cell in record["cells"]:
        path = folder / cell["directory"]
        run = load(path, digest) if (path / "config.yaml").exists() else None
        if run is None or run.problems:
            missing.append(f"{cell['directory']}: {run.problems[0] if run else 'never started'}")
        else:
            runs[cell["signature"]] = run
    pairs = [
        (runs[cell["signature"]], runs.get(cell["control"] or ""))
        for cell in record["cells"]
        if cell["signature"] in runs and (not cell["control"] or cell["control"] in runs)
    ]
    several = over_seeds(
        [(arm, control) for arm, control in pairs if control], record.get("margins") or {}, record.get("window") or 0
    )
    return Found(
        seed,
        record["question"],
        tuple(arms_of(pairs)),
        tuple(each.sentence for each in several),
        tuple(missing),
        timed,
        why,
        tuple(run.provenance for run in runs.values()),
    )


def arms_of(pairs: Sequence[tuple[Record, Record | None]]) -> list[Arm]:
    """An arm a configuration, its seeds together, in the order they were asked for."""
    kinds: dict[str, list[tuple[Record, Record | None]]] = {}
    for arm, control in pairs:
        kept = {key: value for key, value in RunDir(arm.path).config().items() if key not in EXCLUDED}
        kept["train"] = {**kept["train"], "seed": 0}
        kinds.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append((arm, control))
    configs = {key: RunDir(group[0][0].path).config() for key, group in kinds.items()}
    told = details(configs)
    return [_arm(sorted(group, key=_seed), configs[key], told[key]) for key, group in kinds.items()]


def _seed(pair: tuple[Record, Record | None]) -> int:
    return int(pair[0].config[SEED])


def _arm(group: Sequence[tuple[Record, Record | None]], config: Mapping[str, Any], detail: str) -> Arm:
    first = group[0][0]
    held = [(arm, control) for arm, control in group if control is not None]
    verdicts = [judge(arm, control) for arm, control in held]
    inside, outside = _sent(first, config)
    return Arm(
        engine=str(config["engine"]["name"]),
        strategy=strategy_of(config),
        detail=detail,
        ranks=int(config["mesh"]["world_size"]),
        is_control=not held,
        outcomes=[each.outcome.value for each in verdicts],
        sentences=[each.sentence for each in verdicts],
        loss=_last(first, "loss"),
        grad_norm=_last(first, "grad_norm"),
        loss_off=[_last(arm, "loss") / _last(control, "loss") - 1.0 for arm, control in held],
        norm_off=[_last(arm, "grad_norm") / _last(control, "grad_norm") - 1.0 for arm, control in held],
        inside=inside,
        outside=outside,
        network=dict(first.summary.get("network") or {}),
    )


def _last(run: Record, key: str) -> float:
    value = run.series(key)[-1]
    return float("nan") if value is None else value


def _sent(run: Record, config: Mapping[str, Any]) -> tuple[int, int | None]:
    """Bytes along the inner and the outer axis; native says of every bucket which it is."""
    rows = run.summary.get("collectives") or []
    outer = sum(row["bytes"] for row in rows if row["bucket"].endswith(" outer"))
    inner = sum(row["bytes"] for row in rows) - outer
    if config["mesh"]["dp_outer"] == 1:
        return inner, 0
    return inner, outer if outer else None


def _timed(seed: Seed, root: str) -> tuple[Report | None, str]:
    """The timed half, and why its times are not shown."""
    if not seed.timed:
        return None, ""
    try:
        found = report(root, f"{seed.study}_time")
    except BadRequest:
        return None, "not measured: never run"
    blocks = min(len(row.blocks) for regime in found.regimes for row in regime.rows)
    disturbed = sum(bool(process.disturbance) for process in found.processes)
    if found.mixed:
        return found, f"not measured: the runs differ in {found.mixed[0]}"
    if blocks < LEAST_BLOCKS or found.missing:
        return (
            found,
            f"not measured: {blocks} whole blocks, {LEAST_BLOCKS} are the least; {len(found.missing)} runs missing",
        )
    if 2 * disturbed > len(found.processes):
        return found, f"not measured: other programs disturbed {disturbed} of {len(found.processes)} runs"
    return found, ""
