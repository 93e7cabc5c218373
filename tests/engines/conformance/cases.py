"""Which trainings an engine is asked to do: a covering subset of all that its row of capabilities allows.

A combination exists where no rule of `harness.config.rules.engine` refuses it. Of these as many are taken as it needs
for every two values of two axes to meet: a fault that shows with 3 ranks in bf16, whatever the rest, is met.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cache

from harness.config.rules import engine as engine_rules, rules_of
from harness.config.rules.request import Request
from harness.config.schema import Config, DtypeConfig, EngineName, Numerics, OptimizerName, OuterStrategy, Strategy
from tests.support.composing import compose

WORLD_SIZES = (1, 2, 3, 4)
PEERS = frozenset(("fsdp1", "fsdp2", "megatron_fsdp", "deepspeed"))
"""Engines that are not ours and cost seconds a case."""
DTYPES = ("fp32", "bf16", "bf16_comm", "fp64")
_ODD = ("model=odd", "model.vocab_size=31", "model.dim=13", "model.num_layers=2", "model.ffn_dim=17")
MODELS = {
    "small": (
        *("model=tiny", "model.vocab_size=31", "model.dim=24", "model.num_layers=2", "model.num_heads=2"),
        *("model.num_kv_heads=1", "model.ffn_dim=20", "model.max_seq_len=16"),
    ),
    "odd": _ODD,
    "busy": (*_ODD, "model.skip_idle=false"),
}
"""Models by name, small enough that starting the ranks takes longest. `odd` has what sharding gets wrong: tied, frozen,
tiny and at times unused weights (harness/models/odd.py); `busy` is the same with all of them used, for engines that
cannot do without."""

CLIP = 0.25
"""Below the norms that occur, so that it acts."""
LEARNING_RATES = (1.0, 0.4, 1.7, 0.6, 1.2, 0.9)
"""Factors of `optimizer.lr` by step: a rate that is set once and kept is one that shows."""


@dataclass(frozen=True)
class Case:
    """One training on one engine."""

    engine: str
    strategy: str
    outer: str | None
    """Outer strategy over two replicas; None: no outer axis."""
    world_size: int
    k: int
    optimizer: str
    clip: bool
    dtype: str
    model: str
    numerics: str
    adapter: str | None = None

    def __str__(self) -> str:
        shard = self.strategy + (f"+{self.outer}" if self.outer else "")
        words = [self.engine, shard, f"{self.world_size}ranks", f"k{self.k}", self.optimizer]
        words += ["clip"] if self.clip else []
        return "-".join([*words, self.dtype, self.model, self.numerics])

    @property
    def num_microbatches(self) -> int:
        """M: microbatches of a step over all ranks."""
        return self.world_size * self.k

    @property
    def keeps_its_bits(self) -> bool:
        """Whether the same steps from the same state are promised to give the same bits."""
        return self.numerics != Numerics.fast.name

    def config(self) -> Config:
        """The cell, complete."""
        config = _base(self.model)
        config = Config(**{field.name: copy(getattr(config, field.name)) for field in fields(config)})
        config.engine.name, config.engine.adapter = EngineName[self.engine], self.adapter
        config.sharding.strategy = Strategy[self.strategy]
        config.sharding.outer = OuterStrategy[self.outer or "no_shard"]
        config.mesh.world_size, config.mesh.dp_outer = self.world_size, 2 if self.outer else 1
        config.train.microbatch_size, config.train.global_batch_size = 2, 2 * self.num_microbatches
        config.dtype = copy(_dtype(self.dtype))
        config.numerics.mode = Numerics[self.numerics]
        optimizer = config.optimizer
        optimizer.name, optimizer.clip_norm = OptimizerName[self.optimizer], CLIP if self.clip else None
        if self.optimizer == "sgd":
            optimizer.lr, optimizer.momentum, optimizer.weight_decay = 0.1, 0.9, 0.2
        else:  # A large epsilon: updates are no mere signs, which rounding flips and no wrong scale changes.
            optimizer.lr, optimizer.eps, optimizer.weight_decay = 3e-3, 1e-3, 0.5
        return config

    def reference(self, dtype: str) -> Config:
        """The same training in one process: every microbatch of a step, in global order."""
        config = self.config()
        config.engine.name, config.engine.adapter = EngineName.single, None
        config.sharding.strategy, config.sharding.outer = Strategy.no_shard, OuterStrategy.no_shard
        config.mesh.world_size = config.mesh.dp_outer = 1
        config.dtype, config.numerics.mode = copy(_dtype(dtype)), Numerics.deterministic
        return config


@cache
def cases(engine: str, adapter: str | None = None) -> tuple[Case, ...]:
    """The cases of one engine, those of one world size side by side."""
    allowed = list(_allowed(engine, adapter))
    if any(case.model == "odd" for case in allowed):
        allowed = [case for case in allowed if case.model != "busy"]
    chosen = _cover(allowed)
    return tuple(sorted(chosen, key=lambda case: case.world_size))


@cache
def core(engine: str, adapter: str | None = None) -> frozenset[Case]:
    """The part of the cases that `make test` runs: each value of each axis at least once, on as few ranks as can be. Of
    engines that are not ours, those of at most two ranks."""
    largest = 2 if engine in PEERS else max(WORLD_SIZES)
    left = [case for case in cases(engine, adapter) if case.world_size <= largest]
    missing = {value for case in left for value in _shows(case)}
    chosen = set()
    while missing:
        best = max(left, key=lambda case: len(_shows(case) & missing) / case.world_size)
        chosen.add(best)
        missing -= _shows(best)
    return frozenset(chosen)


@cache
def _shows(case: Case) -> frozenset[str]:
    """What a case counts for in the core: its values, and whether it is a group of one, an even split or an uneven one.

    A group of one shows that it works; everything else is to be shown where ranks exchange something.
    """
    split = {1: "alone", 3: "unevenly"}.get(case.world_size, "evenly")
    if case.world_size == 1 and case.engine != EngineName.single.name:
        return frozenset((split,))
    return frozenset((split, *(value for value in _values(case) if not value.startswith("world_size="))))


def _allowed(engine: str, adapter: str | None) -> Iterator[Case]:
    """Every combination that the engine's row has all for. The row does not depend on microbatches and optimizer."""

    @cache
    def is_allowed(strategy: str, outer: str | None, world_size: int, dtype: str, model: str, mode: str) -> bool:
        case = Case(engine, strategy, outer, world_size, 1, "adamw", False, dtype, model, mode, adapter)
        request = Request(case.config())
        return not any(True for rule in rules_of(engine_rules) for _ in rule.apply(request))

    shards = [(s.name, None) for s in Strategy] + [(s.name, o.name) for s in Strategy for o in OuterStrategy]
    axes = WORLD_SIZES, (1, 2, 3), ("adamw", "sgd"), (False, True), DTYPES, tuple(MODELS), [n.name for n in Numerics]
    for (strategy, outer), world_size, k, optimizer, clip, *row in itertools.product(shards, *axes):
        possible = outer is None or world_size == 4  # two replicas of two ranks
        if possible and is_allowed(strategy, outer, world_size, *row):
            yield Case(engine, strategy, outer, world_size, k, optimizer, clip, *row, adapter)


