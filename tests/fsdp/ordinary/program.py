"""A program as a point: a value on each axis. `draw(seed)` gives one; `COVERING` are few that hold every value."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from tests.fsdp.ordinary.pieces import CARRIES, KINDS
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import covering

COUNT = 500
OPTIMIZERS = {
    "sgd": "SGD({}, lr=0.1)",
    "momentum": "SGD({}, lr=0.05, momentum=0.9, weight_decay=0.1)",
    "nesterov": "SGD({}, lr=0.05, momentum=0.9, nesterov=True)",
    "adam": "Adam({}, lr=0.02, eps=1e-2, weight_decay=0.1)",
    "amsgrad": "Adam({}, lr=0.02, eps=1e-2, amsgrad=True)",
    "adamw": "AdamW({}, lr=0.02, eps=1e-2, weight_decay=0.3)",
    "foreach": "AdamW({}, lr=0.02, eps=1e-2, weight_decay=0.3, foreach=True)",
    "adagrad": "Adagrad({}, lr=0.05, eps=1e-2, initial_accumulator_value=0.1)",
    "rmsprop": "RMSprop({}, lr=0.01, eps=1e-1, momentum=0.5, weight_decay=0.1)",
    "nadam": "NAdam({}, lr=0.02, eps=1e-2)",
    "subclass": "Renamed({}, lr=0.02, eps=1e-2)",
    "lbfgs": "LBFGS({}, lr=0.1, max_iter=2)",
}
ZEROS = {
    "start": "{o}.zero_grad()",
    "end": "{o}.zero_grad()",
    "zeros": "{o}.zero_grad(set_to_none=False)",
    "model": "{m}.zero_grad()",
    "module": "{m}.module.zero_grad()",
    "none": "for p in {m}.parameters():\n    p.grad = None",
}
CHOICES = {
    "nothing": "",
    "double_buffer": "double_buffer=True",
    "on_demand": "prefetch=0",
    "far_ahead": "prefetch=100",
    "concat": 'grad_buffer="concat"',
    "offload": "offload_optimizer=True",
    "backend": 'transport="backend"',
    "ordered": 'numerics="ordered"',
    "exact": 'numerics="exact"',
    "mixed": "",
}
"""What an engine may choose, as an argument; or, as `mixed`, that one weight of each piece has another dtype."""


@dataclass(frozen=True)
class Program:
    """A training; every field but the first is an axis, and its default what a first program would do."""

    seed: int = -1
    pieces: tuple[str, ...] = ("Mlp", "Attention")
    carry: str = "tensor"
    tied: bool = False
    units: str = "pieces"
    loop: str = "plain"
    k: int = 1
    accumulate: str = "no_sync"
    zero: str = "end"
    clip: str = "nothing"
    between: str = "nothing"
    aside: str = "nothing"
    optimizer: str = "adamw"
    given: str = "parameters"
    freezing: str = "nothing"
    order: str = "wrapped"
    strategy: str = "optim_grads_params"
    hybrid: str = ""
    dtype: str = "fp64"
    choice: str = "nothing"

    @property
    def values(self) -> tuple[tuple[str, object], ...]:
        """Value by axis; a kind of piece is an axis of two values."""
        plain = tuple((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in ("seed", "pieces"))
        return plain + tuple((kind, kind in self.pieces) for kind in KINDS)

    @property
    def reduces_once(self) -> bool:
        """Whether gradients travel once a step over some axis, so that the engine must know a step's last backward."""
        return bool(self.hybrid) or self.strategy in ("no_shard", "optim")


AXES: dict[str, tuple[object, ...]] = {
    "carry": tuple(CARRIES),
    "tied": (False, True),
    "units": ("pieces", "none", "linear"),
    "loop": ("plain", "two_forwards", "two_losses", "closure", "gan", "two_optimizers", "in_turns"),
    "k": (1, 2, 3),
    "accumulate": ("no_sync", "each"),
    "zero": tuple(ZEROS),
    "clip": ("nothing", "ours", "infinity", "torch", "value"),
    "between": ("nothing", "eval", "inference", "validation", "interrupted"),
    "aside": (
        "nothing", "scheduler", "rates", "ema", "gathered_ema", "penalty", "clamps", "reads", "saves",
        "saves_optimizer", "copies", "adds_group", "scaler", "scaler_off", "saliency", "retries",
    ),
    "optimizer": tuple(OPTIMIZERS),
    "given": ("parameters", "trained", "named", "groups"),
    "freezing": ("nothing", "embedding", "norms", "biases_only", "first_piece", "later"),
    "order": ("wrapped", "after", "explicit"),
    "strategy": STRATEGIES,
    "hybrid": ("", "no_shard", "optim"),
    "dtype": ("fp64", "fp32", "bf16"),
    "choice": tuple(CHOICES),
}  # fmt: skip
OFTEN = {"loop": 0.5, "clip": 0.5, "between": 0.4, "aside": 0.4, "units": 0.6, "accumulate": 0.8, "freezing": 0.5,
         "hybrid": 0.7, "dtype": 0.6, "k": 0.4, "carry": 0.3}  # fmt: skip
