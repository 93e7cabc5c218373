"""From one layout into another, bit by bit: what the matrix in docs/checkpoints.md and its test in CI share.

The right answer comes from one process: `single` trains three steps of the awkward model (tied, frozen, scalar-sized
rows, weights not used in every microbatch) and saves. Every layout loads that and saves a checkpoint of its own; a cell
is one layout loading what another wrote. A layout that cut tensors wrongly, and put them together wrongly in the same
way, would agree with itself: so a cell is held against the first process three times, by the weights the engine gathers
with its own collectives, by the reference's files chunk by chunk, and by the update it does next.

Layouts come in families, of one model and recipe each: any of a family into any other of it. Beside the awkward model's
there is one of a decoder that tensor parallelism cuts, and one for each FP8 recipe. An update in 8 bits is another one
where ranks multiply other tokens, so that of those the third comparison is of what layers multiply: the reference's
weights quantized, to the bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.checkpoint.folder import path_of
from harness.checkpoint.manifest import Manifest
from harness.checkpoint.policy import Checkpoints
from harness.checkpoint.storage import whole_tensor
from harness.config.schema import Config, GradBuffer, ModelConfig
from harness.control import Control
from harness.engines.protocol import Engine
from harness.fp8.linear import Fp8Linear
from harness.fsdp.options import Fp8
from harness.probe.collectives import CollectiveMeter
from tests.engines.conformance.cases import Case
from tests.engines.conformance.trial import Spoiled, batches, make_engine, make_workload
from tests.fsdp.fp8.sharded import unlike
from tests.support.composing import compose
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
    tp: int = 1
    model: str = "odd"
    recipe: Fp8 | None = None

    def __str__(self) -> str:
        cut = self.strategy + {None: "", "no_shard": "+hsdp", "optim": "+hfsdp"}[self.outer]
        data = self.world_size // self.tp
        ranks = (f"2x{data // 2}" if self.outer else str(data)) + (f" TP {self.tp}" if self.tp > 1 else "")
        words = [self.engine, cut, ranks] + (["concat"] if self.concat else [])
        return " ".join(words + ([] if self.dtype == "fp64" or self.recipe else [self.dtype]))

    def config(self) -> Config:
        """The cell of a run with this layout."""
        k = MICROBATCHES // self.world_size
        case = Case(
            self.engine, self.strategy, self.outer, self.world_size, k, "adamw", True, self.dtype, "odd", "fast"
        )
        config = case.config()
        config.mesh.tp = self.tp
        if self.model in DECODERS:
            config.model = _decoder(self.model)
        config.engine.grad_buffer = GradBuffer.concat if self.concat else GradBuffer.flat
        config.ckpt.keep = 1_000
        return config


DECODERS = {
    "planned": ("model.dim=32", "model.num_heads=4", "model.num_kv_heads=4", "model.ffn_dim=24", "model.num_layers=2"),
    "wide": ("model.dim=256", "model.num_heads=4", "model.num_kv_heads=4", "model.ffn_dim=256", "model.num_layers=1"),
}
"""Models that declare a plan, of 37 tokens, which no axis divides; the wide one for tiles of every recipe."""


@cache
def _decoder(name: str) -> ModelConfig:
    sizes = ("model=tiny", "model.vocab_size=37", "model.max_seq_len=16", *DECODERS[name])
    return compose([*sizes, "data=synthetic", "data.seq_len=8", "launch.dry_run=true"]).typed.model


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
)


ZERO_3 = "optim_grads_params"
_PLANNED = (
    SINGLE,
    Layout("native", ZERO_3, 4),
    *(Layout("native", strategy, 4, tp=2) for strategy in STRATEGIES),
    Layout("native", "optim", 4, tp=4),
    *(Layout("native", ZERO_3, 4, outer, tp=2) for outer in ("no_shard", "optim")),
    Layout("fsdp2", ZERO_3, 4),
    Layout("fsdp2", ZERO_3, 4, tp=2),
)
_EIGHT_BITS = (
    Layout("native", ZERO_3, 1),
    Layout("native", ZERO_3, 4),
    Layout("native", "optim", 2),
    Layout("fsdp2", ZERO_3, 4),
)
TP_LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "fp64": tuple(replace(each, model="planned") for each in _PLANNED),
    **{
        f"FP8 {recipe.name}": tuple(replace(each, dtype="fp32", model="wide", recipe=recipe) for each in _EIGHT_BITS)
        for recipe in Fp8
    },
}
"""Families of layouts under tensor parallelism, in fp64, and in 8 bits; the first layout of each is the one process
that trains the reference."""


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
        close = NEXT_STEP_TOLERANCE if self.target.recipe is None else math.inf
        return not self.problems and self.next_step <= close


def checkpoints_of(folder: Path, config: Config, rank: int) -> Checkpoints:
    """A run's checkpoints in this process; several ranks speak over the default group."""
    meter = CollectiveMeter()
    meter.close()
    group = dist.group.WORLD if config.mesh.world_size > 1 else None
    ranks = ranks_of(config, rank)
    return Checkpoints(folder, config, ranks, Control(ranks, group, meter), lambda _: None)