def _cover(allowed: Sequence[Case]) -> list[Case]:
    """Greedy: of a few dozen drawn at random, the one that covers most of what is uncovered. The same every time."""
    draw = random.Random(1)
    missing = {pair for case in allowed for pair in _pairs(case)}
    chosen: list[Case] = []
    while missing:
        wanted = min(missing)
        candidates = [case for case in allowed if wanted in _pairs(case)]
        candidates = draw.sample(candidates, min(60, len(candidates)))
        best = max(candidates, key=lambda case: len(_pairs(case) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


@cache
def _pairs(case: Case) -> frozenset[tuple[str, str]]:
    """The values that are to meet, two by two, each with its axis; of a hybrid's two strategies both meet a dtype."""
    axes = sorted(_values(case))
    hybrid = (f"shard={case.strategy}+{case.outer}", f"dtype={case.dtype}")
    return frozenset((*itertools.combinations(axes, 2), hybrid))


@cache
def _values(case: Case) -> frozenset[str]:
    """The value of each axis."""
    update = f"update={case.optimizer}, clipped: {case.clip}"
    rest = [f"{name}={getattr(case, name)}" for name in ("world_size", "k", "dtype", "model", "numerics")]
    return frozenset((f"strategy={case.strategy}", f"outer={case.outer}", update, *rest))


@cache
def _base(model: str) -> Config:
    words = ["data=synthetic", "data.seq_len=8", "launch.dry_run=true", "measure.capture_steps=[]"]
    return compose([*MODELS[model], *words]).typed


@cache
def _dtype(name: str) -> DtypeConfig:
    return compose([f"dtype={name}", "launch.dry_run=true"]).typed.dtype