"""How often an axis has its first value; elsewhere all values are as frequent. Else next to all would be refused."""


@cache
def draw(seed: int) -> Program:
    """Program number `seed`."""
    source = random.Random(6_151 * seed + 5)
    chosen = {
        axis: values[0] if source.random() < OFTEN.get(axis, 0.0) else source.choice(values)
        for axis, values in AXES.items()
        if axis != "choice"
    }
    chosen["strategy"] = STRATEGIES[seed % len(STRATEGIES)]
    pieces = tuple(source.choice(KINDS) for _ in range(source.randint(1, 3)))
    chosen["choice"] = source.choice(AXES["choice"])
    return _consistent(Program(seed, pieces, **chosen))  # type: ignore[arg-type] # drawn by field name


SEVERAL = ("two_optimizers", "in_turns", "gan")
SENSELESS: tuple[tuple[Callable[[Program], bool], dict[str, Any]], ...] = (
    (lambda p: p.loop == "closure" and p.zero not in ("start", "zeros"), {"zero": "start"}),
    (lambda p: p.loop in SEVERAL and p.zero not in ("start", "end"), {"zero": "start"}),
    (lambda p: p.loop in SEVERAL, {"given": "parameters", "clip": "nothing"}),
    (lambda p: p.aside in ("adds_group", "scaler", "scaler_off") and p.loop != "plain", {"aside": "nothing"}),
    # takes one group, and a closure
    (lambda p: p.optimizer == "lbfgs", {"given": "parameters", "loop": "closure", "zero": "start"}),
    (lambda p: p.optimizer == "lbfgs" and p.aside in ("adds_group", "scheduler"), {"aside": "nothing"}),
    # torch would keep, and clip by, gradients that no group's zero_grad forgets
    (lambda p: p.aside == "adds_group", {"zero": "model"}),
    # torch copies no tensor that has a graph, and averages tensors of one dtype
    (lambda p: p.aside == "copies" and "Auxiliary" in p.pieces, {"aside": "nothing"}),
    (lambda p: p.aside == "gathered_ema" and p.dtype == "bf16", {"dtype": "fp32"}),
    (lambda p: p.k == 1, {"accumulate": "no_sync"}),
    # sums integers of fp32 gradients
    (lambda p: p.choice == "exact" and p.dtype == "fp64", {"dtype": "fp32"}),
    # has no room for weights that stay until the backward
    (lambda p: p.choice == "double_buffer" and p.carry == "object", {"carry": "dict"}),
)
"""What means nothing beside the rest, and what stands there instead."""


def _consistent(program: Program) -> Program:
    for is_senseless, instead in SENSELESS:
        program = replace(program, **instead) if is_senseless(program) else program
    return program


@cache
def covering_seeds() -> tuple[int, ...]:
    """Few seeds that hold each value of each axis, under the strategy that releases weights and under one that keeps
    them; and each loop and each hybrid under each strategy."""
    return tuple(covering([held_by(draw(seed)) for seed in range(COUNT)], strength=1))


def held_by(program: Program) -> list[tuple[object, ...]]:
    """What a program shows: each of its values beside its strategy, or beside the kind of that."""
    kind = program.strategy == "optim_grads_params"
    beside = {"loop": program.strategy, "hybrid": program.strategy}
    return [(beside.get(axis, kind), axis, value) for axis, value in program.values]


def _named(**chosen: object) -> Program:
    return Program(seed=0, **chosen)  # type: ignore[arg-type] # drawn by field name


FOUND = {
    "a forward between forward and backward, where ranks use different units": _named(
        pieces=("DroppedApart",), between="interrupted"
    ),
    "clipping before the first step binds the optimizer": _named(pieces=("InTurns",), order="after", clip="ours"),
    "gradients forgotten as zeros": _named(
        pieces=("DroppedApart",), zero="zeros", strategy="optim", optimizer="momentum"
    ),
    "zeros are kept through a load": _named(pieces=("InTurns",), zero="zeros", strategy="no_shard", aside="saves"),
    "weights of a unit whose inputs no hook sees": _named(pieces=("Mlp", "Mlp"), carry="dict", freezing="first_layers"),
    "a unit that takes and gives objects": _named(pieces=("Mlp", "Mlp"), carry="object", freezing="first_layers"),
    "two calls of each unit in a double buffer": _named(
        pieces=("Mlp", "Mlp", "Mlp"), loop="two_forwards", choice="double_buffer", freezing="first_layers"
    ),
}
"""Programs that were wrong, or hung, as short as they still were."""
