"""Mistakes in the recording of another program's loop, each found by what it promises."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.capture import merge, run as runs, watching
from harness.parity.alone.every_step import BETWEEN
from harness.parity.compare import compare
from harness.parity.outcome import Grade, Outcome, Verdict
from harness.probe.step_checks.pieces import Piece, blocks_of
from harness.store.check_stream import read
from tests.capture import loops
from tests.support.mutants import finds
from tests.support.spawn import run_ranks

STEPS = 3


def left_apart(rank: int, layout: str, path: Path, fed: bool, nudged: bool) -> None:
    """Train, and leave the parts of the ranks as they are."""
    merge.if_last = lambda path, world_size: False  # type: ignore[assignment] # in a process of its own
    loops.train(rank, layout, path, steps=STEPS, fed=fed, before_update=nudge if nudged else lambda *_: None)


def nudge(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 2:
        with torch.no_grad():
            next(iter(model.parameters()))._local_tensor.mul_(1.01)  # type: ignore[attr-defined] # a DTensor's


RUNS = {"ddp": ("ddp", True, False), "fsdp2": ("fsdp2", True, False), "unfed": ("fsdp2", False, False)}
RUNS["nudged"] = ("fsdp2", True, True)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts") / "study"
    for name, (layout, fed, nudged) in RUNS.items():
        run_ranks(partial(left_apart, fed=fed, nudged=nudged), 2, layout, folder / name)
    return folder


def verdict(parts: Path, to: Path, arm: str) -> Verdict:
    for name in (arm, "ddp"):
        shutil.copytree(parts / name, to / "study" / name)
        merge.merge(to / "study" / name)
    return compare(to / "study" / arm, to / "study" / "ddp")


def copies_count_once(parts: Path, to: Path) -> None:
    assert verdict(parts, to, "fsdp2").outcome is Outcome.EQUAL
    streams = [read(to / "study" / name) for name in ("fsdp2", "ddp")]
    sharded, copied = (stream.column("reduced_0") for stream in streams if stream is not None)
    assert abs(sharded - copied).max() < 1e-6 * abs(copied).max()


def changes_between_steps_are_seen(parts: Path, to: Path) -> None:
    findings = verdict(parts, to, "nudged").findings
    assert (BETWEEN, 2, Grade.bad) in [(each.check, each.step, each.grade) for each in findings]


def unknown_data_are_no_proof(parts: Path, to: Path) -> None:
    assert verdict(parts, to, "unfed").outcome is Outcome.EQUIVALENT


def a_row_has_one_digest_in_every_batch() -> None:
    assert runs.fed(torch.tensor([[1, 2]])).rows != runs.fed(torch.tensor([[1, 3]])).rows
    batch = torch.arange(12).view(4, 3)
    assert runs.fed(batch).rows == [row for half in batch.chunk(2) for row in runs.fed(half).rows]


def digests_of_pieces_add_up_to_that_of_the_whole() -> None:
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    pieces = [Piece("w", (4, 3), whole, blocks_of(whole.shape, *cut, cut[0])) for cut in ((0, 7), (7, 12))]
    sums = [watching.digest(each, each.local) for each in pieces]
    found = watching.digest(Piece.of("w", whole), whole)
    assert sum(sums) % 2**64 == found != watching.digest(Piece.of("w", whole), whole.flip(1))


def its_own_fault_reaches_nobody(to: Path) -> None:
    with runs.watch(torch.nn.Linear(1, 1), None, to / "run") as run:
        run.step(loss=torch.ones(2))  # no single number
    assert run.problem


test_a_mutant_is_found = finds(
    "Capture of another program",
    copies_count_once="""
        copies: Copies are added up
            capture.merge.Merged._added: in counted[name]] => in self.parts]
    """,
    changes_between_steps_are_seen="""
        between steps: Weights before a step are taken to be those after the one before
            capture.merge.Merged._row: self._added("after", step - 1, self.holders) if step else begins => begins
    """,
    unknown_data_are_no_proof="""
        unknown data: Runs whose data nobody knows are called EQUAL
            parity.tiers.comparable.limits: if silent: => if False:
    """,
    a_row_has_one_digest_in_every_batch="""
        content of data: A digest of data holds its shape alone
            capture.run._digest_of: digest.update(leaf.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
            => pass
        rows of data: A row's digest holds those before
            capture.run.fed: leaf[row]) for key => leaf[: row + 1]) for key
    """,
    digests_of_pieces_add_up_to_that_of_the_whole="""
        places of weights: Exchanged weights have one digest
            capture.watching.digest: (index + seed) => (0 * index + seed)
        pieces of weights: Each rank counts its rows from nought
            capture.watching.digest: (top + at // wide) => (at // wide)
    """,
    its_own_fault_reaches_nobody="""
        a fault of its own: Errors reach the training loop
            capture.run.Guarded.__call__: except Exception as error => except OSError as error
            ()
            Error
    """,
)
