"""From one layout into another, bit by bit: what the matrix in docs/checkpoints.md and its test in CI share.

The right answer comes from one process: `single` trains three steps of the awkward model (tied, frozen, scalar-sized
rows, weights not used in every microbatch) and saves. Every layout loads that and saves a checkpoint of its own; a cell
is one layout loading what another wrote. A layout that cut tensors wrongly, and put them together wrongly in the same
way, would agree with itself: so a cell is held against the first process three times, by the weights the engine gathers
with its own collectives, by the reference's files chunk by chunk, and by the update it does next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.checkpoint.folder import path_of
from harness.checkpoint.manifest import Manifest
from harness.checkpoint.policy import Checkpoints
from harness.checkpoint.storage import whole_tensor
from harness.config.schema import Config, GradBuffer
from harness.control import Control
from harness.engines.protocol import Engine
from harness.fsdp.state.row_shard import local_of
from harness.probe.collectives import CollectiveMeter
from tests.engines.conformance.cases import Case
from tests.engines.conformance.trial import batches, make_engine, make_workload
from tests.support.factory import ranks_of
from tests.support.spawn import run_ranks

MICROBATCHES = 12
"""A step's, over all ranks: divisible by one to four of them."""
SAVED = 3
"""Steps the reference trained."""
LR = 3e-3
NEXT_STEP_TOLERANCE = 1e-11
"""Relative, of the weights after one update in fp64: ranks sum in another order, and nothing else differs."""


@dataclass(frozen=True)
class Layout:
    """Who holds a state, and how it is cut."""

    engine: str
    strategy: str
    world_size: int
    outer: str | None = None
    dtype: str = "fp64"
    concat: bool = False

    def __str__(self) -> str:
        cut = self.strategy + {None: "", "no_shard": "+hsdp", "optim": "+hfsdp"}[self.outer]
        ranks = "2x2" if self.outer else str(self.world_size)
        words = [self.engine, cut, ranks] + (["concat"] if self.concat else [])
        return " ".join(words + ([] if self.dtype == "fp64" else [self.dtype]))

    def config(self) -> Config:
        """The cell of a run with this layout."""
        k = MICROBATCHES // self.world_size
        case = Case(
            self.engine, self.strategy, self.outer, self.world_size, k, "adamw", True, self.dtype, "odd", "fast"
        )
        config = case.config()
        config.engine.grad_buffer = GradBuffer.concat if self.concat else GradBuffer.flat
        config.ckpt.keep = 1_000
        return config


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SINGLE = Layout("single", "no_shard", 1)
LAYOUTS = (
    SINGLE,
    Layout("native", "optim_grads_params", 1),
    *(Layout("native", strategy, world) for strategy in STRATEGIES for world in (2, 3, 4)),
    *(Layout("native", strategy, 4, outer) for strategy in STRATEGIES for outer in ("no_shard", "optim")),
    Layout("native", "optim_grads_params", 2, concat=True),
    *(Layout("fsdp2", "optim_grads", world) for world in (2, 3)),
    *(Layout("fsdp2", "optim_grads_params", world) for world in (3, 4)),
    Layout("fsdp2", "optim_grads_params", 4, "no_shard"),
    Layout("ddp", "no_shard", 2),
    Layout("ddp", "no_shard", 3),
    Layout("ddp", "optim", 4),
)


@dataclass(frozen=True)
class Cell:
    """What became of a checkpoint of `source` in `target`."""

    source: Layout
    target: Layout
    problems: tuple[str, ...]
    next_step: float
    """Largest relative distance of a weight after the next update to the reference's; inf where a loss differs."""

    @property
    def holds(self) -> bool:
        return not self.problems and self.next_step <= NEXT_STEP_TOLERANCE


def checkpoints_of(folder: Path, config: Config, rank: int) -> Checkpoints:
    """A run's checkpoints in this process; several ranks speak over the default group."""
    meter = CollectiveMeter()
    meter.close()
    group = dist.group.WORLD if config.mesh.world_size > 1 else None
    ranks = ranks_of(config, rank)
    return Checkpoints(folder, config, ranks, Control(ranks, group, meter), lambda _: None)


def build(config: Config, rank: int) -> Engine:
    return make_engine(config, make_workload(config), rank)


def train_step(engine: Engine, config: Config, rank: int, step: int) -> list[float]:
    """One update; this rank's losses."""
    todo = batches(config, rank, step)
    losses = [engine.forward_backward(batch, last=index == len(todo) - 1).item() for index, batch in enumerate(todo)]
    engine.step(LR)
    return losses


def write_reference(folder: Path) -> dict[str, Tensor]:
    """Train and save on one process; returns the weights after one more update."""
    config = SINGLE.config()
    engine = build(config, 0)
    for step in range(1, SAVED + 1):
        train_step(engine, config, 0, step)
    checkpoints_of(folder, config, 0).save(engine, SAVED, "reference")
    train_step(engine, config, 0, SAVED + 1)
    return dict(engine.named_weights())


