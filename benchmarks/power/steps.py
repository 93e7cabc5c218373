"""Faults at full strength against their baselines, and the baselines against DDP: what CI runs of the power study.

A faulty run is held against its *baseline*, the same cell without the fault; the baseline against the same training by
torch's DDP, as one would hold a new engine against one that is trusted. `whole.py` has the campaign.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

from harness.config.compose import Cell
from harness.config.words import quote
from harness.parity.compare import compare
from harness.parity.outcome import Grade, Outcome
from harness.store.errors import EXIT_BUSY, Busy
from harness.study.cells import Composer
from tests.faults.corpus import corpus

STUDY = "power"
PASSES = (Outcome.EQUAL.value, Outcome.EQUIVALENT.value)
STUDIED = 3
"""The last edition of faults that this study has."""
PREEMPT_AT = 4
"""Step after which a run that is to be resumed is interrupted."""

BASE = (
    *(f"study.name={STUDY}", "train.steps=8", "train.warmup_steps=0", "train.global_batch_size=8"),
    *("train.microbatch_size=4", "data.seq_len=32", "ckpt=none"),
    *("measure.capture_steps=[1,2,3]", "measure.update_steps=[1,2,3]"),
)


class Kind(Enum):
    """What is known of a pair before it is judged."""

    faulty = "faulty"
    clean = "clean"


@dataclass(frozen=True)
class Pair:
    """An arm and its control, as overrides; `name` is the fault's, or `baseline of` it."""

    kind: Kind
    name: str
    arm: tuple[str, ...]
    control: tuple[str, ...]
    resumes: bool = False

    @property
    def stage(self) -> str:
        return corpus()[self.name].stage if self.kind is Kind.faulty else ""


def pairs() -> Iterator[Pair]:
    """Every fault that judges may see against its baseline, then each baseline against DDP, which it must pass."""
    baselines: dict[tuple[str, ...], Pair] = {}
    for fault in (each for each in corpus().values() if each.edition <= STUDIED):
        baseline = (*BASE, *(("ckpt=last",) if fault.resumes else ()), *fault.cell)
        yield Pair(Kind.faulty, fault.name, (*baseline, *fault.asked(strength="full")), baseline, fault.resumes)
        baselines.setdefault(baseline, Pair(Kind.clean, f"baseline of {fault.name}", baseline, reference(baseline)))
    yield from baselines.values()


def reference(baseline: Iterable[str]) -> tuple[str, ...]:
    kept = [text for text in baseline if not text.startswith(("sharding=", "ckpt=", "numerics="))]
    flat = ["mesh.world_size=4" if text == "mesh=two_by_two" else text for text in kept]  # DDP knows no outer axis
    return (*flat, "engine=ddp", "ckpt=none")


@contextmanager
def _tried_here() -> Iterator[None]:
    """Faults are tried in this process, which has imported torch, and not in one of its own each."""
    from harness.worker.describe import Unusable, described

    known: dict[str, str] = {}

    def reply(kind: str, setting: str, name: str, shaping: Mapping[str, Any]) -> str:
        try:
            return json.dumps(described(kind, setting, name, shaping))
        except Unusable as error:
            return json.dumps(error.reply)

    def ask(question: str, _folder: str) -> tuple[list[str], str]:
        asked = json.loads(question)
        for target in asked["targets"]:
            if target[-1] not in known:
                known[target[-1]] = reply(*target, asked["config"])
        return [known[target[-1]] for target in asked["targets"]], ""

    with mock.patch("harness.config.own._ask", ask):
        yield


def compose_all(wanted: Iterable[tuple[str, ...]], extra: tuple[str, ...] = ()) -> dict[tuple[str, ...], Cell]:
    """Cells by their overrides, composed and checked; `extra` is added to each.

    Raises `BadRequest`, with the violations of the first cell that has any.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    from harness.config.catalog import ROOT
    from harness.config.compose import register

    register()
    with _tried_here(), initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        composer = Composer(loader, loader.load_configuration("config", [], RunMode.MULTIRUN))
        return {overrides: composer.cell([*overrides, *extra]) for overrides in dict.fromkeys(wanted)}


def carry_out(pairs: Sequence[Pair], root: str) -> dict[tuple[str, ...], Cell]:
    """Run what is missing of these pairs' runs; returns every cell by its overrides.

    What is to be resumed is interrupted first, and then taken up again. A run that fails is left so: the verdict on its
    pair says it. Raises `BadRequest`: a cell cannot be run, nothing was started. `Busy`: another process runs some.
    """
    from harness.launch.submit import submit

    where = (f"launch.root={quote(root)}",)
    cells = compose_all((text for pair in pairs for text in (pair.control, pair.arm)), where)
    resumed = compose_all((pair.arm for pair in pairs if pair.resumes), (*where, f"launch.preempt_at={PREEMPT_AT}"))
    distinct = [list({cell.signature: cell for cell in several.values()}.values()) for several in (resumed, cells)]
    for several in distinct:
        code = submit(several) if several else 0
        if code == 130:
            raise KeyboardInterrupt
        if code == EXIT_BUSY:
            raise Busy(f"another process runs some of these under {root}; ask again when it is done")
    return cells


@dataclass(frozen=True)
class Judged:
    """A verdict on a pair.

    named: stage of the first finding; `stages` are all that it leaves open. stage: where the fault is, empty for a
    clean pair.
    """

    outcome: str
    step: int | None
    named: str
    stages: tuple[str, ...]
    stage: str
    sentence: str

    @property
    def caught(self) -> bool:
        return self.outcome not in PASSES

    @property
    def placed(self) -> bool:
        return self.caught and self.stage in self.stages


def judge_pair(pair: Pair, arm: Path, control: Path) -> Judged:
    """Raises `StoreError`: one of them is no run."""
    verdict = compare(arm, control)
    first = next((f for f in verdict.findings if f.grade is not Grade.ok), None)
    step, named = (None, "") if first is None else (first.step, first.stage.value)
    stages = () if first is None else tuple(stage.value for stage in first.stages)
    return Judged(verdict.outcome.value, step, named, stages, pair.stage, verdict.sentence)
