"""Who reads a run beside a verdict, what each says of a damaged one, and how each would be if it did not ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.analysis import load as tables
from harness.bench import record as bench
from harness.config.typed import load_config
from harness.launch import opening
from harness.launch.opening import Sources
from harness.parity.telling import render
from harness.store import provenance, show, status
from harness.store.errors import StoreError
from harness.store.rank_place import RankPlace
from harness.store.rundir import RunDir
from harness.study import replay
from harness.wandb_sync import sync
from harness.worker.report import Reporter
from tests.cli.damages import flip_letter
from tests.parity.edits import edit_json
from tests.support.mutants import Slip

TOLD = "summary.json is not what the run recorded"


def refusal(ask: Callable[[], object]) -> str:
    """What a request over a damaged run is refused with; empty where it is not."""
    try:
        ask()
    except StoreError as error:
        return str(error)
    return ""


def _zoom(run: Path) -> str:
    return refusal(lambda: render.zoom(run, run, "head.norm.weight"))


def _table(run: Path) -> str:
    row = tables.runs(run.parents[1]).iloc[0]
    return str(row.reason) if row.state == "damaged" else ""


def _steps(run: Path) -> str:
    return TOLD if tables.steps([run]).empty and not tables.memory([run]).size else ""


def _shown_broken(run: Path) -> str:
    (run / "summary.json").write_text("x" * (run / "summary.json").stat().st_size)
    return refusal(lambda: show.show(RunDir(run)))


def _again(run: Path) -> str:
    flip_letter(run / "config.yaml")
    return refusal(lambda: replay.replay_run(str(run), [f"launch.root={run.parents[1]}"]))


def _differ(run: Path) -> str:
    flip_letter(run / "config.yaml")
    return refusal(lambda: show.diff(RunDir(run), RunDir(run)))


def _resumed(run: Path) -> str:
    edit_json(run / status.FILE, state="preempted")
    return obstacle(run)


def obstacle(run: Path) -> str:
    """Why a run would not be gone on with."""
    config = RunDir(run).config()
    cell: Any = SimpleNamespace(config=config, typed=load_config(config))
    return opening._obstacle(RunDir(run), cell, Sources({"sources_digest": provenance.sources_digest()}, ""))


def _requeued(run: Path) -> str:
    edit_json(run / status.FILE, state="preempted")
    return refusal(reporter(run).started)


def reporter(run: Path) -> Reporter:
    return Reporter(run, 1, RankPlace(0, 1, 0, "", "torchrun"))


READERS: dict[str, tuple[Callable[[Path], str], str, Slip]] = {
    "runs": (_table, TOLD, Slip(tables, "_run_row", "checksums.demand(run.path, *checksums.TOLD)", "pass")),
    "steps": (_steps, TOLD, Slip(tables, "_rows", "checksums.demand(Path(path), *checksums.TOLD)", "pass")),
    "bench": (
        lambda run: str(bench.load(run)),
        TOLD,
        Slip(bench, "load", "checksums.damage(path, *checksums.TOLD)", "{}"),
    ),
    "sync": (
        lambda run: refusal(lambda: sync._held_back(RunDir(run), None)),
        TOLD,
        Slip(sync, "_held_back", "checksums.demand(run.path, *checksums.TOLD)", "pass"),
    ),
    "show": (
        lambda run: " ".join(show.show(RunDir(run)).split()),
        f"record damaged: {TOLD}",
        Slip(show, "_shown", "checksums.condition(run.path)", "''"),
    ),
    "show of what is no JSON": (_shown_broken, TOLD, Slip(show, "show", "checksums.demand(run.path)", "pass")),
    "diff": (
        _differ,
        "config.yaml is not",
        Slip(show, "diff", "checksums.demand(run.path, CONFIG, run.provenance.name)", "pass"),
    ),
    "--from": (
        _again,
        "config.yaml is not",
        Slip(replay, "replay_run", 'checksums.demand(run.path, CONFIG, "overrides.txt")', "pass"),
    ),
    "resume": (_resumed, TOLD, Slip(opening, "_obstacle", "else checksums.damage(run.path)", "else {}")),
    "--tensor": (_zoom, TOLD, Slip(render, "zoom", "checksums.demand(Path(path))", "pass")),
    "requeue": (_requeued, TOLD, Slip(Reporter, "started", "checksums.demand(self.run)", "pass")),
}
"""Readers beside a verdict, what each says of a damaged run, and each as if it did not ask."""
