"""The power study of whole runs: faults that begin late or at once, seen as by default or at every step, in training
that is stable or hot; and clean pairs of all of it.

The cell is the one in which late faults were found to pass: 12 steps without warm-up, batch 8, sequences of 32, four
ranks where a fault asks for them, else two. All runs capture what is captured by default, gradients and updates; faults
at full strength, and what they are held against, capture the gradients of every step. A *view* hides what a run with
other settings would not have (`seen_at` of `whole_runs.py`), so that all views judge the same runs.

[Note: New third] A third of the faults and of the clean groups is held out, by a hash that has nothing to do with that
of `benchmarks.power.steps`, and judged once, after judges and bounds were frozen.

[Note: Fresh part] Once a held-out third was judged it guards nothing any more. `fresh` is a part of its own, of faults
that no judge has seen (an edition of the corpus) and of clean groups with other seeds and with arms that no campaign
had; all of it is held out, and the parts before it stay what they were.

[Note: Clean groups] The arms of one group have one world and one seed and differ in what must not matter; every two of
them are a pair. Pairs of a group share runs: groups are independent, pairs are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations

from benchmarks.power.steps import Kind
from harness.config.captured import spread
from harness.train.faults import AMOUNTS
from tests.faults.corpus import Fault, corpus

STUDY = "power_whole"
STEPS = 12
LATE = 8
"""The step at which late faults begin."""
PREEMPT_AT = 7
"""Step after which a run that is to be resumed is interrupted: what a resume spoils shows at `LATE`."""
SPREAD = tuple(sorted(spread(STEPS)))
"""What a run of so many steps captures by default."""
EVERY = f"measure.capture_steps=[{','.join(map(str, range(1, STEPS + 1)))}]"

BASE = (
    f"study.name={STUDY}",
    f"train.steps={STEPS}",
    "train.warmup_steps=0",
    "train.global_batch_size=8",
    "train.microbatch_size=4",
    "data.seq_len=32",
    "model.num_layers=2",
    "ckpt=none",
    f"measure.capture_steps=[{','.join(map(str, SPREAD))}]",
    f"measure.update_steps=[{','.join(map(str, SPREAD))}]",
)


@dataclass(frozen=True)
class World:
    """A kind of training. `hot` is what multiplies differences from step to step; `seeds` of its clean groups."""

    name: str
    overrides: tuple[str, ...]
    hot: bool
    seeds: int

    def cell(self, *more: str) -> tuple[str, ...]:
        """Overrides of a run; a learning rate, optimizer or bound that `more` names is its own."""
        own = {text.partition("=")[0] for text in more}
        return (*(text for text in (*BASE, *self.overrides) if text.partition("=")[0] not in own), *more)


WORLDS = {
    world.name: world
    for world in (
        World("fp32", (), False, 3),
        World("fp32 sgd", ("optimizer=sgd",), False, 2),
        World("bf16", ("dtype=bf16",), False, 3),
        World("hot x60", ("optimizer.lr=0.06",), True, 3),
        World("hot x300", ("optimizer.lr=0.3",), True, 2),
        World("hot sgd", ("optimizer=sgd", "optimizer.lr=1.0", "optimizer.clip_norm=null"), True, 2),
        World("hot bf16", ("dtype=bf16", "optimizer.lr=0.06"), True, 2),
    )
}

FAULTY = {"fp32": tuple(AMOUNTS), "bf16": ("full",), "hot x60": ("full",)}
"""Worlds into which late faults are put, and at which strengths."""
EARLY = "fp32"
"""The world into which faults are put from the first step on, at full strength."""

ONE = ("sharding=no_shard", "mesh.world_size=1")
ARMS = {
    "single k=1": ("engine=single", *ONE, "train.microbatch_size=8"),
    "single k=2": ("engine=single", *ONE),
    "single k=4": ("engine=single", *ONE, "train.microbatch_size=2"),
    "one rank": (*ONE, "train.microbatch_size=8"),
    "one rank k=2": ONE,
    "ddp": ("engine=ddp",),
    "fsdp2": ("engine=fsdp2", "sharding=optim_grads_params"),
    "no_shard": ("sharding=no_shard",),
    "no_shard k=2": ("sharding=no_shard", "train.microbatch_size=2"),
    "optim": ("sharding=optim",),
    "optim_grads k=4": ("sharding=optim_grads", "train.microbatch_size=1"),
    "optim_grads_params": ("sharding=optim_grads_params",),
    "optim_grads_params k=2": ("sharding=optim_grads_params", "train.microbatch_size=2"),
    "ordered": ("sharding=optim_grads_params", "numerics=ordered"),
}
"""What must not matter, by name."""

FRESH_EDITION = 2
"""The edition of faults in the fresh part."""
FRESH_SEEDS = {"fp32": 3, "fp32 sgd": 1, "bf16": 2, "hot x60": 2, "hot x300": 1, "hot sgd": 1, "hot bf16": 1}
"""Clean groups of the fresh part, by world; seeds from `FIRST_FRESH_SEED` on."""
FIRST_FRESH_SEED = 10
FRESH_ARMS = {
    **{
        name: ARMS[name]
        for name in ("single k=1", "single k=4", "one rank k=2", "ddp", "fsdp2", "no_shard", "optim_grads k=4")
    },
    "optim_grads_params": ARMS["optim_grads_params"],
    "hsdp": ("sharding=hsdp", "mesh=two_by_two", "train.microbatch_size=2"),
    "hfsdp k=2": ("sharding=hfsdp", "mesh=two_by_two", "train.microbatch_size=1"),
    "four ranks": ("sharding=optim", "mesh.world_size=4", "train.microbatch_size=2"),
    "buffers k=4": (
        "sharding=optim_grads_params",
        "engine.double_buffer=true",
        "engine.grad_buffer=concat",
        "train.microbatch_size=1",
    ),
    "messages": ("sharding=optim_grads_params", "engine.prefetch=2", "engine.transport=auto"),
}
"""What must not matter in the fresh part, by name."""


@dataclass(frozen=True)
class WholePair:
    """An arm and what it is held against, as overrides.

    name: of the fault, or of the two arms. begins: `late` or `early`; empty for clean pairs. against: `baseline` (same
    cell without the fault), `reference` (the same training by DDP) or `arm`.
    """

    kind: Kind
    name: str
    world: str
    begins: str
    strength: str
    against: str
    arm: tuple[str, ...]
    control: tuple[str, ...]
    resumes: bool = False
    group: str = ""
    is_fresh: bool = False

    @property
    def held_out(self) -> bool:
        """Whether the pair is of what judges were not mended on; see [Note: New third] and [Note: Fresh part]."""
        if self.is_fresh:
            return True
        text = f"whole runs: {self.name if self.kind is Kind.faulty else self.group}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 3 == 0


def pairs() -> list[WholePair]:
    """Every pair of the study but the fresh ones."""
    return [*faulty(), *clean()]


def fresh() -> list[WholePair]:
    """Every pair of the fresh part; see [Note: Fresh part]."""
    seeds = {world: range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + count) for world, count in FRESH_SEEDS.items()}
    groups = (_group(WORLDS[world], seed, FRESH_ARMS) for world in seeds for seed in seeds[world])
    return [replace(pair, is_fresh=True) for pair in chain(faulty(FRESH_EDITION), *groups)]


def faulty(edition: int = 1) -> Iterator[WholePair]:
    """Every fault of an edition that can act in the cell, late and early, against its baseline and against DDP."""
    for fault in (each for each in corpus().values() if each.edition == edition):
        if (
            fault.recipes or fault.tensor_parallel
        ):  # of 8 bits and of cut weights: other baselines, in docs/records/power.md
            continue
        for world, strengths in FAULTY.items():
            yield from _in_world(fault, WORLDS[world], strengths)


def _in_world(fault: Fault, world: World, strengths: tuple[str, ...]) -> Iterator[WholePair]:
    own = (*(("ckpt=last",) if fault.resumes else ()), *fault.cell)
    baseline = world.cell(*own, EVERY)
    flat = [text for text in baseline if not text.startswith(("sharding=", "ckpt=", "numerics=", "mesh=two"))]
    reference = (*flat, "engine=ddp", "ckpt=none")
    late_only = fault.resumes or fault.ends or world.name != EARLY
    for begins in ("late",) if late_only else ("late", "early"):
        at = LATE if begins == "late" and not (fault.resumes or fault.ends) else 1
        for strength in strengths if begins == "late" else ("full",):
            every = (EVERY,) if strength == "full" else ()
            arm = (*world.cell(*own, *every), *fault.asked(strength=strength, begins_at=at))
            for against, control in (("baseline", baseline), ("reference", reference)):
                yield WholePair(
                    Kind.faulty, fault.name, world.name, begins, strength, against, arm, control, fault.resumes
                )


def clean() -> Iterator[WholePair]:
    """Every two arms of every group."""
    for world in WORLDS.values():
        for seed in range(world.seeds):
            yield from _group(world, seed, ARMS)


def _group(world: World, seed: int, differing: Mapping[str, tuple[str, ...]]) -> Iterator[WholePair]:
    group = f"{world.name}, seed {seed}"
    arms = {name: world.cell(f"train.seed={seed}", *overrides) for name, overrides in differing.items()}
    for left, right in combinations(arms, 2):
        said = f"{left}, {right}"
        yield WholePair(Kind.clean, said, world.name, "", "", "arm", arms[left], arms[right], group=group)