def spoil(engine: Engine) -> None:
    """Fill everything a load is to bring with NaN, so that what is not loaded shows."""
    state = engine.state()
    with torch.no_grad():
        for key, tensor in state.tensors.items():
            if not key.endswith("/step"):
                local_of(tensor).fill_(math.nan)
    state.adopt()


def write_all(rank: int, root: Path, layouts: Sequence[Layout]) -> None:
    """Every layout takes the reference and saves what it has then."""
    for layout in layouts:
        config = layout.config()
        engine = build(config, rank)
        checkpoints_of(root / "reference", config, rank).load_newest(engine)
        checkpoints_of(root / str(layout), config, rank).save(engine, SAVED, "reference")
        engine.close()


def read_all(rank: int, root: Path, targets: Sequence[tuple[Layout, list[Layout]]], after: dict[str, Tensor]) -> Any:
    """Every target takes each of its sources; a list of cells."""
    return [cell for layout, sources in targets for cell in _read_into(rank, root, layout, sources, after)]


def _read_into(rank: int, root: Path, layout: Layout, sources: list[Layout], after: dict[str, Tensor]) -> list[Cell]:
    config = layout.config()
    engine = build(config, rank)
    reference = Manifest.read(path_of(root / "reference", SAVED))
    wanted = {
        key.removeprefix("weights/"): whole_tensor(path_of(root / "reference", SAVED), entry)
        for key, entry in reference.tensors.items()
        if key.startswith("weights/")
    }
    cells = []
    for source in sources:
        spoil(engine)
        loaded = checkpoints_of(root / str(source), config, rank).load_newest(engine)
        assert loaded is not None
        assert loaded.step == SAVED
        problems = [f"{key} is not what the file says" for key in loaded.wrong]
        held = dict(engine.named_weights())
        problems += [f"gathered {n} differs" for n, v in wanted.items() if not torch.equal(held[n], v)]
        oracle = checkpoints_of(root / "reference", config, rank)
        manifest, damaged = oracle._verified(path_of(root / "reference", SAVED))
        assert manifest is not None
        assert not damaged
        told = oracle._told_wrong(path_of(root / "reference", SAVED), manifest, engine, set())
        problems += [f"{key} is not the reference's" for key in told]
        train_step(engine, config, rank, SAVED + 1)
        cells.append(Cell(source, layout, tuple(problems), _distance(dict(engine.named_weights()), after)))
    engine.close()
    return cells


def _distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    def of(name: str) -> float:
        distance = (found[name].double() - right[name].double()).abs().max() / right[name].double().abs().max()
        return float(distance) if torch.isfinite(distance) else math.inf

    return max(of(name) for name in right if right[name].numel())


def run_cells(root: Path, pairs: Sequence[tuple[Layout, Layout]]) -> list[Cell]:
    """Save, load and compare each pair; ranks are started twice for each number of them."""
    after = write_reference(root / "reference")
    sources = list(dict.fromkeys(source for source, _ in pairs))
    for world in sorted({layout.world_size for layout in sources}):
        run_ranks(write_all, world, root, [layout for layout in sources if layout.world_size == world])
    cells: list[Cell] = []
    for world in sorted({target.world_size for _, target in pairs}):
        targets = list(dict.fromkeys(target for _, target in pairs if target.world_size == world))
        asked = [(target, [s for s, t in pairs if t == target]) for target in targets]
        per_rank = run_ranks(read_all, world, root, asked, after)
        cells += [_worst(same) for same in zip(*per_rank, strict=True)]
    return cells


def _worst(cells: Sequence[Cell]) -> Cell:
    """One cell as all ranks saw it."""
    problems = [f"rank {rank}: {text}" for rank, cell in enumerate(cells) for text in cell.problems]
    return replace(cells[0], problems=tuple(problems), next_step=max(cell.next_step for cell in cells))


def written_right(root: Path, layout: Layout) -> list[str]:
    """Keys of a layout's checkpoint that, put together without DCP, are not the reference's."""
    right, held = (Manifest.read(path_of(root / name, SAVED)) for name in ("reference", str(layout)))
    wrong = sorted(_names(right) ^ _names(held))
    for key in sorted(_names(right) & _names(held)):
        tensors = (
            whole_tensor(path_of(root / name, SAVED), manifest.tensors[key])
            for name, manifest in (("reference", right), (str(layout), held))
        )
        if not torch.equal(*tensors):
            wrong.append(key)
    return wrong


def _names(manifest: Manifest) -> set[str]:
    return {key for key in manifest.tensors if not key.startswith("rng/")}


def draw(count: int, seed: int) -> list[tuple[Layout, Layout]]:
    """Random cells."""
    source = random.Random(seed)
    return [(source.choice(LAYOUTS), source.choice(LAYOUTS)) for _ in range(count)]
