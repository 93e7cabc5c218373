"""What saving and loading costs: this harness's checkpoints against FSDP2 with torch's DCP, in one run.

Two ranks hold the same state twice, sharded by the native engine and by FSDP2, in the shape of `model=llama_1b` (fewer
blocks, so that both fit into memory; AdamW, fp32). They save and load in turns. Ours is what a run does: sums of every
file, and after loading the state held against the files once more. Theirs is `dcp.save` and `dcp.load` as documented,
files flushed to the disk, nothing checked.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from harness.checkpoint.policy import Checkpoints
from harness.config.compose import compose
from harness.config.schema import Config
from harness.control import Control
from harness.engines.protocol import Engine, Ranks
from harness.engines.registry import engine_class
from harness.models.registry import workload_for
from harness.probe.collectives import CollectiveMeter
from tests.support.spawn import run_ranks

WORLD = 2
OURS, THEIRS = "this harness, native ZeRO-3", "FSDP2 with DCP"


@dataclass(frozen=True)
class Cost:
    """One turn of one rank: seconds from a barrier to the end on this rank, and what memory rose by meanwhile.

    anonymous: bytes of memory that cannot be given back (RssAnon). resident: all, mapped files with it (VmHWM).
    """

    who: str
    what: str
    seconds: float
    anonymous: int
    resident: int


def config_of(engine: str, layers: int) -> Config:
    words = ["model=llama_1b", f"model.num_layers={layers}", f"engine={engine}", "sharding=optim_grads_params"]
    return compose([*words, "dtype=fp32", "mesh.world_size=2", "launch.dry_run=true"]).typed


def built(engine: str, layers: int, rank: int) -> tuple[Engine, Config]:
    """An engine whose state is not all zeros: moments hold noise, which no file system can skip."""
    config = config_of(engine, layers)
    made = engine_class(config.engine.name)(workload_for(config), config, Ranks(rank, WORLD, rank, torch.device("cpu")))
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for key, tensor in made.state().tensors.items():
            if "/exp_avg" in key:
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).normal_(generator=generator)
    return made, config


@contextlib.contextmanager
def measured(found: list[Cost], who: str, what: str) -> Iterator[None]:
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, resident = _status("RssAnon"), _status("VmRSS")
    most, over = [before], threading.Event()

    def sample() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], _status("RssAnon"))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    over.set()
    sampler.join()
    found.append(Cost(who, what, seconds, most[0] - before, _status("VmHWM") - resident))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def turns(rank: int, folder: Path, layers: int, rounds: int) -> tuple[list[Cost], dict[str, int]]:
    """All rounds on one rank, and the bytes of each kind of checkpoint."""
    ours, config = built("native", layers, rank)
    theirs, _ = built("fsdp2", layers, rank)
    meter = CollectiveMeter()
    meter.close()
    ranks = Ranks(rank, WORLD, rank, torch.device("cpu"))
    control = Control(ranks, dist.group.WORLD, meter)
    checkpoints = Checkpoints(folder / "ours", config, ranks, control, lambda _: None)
    found: list[Cost] = []
    for _ in range(rounds):
        for who, save, load in (
            (OURS, lambda: checkpoints.save(ours, 1, ""), lambda: _ours_loaded(checkpoints, ours)),
            (THEIRS, lambda: _save(theirs, folder / "theirs"), lambda: _load(theirs, folder / "theirs")),
        ):
            _turn(found, who, save, load)
            dist.barrier()
    sizes = {name: _size(folder / name) for name in ("ours", "theirs")} if rank == 0 else {}
    ours.close()
    return found, sizes


def _turn(found: list[Cost], who: str, save: Callable[[], object], load: Callable[[], object]) -> None:
    with measured(found, who, "save"):
        save()
    with measured(found, who, "load"):
        load()


def _ours_loaded(checkpoints: Checkpoints, engine: Engine) -> None:
    loaded = checkpoints.load_newest(engine)
    assert loaded is not None
    assert not loaded.wrong


def _save(engine: Engine, folder: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    dcp_save(_plain(engine), storage_writer=FileSystemWriter(folder))


def _load(engine: Engine, folder: Path) -> None:
    dcp_load(_plain(engine), storage_reader=FileSystemReader(folder))


def _plain(engine: Engine) -> dict[str, Tensor]:
    return engine.state().tensors


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run(folder: Path, layers: int, rounds: int) -> dict[str, Any]:
    """Every turn of every rank, and medians over rounds of the slower, or the larger, rank."""
    folder.mkdir(parents=True, exist_ok=True)
    per_rank = run_ranks(turns, WORLD, folder, layers, rounds)
    rows = []
    for who in (OURS, THEIRS):
        for what in ("save", "load"):
            mine = [[cost for cost in costs if (cost.who, cost.what) == (who, what)] for costs, _ in per_rank]
            worst = list(zip(*mine, strict=True))
            seconds = [max(cost.seconds for cost in turn) for turn in worst]
            rows.append(
                {
                    "who": who,
                    "what": what,
                    "seconds": statistics.median(seconds),
                    "fastest": min(seconds),
                    "slowest": max(seconds),
                    "anonymous": statistics.median(max(cost.anonymous for cost in turn) for turn in worst),
                    "resident": statistics.median(max(cost.resident for cost in turn) for turn in worst),
                }
            )
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "layers": layers,
        "rounds": rounds,
        "ranks": WORLD,
        "bytes": {OURS: per_rank[0][1]["ours"], THEIRS: per_rank[0][1]["theirs"]},
        "rows": rows,
        "turns": [[asdict(cost) for cost in costs] for costs, _ in per_rank],
    }