class Quantizing(Spoiled):
    """A workload of which linear layers of blocks multiply 8-bit numbers."""

    def __init__(self, config: Config, recipe: Fp8) -> None:
        super().__init__(make_workload(config))
        self.recipe = recipe

    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """As the workload does, and converted."""
        model: nn.Module = self._workload.build(device, dtype)
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.__class__ = nn.Linear  # of a class that only leaves its values to the workload
        Fp8Linear.convert(model, self.recipe, lambda name, _: name.startswith("blocks."))
        return model


def build(config: Config, rank: int, recipe: Fp8 | None = None) -> Engine:
    return make_engine(config, make_workload(config) if recipe is None else Quantizing(config, recipe), rank)


def train_step(engine: Engine, config: Config, rank: int, step: int) -> list[float]:
    """One update; this rank's losses."""
    seen = copy(config)
    seen.mesh = copy(config.mesh)
    seen.mesh.world_size //= config.mesh.tp  # ranks of one TP shard each
    todo = batches(seen, rank // config.mesh.tp, step)
    losses = [engine.forward_backward(batch, last=index == len(todo) - 1).item() for index, batch in enumerate(todo)]
    engine.step(LR)
    return losses


def write_reference(_rank: int, folder: Path, layout: Layout = SINGLE) -> dict[str, Tensor]:
    """Train and save on one process; returns the weights after one more update."""
    config = layout.config()
    engine = build(config, 0, layout.recipe)
    for step in range(1, SAVED + 1):
        train_step(engine, config, 0, step)
    checkpoints_of(folder, config, 0).save(engine, SAVED, "reference")
    train_step(engine, config, 0, SAVED + 1)
    return dict(engine.named_weights())


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor of a state, over its memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


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
        engine = build(config, rank, layout.recipe)
        checkpoints_of(root / "reference", config, rank).load_newest(engine)
        checkpoints_of(root / str(layout), config, rank).save(engine, SAVED, "reference")
        engine.close()


def read_all(rank: int, root: Path, targets: Sequence[tuple[Layout, list[Layout]]], after: dict[str, Tensor]) -> Any:
    """Every target takes each of its sources; a list of cells."""
    return [cell for layout, sources in targets for cell in _read_into(rank, root, layout, sources, after)]


def _read_into(rank: int, root: Path, layout: Layout, sources: list[Layout], after: dict[str, Tensor]) -> list[Cell]:
    config = layout.config()
    engine: Any = build(config, rank, layout.recipe)
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
        told = oracle._differing(path_of(root / "reference", SAVED), manifest, engine, set())
        problems += [f"{key} is not the reference's" for key in told]
        if layout.recipe is not None and layout.engine == "native":
            problems += [
                f"{name} does not multiply the whole weight quantized" for name in unlike(engine.model, wanted)
            ]
        train_step(engine, config, rank, SAVED + 1)
        cells.append(Cell(source, layout, tuple(problems), _distance(dict(engine.named_weights()), after)))
    engine.close()
    return cells


def _distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    def of(name: str) -> float:
        distance = (found[name].double() - right[name].double()).abs().max() / right[name].double().abs().max()
        return float(distance) if torch.isfinite(distance) else math.inf

    return max(of(name) for name in right if right[name].numel())


def run_cells(root: Path, pairs: Sequence[tuple[Layout, Layout]], first: Layout = SINGLE) -> list[Cell]:
    """Save, load and compare each pair of one family; ranks are started twice for each number of them.

    Args:
        first: what trains the reference; of one process.
    """
    after: dict[str, Tensor] = run_ranks(write_reference, 1, root / "reference", first)[0]
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
    """Keys of a layout's checkpoint that, put together by one process, are not the reference's."""
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


def draw(count: int, seed: int, layouts: Sequence[Layout] = LAYOUTS) -> list[tuple[Layout, Layout]]:
    """Random cells of a family."""
    source = random.Random(seed)
    return [(source.choice(layouts), source.choice(layouts)) for _ in range(count)]
