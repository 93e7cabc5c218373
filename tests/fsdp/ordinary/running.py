"""Runs a program's text: on one process in plain torch, and on ranks under an engine; and what comes of it."""

from __future__ import annotations

import copy
import linecache
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from harness.fsdp import MixedPrecisionPolicy, ShardedModel, fully_shard, fully_shard_model, fully_shard_optimizer
from tests.fsdp.ordinary import pieces
from tests.fsdp.ordinary.pieces import WORDS, Batch
from tests.fsdp.ordinary.program import Program
from tests.fsdp.ordinary.source import text_of
from tests.support.visits import Lost, Visit

RANKS = 2
ENGINE = f"{os.sep}harness{os.sep}fsdp{os.sep}"
ACCIDENTS = (AssertionError, AttributeError, KeyError, IndexError, ZeroDivisionError, UnboundLocalError, NameError)
"""What is raised by mistake, and never to tell a user something."""


class Renamed(torch.optim.AdamW):
    """An optimizer of the program's own, which steps as its parent does."""


@dataclass
class Trained:
    """weights: whole, by model and name. seen: what a program observed, of one rank's data (None: of all ranks')."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[int | None, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Raised:
    """kind: of the exception. by_engine: raised on purpose by the engine's code, to be read by a user."""

    kind: str
    sentence: str
    by_engine: bool
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}"


WRAPPED = "_checkpoint_wrapped_module."
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
Outcome = Trained | Raised | Lost


# -- what a program sees -----------------------------------------------------------------------------------------------


def batch_of(step: int, rank: int, index: int, *, rows: int = 2, salt: int = 0) -> Batch:
    """Microbatch `index` of a rank in a step, from no other rank, step or salt."""
    generator = torch.Generator().manual_seed(((step * 31 + rank) * 31 + index) * 7 + salt)
    tokens = torch.randint(0, WORDS, (2, rows, 4), generator=generator)
    return Batch(tokens[0], tokens[1], step, index, rank)


def batches(program: Program, ranks: Sequence[int], step: int) -> Iterator[Batch]:
    """Microbatches of `ranks` in a step; each counts 1 / k, and on one process that has all ranks' less."""
    for rank in ranks:
        for index in range(program.k):
            yield replace(
                batch_of(step, rank, index),
                weight=1 / (program.k * len(ranks)),
                last=index == program.k - 1,
                other=batch_of(step, rank, index, salt=1),
            )


@dataclass
class World:
    """Where a program runs. ranks: whose data this process has. dtype: of its models."""

    program: Program
    ranks: tuple[int, ...]
    dtype: torch.dtype
    seen: dict[int | None, list[float]] = field(default_factory=dict)

    def observe(self, value: Any, batch: Batch | None = None) -> None:
        """Note a number, or the mean of a tensor."""
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        number = float(value.detach().double().mean()) if isinstance(value, Tensor) else float(value)
        self.seen.setdefault(batch.rank if batch else None, []).append(number)

    def names(self) -> dict[str, Any]:
        """What every program may use, whichever engine it runs under."""
        return {
            **{name: getattr(pieces, name) for name in ("Net", "Critic", "Narrower", "Piece", "loss_of", "logits_of")},
            "torch": torch,
            "nn": nn,
            "copy": copy,
            "nullcontext": nullcontext,
            "Renamed": Renamed,
            "get_model_state_dict": get_model_state_dict,
            "set_model_state_dict": set_model_state_dict,
            "FULL": StateDictOptions(full_state_dict=True),
            "OF_FIRST": StateDictOptions(full_state_dict=True, broadcast_from_rank0=len(self.ranks) == 1),
            "is_first": 0 in self.ranks,
            "checkpoint_wrapper": checkpoint_wrapper,
            "right": lambda batch: nn.functional.one_hot(batch.targets, WORDS).to(self.dtype),
            "observe": self.observe,
            "batches": partial(batches, self.program, self.ranks),
            "validation": lambda step: [batch_of(step, rank, 0, salt=2) for rank in self.ranks],
        }


def ours(program: Program) -> dict[str, Any]:
    """Names of our engine, and of what its arguments mention."""
    return {
        **{each.__name__: each for each in (fully_shard, fully_shard_model, fully_shard_optimizer)},
        "WIDE": MixedPrecisionPolicy(main_params_dtype=None),
        "NARROW": MixedPrecisionPolicy(main_params_dtype=torch.float32),
        "mesh": init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("outer", "shard")) if program.hybrid else None,
    }


