"""The power study on ranks that stay: cells trained one after another in the same few processes, and judged.

What a run of its own costs (processes, imports, a meeting of ranks) is saved; what a verdict reads is all there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.power.steps import Judged, Pair, compose_all, judge_pair
from harness.config.compose import Cell
from harness.config.schema import Config
from harness.launch.opening import Opened, Sources, open_here
from harness.store import status
from harness.store.rundir import Store
from harness.store.status import State
from harness.worker import origin
from tests.faults.site import Site
from tests.support.factory import ranks_of, stopping, train
from tests.support.spawn import run_ranks

Overrides = tuple[str, ...]

STEPS, PREEMPT_AT = 3, 2
"""As few as the captured steps allow: every fault acts within them."""
LAYERS = 2
"""Half of the model's: a fault in one of them still has to be told from one in the other."""


@dataclass(frozen=True)
class Job:
    """A run to be made, in one go or interrupted after some step and taken up again."""

    path: Path
    config: Config
    preempt_at: int | None


def judged(pairs: Sequence[Pair], root: Path) -> dict[str, Judged]:
    """Train what these pairs need and judge each; by the pair's name.

    Clean runs come last in every process, so that a fault that outlived its run would show in them.
    """
    shorter = (f"train.steps={STEPS}", f"model.num_layers={LAYERS}")
    wanted = [*(pair.arm for pair in pairs), *(pair.control for pair in pairs)]
    paths = runs(wanted, root, shorter, [pair.arm for pair in pairs if pair.resumes])
    return {pair.name: judge_pair(pair, paths[pair.arm], paths[pair.control]) for pair in pairs}


def runs(
    wanted: Iterable[Overrides], root: Path, extra: Overrides = (), halved: Iterable[Overrides] = ()
) -> dict[Overrides, Path]:
    """Run directories of cells, by their overrides, to each of which `extra` is added; `halved` ones are resumed."""
    cells = compose_all(wanted, (f"launch.root={root}", *extra))
    interrupted = {cells[each].signature for each in halved}
    paths = trained({cell.signature: cell for cell in cells.values()}, interrupted, Store(root))
    return {overrides: paths[cell.signature] for overrides, cell in cells.items()}


def trained(cells: Mapping[str, Cell], halved: set[str], store: Store, preempt_at: int = PREEMPT_AT) -> dict[str, Path]:
    """Run directories of cells, by signature. Raises `RankFailed`: one of them, and none is called done."""
    sources = Sources.gather()
    every: list[Opened] = []
    by_size: dict[int, list[Job]] = defaultdict(list)
    for signature, cell in cells.items():
        found = open_here(store, cell, sources, None)
        assert isinstance(found, tuple), found
        opened, lock = found
        lock.release()
        every.append(opened)
        job = Job(opened.run.path, cell.typed, preempt_at if signature in halved else None)
        by_size[cell.typed.mesh.world_size].append(job)
    for size, jobs in by_size.items():
        run_ranks(train_all, size, jobs)
    for opened in every:
        status.move(opened.run.path, opened.attempt, State.done, f"{opened.cell.config['train']['steps']} steps")
    return {opened.cell.signature: opened.run.path for opened in every}


def train_all(rank: int, jobs: Sequence[Job]) -> None:
    """One run after another."""
    for job in jobs:
        with functions_given_back():
            origin.record(job.path, ranks_of(job.config, rank), dist.group.WORLD, resuming=False)
            if job.preempt_at is not None:
                train(job.config, job.path, rank, should_stop=stopping(job.preempt_at))
            train(job.config, job.path, rank)


@contextmanager
def functions_given_back() -> Iterator[None]:
    """Undo what a fault does to functions of modules and classes; what it does to an engine ends with the engine."""
    around = Site.around
    with ExitStack() as undo:

        def noting(site: Site, owner: Any, name: str, change: Callable[..., Any], **options: bool) -> None:
            if isinstance(owner, ModuleType | type):
                undo.callback(setattr, owner, name, getattr(owner, name))
            around(site, owner, name, change, **options)

        with mock.patch.object(Site, "around", noting):
            yield
