"""Ranks that save without end, and somebody who kills one of them: what lies on the disk afterwards.

The state of step n has n in every element of every weight, so that a mixture of two saves shows. After each kill two
new ranks take the newest checkpoint up as a resumed run would.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.checkpoint import folder as folders
from harness.checkpoint.policy import Checkpoint
from harness.config.schema import Config
from tests.support.forking import PRELOADED
from tests.support.layouts import Layout, build, checkpoints_of, local_of
from tests.support.spawn import run_ranks

WORLD = 2
LAYOUT = Layout("native", "optim_grads_params", WORLD, dtype="fp32")


@dataclass(frozen=True)
class Found:
    """After one kill.

    told: the last step whose save had returned on every rank. begun: the one that was under way. seconds: from its
    begin to the kill. torn: whether an unfinished folder was left. step: what two new ranks loaded. problems: of it.
    """

    told: int
    begun: int
    seconds: float
    torn: bool
    step: int
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Nothing that was told saved is lost, and what is taken is whole."""
        return not self.problems and self.step in (self.told, self.begun)


def config_of(width: int) -> Config:
    """Large enough that a save takes a while."""
    config = LAYOUT.config()
    config.model.ffn_dim, config.ckpt.keep = width, 2
    config.train.steps = 10_000  # saved for ever: a checkpoint beyond the last step is refused
    return config


def fill(engine: Any, step: int) -> None:
    """Give every weight and moment of the state the step's number."""
    state = engine.state()
    with torch.no_grad():
        for tensor in state.tensors.values():
            local_of(tensor).fill_(step)
    state.adopt()


def save_for_ever(rank: int, root: str, store: str, config: Config, steps: Any, begun: Any) -> None:
    """Go on from the newest checkpoint, and save the next step, and the next."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a rank says whose partner is gone is no news
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    engine = build(config, rank)
    checkpoints = checkpoints_of(Path(root), config, rank)
    found = checkpoints.load_newest(engine)
    step = 0 if found is None else found.step
    while True:
        step += 1
        fill(engine, step)
        if rank == 0:
            begun.value = step
        checkpoints.save(engine, step, "")
        steps[rank] = step


def take_up(rank: int, root: Path, config: Config) -> tuple[int, list[str]]:
    """Load as a resumed run does; the step, and what of the state is not that step's."""
    engine = build(config, rank)
    checkpoints, warned = checkpoints_of(root, config, rank), list[str]()
    checkpoints.warn = warned.append
    found = checkpoints.load_newest(engine)
    if found is None:
        return 0, []
    assert isinstance(found, Checkpoint)
    state = engine.state()
    mixed = [key for key, tensor in state.tensors.items() if not bool((local_of(tensor) == found.step).all())]
    engine.close()
    return found.step, [*mixed, *(f"wrong {key}" for key in found.wrong), *warned]


def kill_one(root: Path, config: Config, source: random.Random, longest_s: float) -> Found:
    """Start two ranks, kill one at a random moment of a save, and look."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    steps = context.Array("q", WORLD)
    begun = context.Value("q", 0)
    store = root.parent / f"store-{source.randrange(1 << 40)}"
    ranks = [
        context.Process(target=save_for_ever, args=(rank, str(root), str(store), config, steps, begun), daemon=True)
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    first = _wait_for_a_save(ranks, steps)
    while begun.value <= first:
        time.sleep(0.0005)
    began = time.monotonic()
    time.sleep(source.random() * longest_s)
    victim = source.randrange(WORLD)
    os.kill(ranks[victim].pid or 0, signal.SIGKILL)
    seconds = time.monotonic() - began
    ranks[victim].join()
    ranks[1 - victim].join(10)  # its partner is gone: it ends by itself
    if ranks[1 - victim].is_alive():
        ranks[1 - victim].kill()
        ranks[1 - victim].join()
    told, under_way = min(steps), begun.value
    torn = any(root.glob(f"*{folders.UNFINISHED}"))
    loaded = run_ranks(take_up, WORLD, root, config)
    problems = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(loaded) for text in texts[:3]]
    problems += ["ranks took different steps"] if len({step for step, _ in loaded}) > 1 else []
    return Found(told, under_way, seconds, torn, loaded[0][0], tuple(problems))


def _wait_for_a_save(ranks: Any, steps: Any) -> int:
    deadline = time.monotonic() + 60
    while not min(steps):
        if time.monotonic() > deadline or not all(process.is_alive() for process in ranks):
            raise RuntimeError("the ranks did not come to a first save")
        time.sleep(0.005)
    return int(min(steps))


def save_seconds(rank: int, root: Path, config: Config) -> float:
    """What an undisturbed save takes, the second of two."""
    engine = build(config, rank)
    checkpoints = checkpoints_of(root, config, rank)
    checkpoints.save(engine, 1, "")
    began = time.monotonic()
    checkpoints.save(engine, 2, "")
    return time.monotonic() - began


def kill_many(root: Path, count: int, seed: int, width: int = 20_000) -> list[Found]:
    """Kills one after the other in one folder, at moments spread over a save and a little beyond."""
    config = config_of(width)
    longest = 1.2 * max(run_ranks(save_seconds, WORLD, root / "undisturbed", config))
    source = random.Random(seed)
    return [kill_one(root / "ckpt", config, source, longest) for _ in range(count)]