def plainly(program: Program) -> dict[str, Any]:
    """The same names for one process, where nothing is sharded."""

    def model_alone(model: nn.Module, **_: Any) -> nn.Module:
        more: Any = model
        more.no_sync, more.unsharded = nullcontext, nullcontext
        more.clip_grad_norm_ = lambda limit, norm_type=2.0: _clipped(model, limit, norm_type)
        object.__setattr__(model, "module", model)
        return model

    return {
        "fully_shard": lambda model, optimizer, **_: (model_alone(model), optimizer),
        "fully_shard_model": model_alone,
        "fully_shard_optimizer": lambda model, optimizer: optimizer,
        "WIDE": None, "NARROW": None, "mesh": None,
    }  # fmt: skip


def _clipped(model: nn.Module, limit: float, norm_type: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type)


# -- one run -----------------------------------------------------------------------------------------------------------

Weights = Callable[[Any], dict[str, Tensor]]


def whole_weights(model: Any) -> dict[str, Tensor]:
    """Of our model, or of a module."""
    if isinstance(model, ShardedModel):
        return dict(model.full_weights())
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def execute(
    text: str, program: Program, world: World, names: dict[str, Any], weights: Weights = whole_weights
) -> Trained:
    """Run a program's text; what it raises is raised."""
    place = f"<program {program.seed}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    space = {**world.names(), **names}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, place, "exec"), space)
    models = [name for name in ("model", "critic") if name in space]
    named = [(f"{name}.{key}", value) for name in models for key, value in weights(space[name]).items()]
    trained = {name.replace(WRAPPED, ""): value for name, value in named}
    for name in models:
        if isinstance(space[name], ShardedModel):
            space[name].close()
    return Trained(trained, seen=world.seen)


def reference(program: Program) -> Trained:
    """The program on one process, in fp64, over all ranks' data."""
    world = World(program, tuple(range(RANKS)), torch.float64)
    found = execute(_in_wide(text_of(program)), program, world, plainly(program))
    found.start = start_of(program)
    return found


def _in_wide(text: str) -> str:
    """With optimizer and averages over fp64: of the weights as the program's dtype has them."""
    return text.replace(".to(torch.bfloat16)", ".to(torch.bfloat16).double()").replace(
        ".to(torch.float32)", ".to(torch.float32).double()"
    )


def start_of(program: Program) -> dict[str, Tensor]:
    """Weights before the first step, fp64."""
    models = {"model": pieces.Net(program.pieces, program.carry, program.tied)}
    models |= {"critic": pieces.Critic()} if program.loop == "gan" else {}
    if program.choice == "mixed":
        for piece in models["model"].pieces:
            piece.down = pieces.Narrower(piece.down)
    named = [
        (name, *pair)
        for name, model in models.items()
        for pair in model.to(DTYPES[program.dtype]).double().named_parameters()
    ]
    return {f"{name}.{key}": value.detach() for name, key, value in named}


def attempt(rank: int, program: Program) -> Outcome:
    """The program on a rank, under our engine."""
    world = World(program, (rank,), DTYPES[program.dtype])
    try:
        return execute(text_of(program), program, world, ours(program))
    except Exception as error:
        return raised(error)


def raised(error: Exception) -> Raised:
    """An exception, and whether it is meant to be read."""
    frames = traceback.extract_tb(error.__traceback__)
    line = (frames[-1].line or "").strip() if frames else ""
    meant = ENGINE in frames[-1].filename and not isinstance(error, ACCIDENTS) and line.startswith("raise")
    return Raised(type(error).__name__, str(error), meant, "".join(traceback.format_exception(error)))


def run(attempt: Callable[[int, Any], Any], todo: Sequence[Any], patience: float = 20) -> list[list[Any]]:
    """Outcomes of `attempt(rank, each)` by program and rank; new ranks run what comes after a program that raises."""
    return Visit(attempt, RANKS, _has_raised, patience).run(todo)


def _has_raised(outcome: Any) -> bool:
    """Whether an outcome, or the first of several things that came with it, is an error."""
    return isinstance(outcome[0] if isinstance(outcome, tuple) else outcome, Raised)
