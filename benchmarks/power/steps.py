"""The power study: every fault of the corpus at every strength, and pairs that differ only in what must not matter.

A faulty run is held against two clean ones: its *baseline*, the same cell without the fault, and a *reference*, that
training by torch's DDP, as one would hold a new engine against one that is trusted. A clean pair are two runs of one
world: the same model, data, optimizer and seed, otherwise sharded, cut, sent or promised.

[Note: Held out] A third of the faults (by name, with all strengths) and a third of the clean pairs (by world and seed,
with all their runs) is held out, chosen by a hash, so that nobody chooses. Tolerances are fixed before these are run.
Clean pairs of one world and seed share runs, so they are fewer independent trials than they are pairs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any
from unittest import mock

from harness.config.compose import Cell
from harness.config.words import quote
from harness.store.errors import EXIT_BUSY, Busy
from harness.study.cells import Composer
from harness.train.faults import AMOUNTS
from tests.faults.corpus import corpus

STUDY = "power"
STEPS = 8
PREEMPT_AT = 4
"""Step after which a run that is to be resumed is interrupted."""
CAPTURED = "[1,2,3]"

BASE = (
    f"study.name={STUDY}",
    f"train.steps={STEPS}",
    "train.warmup_steps=0",
    "train.global_batch_size=8",
    "train.microbatch_size=4",
    "data.seq_len=32",
    "ckpt=none",
    f"measure.capture_steps={CAPTURED}",
    f"measure.update_steps={CAPTURED}",
)


class Kind(Enum):
    """What is known of a pair before it is judged."""

    faulty = "faulty"
    clean = "clean"


@dataclass(frozen=True)
class Pair:
    """An arm and what it is held against, as overrides.

    name: of the fault, or of the clean difference. strength: of the fault. against: what kind of control it is.
    """

    kind: Kind
    name: str
    strength: str
    against: str
    arm: tuple[str, ...]
    control: tuple[str, ...]
    resumes: bool = False
    group: str = ""
    """World and seed of a clean pair; no other group has its runs."""

    @property
    def held_out(self) -> bool:
        """Whether the pair belongs to the third that tolerances were not fixed on; see [Note: Held out]."""
        return _third(self.name if self.kind is Kind.faulty else self.group)


def _third(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 3 == 0


def pairs(*, short: bool = False) -> list[Pair]:
    """Every pair; `short`, for CI, takes each fault at full strength against its baseline, and that against its
    reference, which it must pass."""
    return [*_shortly()] if short else [*(pair for pair in faulty() if corpus()[pair.name].measured), *clean()]


def _shortly() -> Iterator[Pair]:
    baselines: dict[tuple[str, ...], Pair] = {}
    for pair in faulty():
        if pair.strength == "full" and pair.against == "baseline":
            yield pair
            reference = _reference(pair.control)
            said = f"baseline of {pair.name}"
            baselines.setdefault(
                pair.control, Pair(Kind.clean, said, "", "reference", pair.control, reference, group=said)
            )
    yield from baselines.values()


def faulty() -> Iterator[Pair]:
    """Every fault that judges may see, at every strength, against its baseline and against a reference."""
    for fault in (each for each in corpus().values() if not each.is_held_out):
        for strength in AMOUNTS:
            baseline = (*BASE, *(RESUMED if fault.resumes else ()), *fault.cell)
            arm = (*baseline, *fault.asked(strength=strength))
            yield Pair(Kind.faulty, fault.name, strength, "baseline", arm, baseline, fault.resumes)
            yield Pair(Kind.faulty, fault.name, strength, "reference", arm, _reference(baseline), fault.resumes)


RESUMED = ("ckpt=last",)


def _reference(baseline: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides of the same training by DDP on as many ranks."""
    kept = [text for text in baseline if not text.startswith(("sharding=", "ckpt=", "numerics="))]
    flat = ["mesh.world_size=4" if text == "mesh=two_by_two" else text for text in kept]  # DDP knows no outer axis
    return (*flat, "engine=ddp", "ckpt=none")


@dataclass(frozen=True)
class World:
    """What all runs of a clean comparison share, and the run that its arms are held against.

    dtype: of the arms. trusted: overrides of the control; a perturbed reference in double precision gives every tensor
    a bound of its own, another engine in the same dtype is held to counted ones.
    """

    name: str
    overrides: tuple[str, ...]
    dtype: str = "fp32"
    trusted: tuple[str, ...] = ("engine=ddp",)

    def arm(self, seed: int, difference: tuple[str, ...]) -> tuple[str, ...]:
        """Overrides of one arm."""
        return (*BASE, *self.overrides, f"train.seed={seed}", f"dtype={self.dtype}", *difference)

    def control(self, seed: int) -> tuple[str, ...]:
        """Overrides of the run all arms are held against."""
        dtype = () if any(text.startswith("dtype=") for text in self.trusted) else (f"dtype={self.dtype}",)
        return (*BASE, *self.overrides, f"train.seed={seed}", *dtype, *self.trusted)


