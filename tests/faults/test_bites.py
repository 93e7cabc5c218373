"""Every fault of the corpus changes bits of a run from its step on, in its stage, and none before.

Each run is held against the same run without the fault, made by the same ranks. What is looked at is what any engine
has: what it is fed, the loss, this rank's gradients before clipping, their norm, and its state after the update.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import xxhash
from torch import Tensor, nn

from benchmarks.power.steps import compose_all
from harness.config.schema import Config
from harness.engines.protocol import Microbatch
from harness.probe.step_checks.pieces import local_part
from tests.faults.corpus import Fault, corpus
from tests.faults.site import Site
from tests.study.short import functions_given_back
from tests.support.covering import once
from tests.support.factory import stopping, train
from tests.support.mutants import kills
from tests.support.spawn import run_ranks

STEPS = 3
BEGINS = 2
"""The step at which faults begin, and after which a run that is to be resumed is interrupted."""
CELL = (
    f"train.steps={STEPS}",
    "train.warmup_steps=0",
    "train.global_batch_size=8",
    "train.microbatch_size=4",
    "data.seq_len=32",
    "model.num_layers=2",
    "measure.capture_steps=[]",
    "measure.step_checks=false",
)
Key = tuple[int, str]
"""A step, and what of it was looked at."""
Trace = dict[Key, str]
"""The digest of its bits, of one rank."""
LOOKED_AT = ("fed", "read", "loss", "gradients", "norm", "state", "left")
"""In the order of a step: `read` is the embedding in the forward, `left` are the weights when the last step is done."""

FIRST = {
    "data": ("fed",),
    "forward": ("loss",),
    "gather": ("read", "loss", "gradients"),
    "gradient": ("gradients",),
    "reduction": ("gradients",),
    "clipping": ("norm", "state"),
    "optimizer": ("state",),
    "weights": ("read", "state", "left"),
    "checkpoint": ("read", "loss", "state"),
}
"""What of a step a fault may show in first, by its stage."""
ELSEWHERE = {"same_batch": "loss", "F33_rotary_in_16_bits": "gradients"}
"""Shown in by a fault whose data the loop did feed, and by one that is too little for a loss in fp32."""
BETWEEN = ("F43_average_left_in",)
"""What these do to weights after a step, the next one reads."""


class Watched:
    """An engine whose steps are taken down, as whoever calls it sees them."""

    def __init__(self, engine: Any, trace: Trace, step: int) -> None:
        self.engine, self.trace, self.step_ = engine, trace, step
        self.fed: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.read: list[str] = []
        seen = engine.seen()  # of a model that tensor parallelism has cut, nothing
        for module in () if seen is None else seen.module.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(lambda module, _: self.read.append(digest([module.weight])))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        self.fed += batch
        loss: Tensor = self.engine.forward_backward(batch, last=last)
        self.losses.append(loss)
        return loss

    def step(self, lr: float) -> float:
        self.engine.finish_gradients()
        gradients = digest(self.engine.local_gradients().values())
        norm: float = self.engine.step(lr)
        state = digest(map(local_part, self.engine.state().tensors.values()))
        seen = (digest(self.fed), "".join(self.read), digest(self.losses), gradients, norm.hex(), state)
        self.trace |= {(self.step_, what): bits for what, bits in zip(LOOKED_AT, seen, strict=False)}
        self.fed, self.losses, self.read, self.step_ = [], [], [], self.step_ + 1
        return norm


def digest(tensors: Any) -> str:
    """Of the bits of tensors, in order."""
    found = xxhash.xxh64()
    for tensor in tensors:
        found.update(tensor.detach().to("cpu", copy=True).contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


@dataclass(frozen=True)
class Job:
    """A run to be made, in one go or interrupted and taken up again."""

    path: Path
    config: Config
    resumes: bool


def traces(rank: int, jobs: Sequence[Job]) -> list[Trace]:
    """One run after another."""
    found = []
    for job in jobs:
        trace: Trace = {}
        with functions_given_back():
            if job.resumes:
                first = partial(Watched, trace=trace, step=1)
                train(job.config, job.path, rank, should_stop=stopping(BEGINS), wrap_engine=first)
            rest = partial(Watched, trace=trace, step=BEGINS + 1 if job.resumes else 1)
            train(job.config, job.path, rank, wrap_engine=rest)
        if rank == 0:
            trace[STEPS, "left"] = json.loads((job.path / "summary.json").read_text())["final_weights"]
        found.append(trace)
    return found


def clean(fault: Fault) -> tuple[str, ...]:
    return (*CELL, "ckpt=none", *fault.cell)


def arm(fault: Fault) -> tuple[str, ...]:
    saved = "ckpt=last" if fault.resumes else "ckpt=none"
    return (*CELL, saved, *fault.cell, *fault.asked(begins_at=1 if fault.resumes or fault.ends else BEGINS))


def ranks_of(fault: Fault) -> int:
    sizes = [int(text.partition("=")[2]) for text in fault.cell if text.startswith("mesh.world_size=")]
    return sizes[0] if sizes else 4 if "mesh=two_by_two" in fault.cell else 2


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Key]]:
    """Where a run with the fault has other bits than the one without, by the fault's name, in the order of the run."""

    @once
    def made(size: int) -> Mapping[tuple[str, ...], list[Trace]]:
        faults = [fault for fault in corpus().values() if ranks_of(fault) == size]
        wanted = dict.fromkeys(each for fault in faults for each in (clean(fault), arm(fault)))
        resumed = {arm(fault) for fault in faults if fault.resumes}
        folder = tmp_path_factory.mktemp("bites")
        cells = compose_all(wanted)
        jobs = [Job(folder / str(n), cells[each].typed, each in resumed) for n, each in enumerate(wanted)]
        by_rank = run_ranks(traces, size, jobs)
        return dict(zip(wanted, map(list, zip(*by_rank, strict=True)), strict=True))

    def found(name: str) -> list[Key]:
        part = made(ranks_of(corpus()[name]))
        return moved_bits(part[arm(corpus()[name])], part[clean(corpus()[name])])

    return found


def moved_bits(with_it: Sequence[Trace], without: Sequence[Trace]) -> list[Key]:
    """Where any rank has other bits, in the order of the run."""
    keys = {key for one, other in zip(with_it, without, strict=True) for key in one if one[key] != other[key]}
    return sorted(keys, key=lambda key: (key[0], LOOKED_AT.index(key[1])))


def wrong(fault: Fault, found: Sequence[Key]) -> str:
    """What is not as the fault declares it: its first difference is at its step, and in what its stage may change."""
    step, what = found[0] if found else (0, "nothing")
    begins = STEPS if fault.resumes or fault.ends or fault.name in BETWEEN else BEGINS
    may = (ELSEWHERE[fault.name],) if fault.name in ELSEWHERE else FIRST[fault.stage]
    return "" if step == begins and what in may else f"{what} at step {step}, and not {' or '.join(may)} at {begins}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", corpus())
def test_it_bites(moved: Callable[[str], list[Key]], name: str) -> None:
    """What comes before its first difference is equal to the bit."""
    assert not wrong(corpus()[name], moved(name))


def blind_traces(rank: int, jobs: Sequence[Job]) -> list[Trace]:
    """As `traces`, where nothing that a fault wraps is called any more."""
    with mock.patch.object(Site, "around"):
        return traces(rank, jobs)


@kills("Faults", "blind", "A fault that wraps what the engine calls no more is taken for one that acts")
def test_a_fault_that_went_blind_is_told(tmp_path: Path) -> None:
    fault = corpus()["round_gradient"]
    cells = compose_all((arm(fault), clean(fault)))
    jobs = [Job(tmp_path / str(n), cell.typed, False) for n, cell in enumerate(cells.values())]
    by_rank = run_ranks(blind_traces, 2, jobs)
    assert "loss at step 2" in wrong(fault, [(2, "loss"), (2, "gradients")]), "another stage's"
    assert "gradients at step 1" in wrong(fault, [(1, "gradients"), (2, "gradients")]), "too early"
    assert "nothing at step 0" in wrong(fault, moved_bits(*map(list, zip(*by_rank, strict=True))))