FP64 = ("engine=single", "sharding=no_shard", "mesh.world_size=1", "dtype=fp64", "measure.rounding_draws=8")

WORLDS = (
    World("tiny fp32", ()),
    World("tiny fp32 sgd unclipped", ("optimizer=sgd", "optimizer.clip_norm=null")),
    World("tiny bf16", (), "bf16"),
    World("odd fp32", ("model=odd",)),
    World("odd fp32 sgd", ("model=odd", "optimizer=sgd", "optimizer.clip_norm=0.5")),
    World("moe fp32", ("model=moe",)),
)
"""Kinds of training."""

REFERENCED = (
    World("tiny fp32", (), trusted=FP64),
    World("tiny bf16", (), "bf16", trusted=FP64),
    World("odd fp32", ("model=odd",), trusted=FP64),
)
"""Worlds whose arms are held against the perturbed reference."""

SEEDS = (0, 1, 2, 3)

DIFFERENCES = {
    "no_shard": ("sharding=no_shard",),
    "optim": ("sharding=optim",),
    "optim_grads": ("sharding=optim_grads",),
    "optim_grads_params": ("sharding=optim_grads_params",),
    "repetition": ("engine=ddp", "train.replicate=1"),
    "prefetch": ("engine.prefetch=0",),
    "messages": ("engine.transport=backend",),
    "reads": ("engine.transport=auto", "sharding=optim_grads"),
    "ordered": ("numerics=ordered", "sharding=optim"),
    "microbatches": ("train.microbatch_size=2",),
    "four ranks": ("mesh.world_size=4", "train.microbatch_size=2"),
    "four ranks, optim": ("mesh.world_size=4", "train.microbatch_size=1", "sharding=optim"),
    "one process": ("engine=single", "sharding=no_shard", "mesh.world_size=1"),
    "fsdp2": ("engine=fsdp2",),
}
"""What must not matter, by name."""


NEIGHBOURS = (1, 2)
"""Which of the following arms, in the order of `DIFFERENCES`, each arm is held against besides the control."""


def clean() -> Iterator[Pair]:
    """Every difference in every world, at every seed: against what is trusted, and against other arms."""
    names = list(DIFFERENCES)
    for world in (*WORLDS, *REFERENCED):
        kind = "control" if world in WORLDS else "reference"
        for seed in SEEDS:
            group = f"{world.name}, seed {seed}"
            arms = {name: world.arm(seed, overrides) for name, overrides in DIFFERENCES.items()}
            for number, name in enumerate(names):
                yield Pair(Kind.clean, f"{world.name}: {name}", "", kind, arms[name], world.control(seed), group=group)
                for other in (names[(number + far) % len(names)] for far in NEIGHBOURS if world in WORLDS):
                    said = f"{world.name}: {name}, {other}"
                    yield Pair(Kind.clean, said, "", "arm", arms[name], arms[other], group=group)


@contextmanager
def _tried_here() -> Iterator[None]:
    """Faults are tried in this process, which has imported torch, and not in one of its own each."""
    from harness.worker.describe import Unusable, described

    known: dict[str, str] = {}

    def told(kind: str, setting: str, name: str, shaping: Mapping[str, Any]) -> str:
        try:
            return json.dumps(described(kind, setting, name, shaping))
        except Unusable as error:
            return json.dumps(error.told)

    def ask(question: str, _folder: str) -> tuple[list[str], str]:
        asked = json.loads(question)
        for target in asked["targets"]:
            if target[-1] not in known:
                known[target[-1]] = told(*target, asked["config"])
        return [known[target[-1]] for target in asked["targets"]], ""

    with mock.patch("harness.config.own._ask", ask):
        yield


def compose_all(wanted: Iterable[tuple[str, ...]], extra: tuple[str, ...] = ()) -> dict[tuple[str, ...], Cell]:
    """Cells by their overrides, composed and checked; `extra` is added to each.

    Raises:
        BadRequest: with the violations of the first cell that has any.
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
    pair says it.

    Raises:
        BadRequest: a cell cannot be run, or the disk has no room for all of them; nothing was started.
        Busy: another process runs some of them.
        KeyboardInterrupt: Ctrl-C; asked again, runs that are done are used again.
    """
    from harness.launch.room import check_room
    from harness.launch.submit import submit

    where = (f"launch.root={quote(root)}",)
    cells = compose_all((text for pair in pairs for text in (pair.control, pair.arm)), where)
    resumed = compose_all((pair.arm for pair in pairs if pair.resumes), (*where, f"launch.preempt_at={PREEMPT_AT}"))
    distinct = [list({cell.signature: cell for cell in several.values()}.values()) for several in (resumed, cells)]
    fix = "--root A_FOLDER_WITH_ROOM, or fewer faults (--short, --only TEXT)"
    check_room(distinct[-1], subject=f"--root {root}", fix=fix)  # every resumed cell is among them
    for several in distinct:
        code = submit(several) if several else 0
        if code == 130:
            raise KeyboardInterrupt
        if code == EXIT_BUSY:
            raise Busy(f"another process runs some of these under {root}; ask again when it is done")
    return cells
