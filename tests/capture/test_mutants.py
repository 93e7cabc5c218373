"""Mistakes in the recording of another program's loop, each found by what it promises."""

from __future__ import annotations

import shutil
from collections.abc import Callable
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
from tests.support.mutants import each, slips
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


def verdict(parts: Path, to: Path, arm: str, control: str = "ddp") -> Verdict:
    for name in (arm, control):
        shutil.copytree(parts / name, to / "study" / name)
        merge.merge(to / "study" / name)
    return compare(to / "study" / arm, to / "study" / control)


def copies_count_once(parts: Path, to: Path) -> bool:
    assert verdict(parts, to, "fsdp2").outcome is Outcome.EQUAL
    streams = [read(to / "study" / name) for name in ("fsdp2", "ddp")]
    sharded, copied = (stream.column("reduced_0") for stream in streams if stream is not None)
    return bool(abs(sharded - copied).max() < 1e-6 * abs(copied).max())


def changes_between_steps_are_seen(parts: Path, to: Path) -> bool:
    findings = verdict(parts, to, "nudged").findings
    return any(each.check == BETWEEN and each.step == 2 and each.grade is Grade.bad for each in findings)


def unknown_data_are_no_proof(parts: Path, to: Path) -> bool:
    return verdict(parts, to, "unfed").outcome is Outcome.EQUIVALENT


def other_tokens_have_another_digest(parts: Path, to: Path) -> bool:
    return runs.fed(torch.tensor([[1, 2]])).rows != runs.fed(torch.tensor([[1, 3]])).rows


def a_row_has_one_digest_in_every_batch(parts: Path, to: Path) -> bool:
    batch = torch.arange(12).view(4, 3)
    halves = [row for half in batch.chunk(2) for row in runs.fed(half).rows]
    return runs.fed(batch).rows == halves


def exchanged_weights_have_another_digest(parts: Path, to: Path) -> bool:
    one = torch.tensor([[1.0, 2.0]])
    piece = Piece.of("w", one)
    return watching.digest(piece, one) != watching.digest(piece, one.flip(1))


def pieces_add_up_to_the_whole(parts: Path, to: Path) -> bool:
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    pieces = [Piece("w", (4, 3), whole, blocks_of(whole.shape, *cut, cut[0])) for cut in ((0, 7), (7, 12))]
    sums = [watching.digest(each, each.local) for each in pieces]
    return sum(sums) % 2**64 == watching.digest(Piece.of("w", whole), whole)


def its_own_fault_reaches_nobody(parts: Path, to: Path) -> bool:
    try:
        with runs.watch(torch.nn.Linear(1, 1), None, to / "run") as run:
            run.step(loss=torch.ones(2))  # no single number
    except Exception:
        return False
    return bool(run.problem)


Holds = Callable[[Path, Path], bool]
MUTANTS = slips(
    """
    copies: Copies are added up
        capture.merge.Merged._added: in counted[name]] => in self.parts]
        copies_count_once
    between steps: Weights before a step are taken to be those after the one before
        capture.merge.Merged._row: self._added("after", step - 1, self.holders) if step else begins => begins
        changes_between_steps_are_seen
    unknown data: Runs whose data nobody knows are called EQUAL
        parity.tiers.comparable.limits: if silent: => if False:
        unknown_data_are_no_proof
    content of data: A digest of data holds its shape alone
        capture.run._digest_of: digest.update(leaf.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()) => pass
        other_tokens_have_another_digest
    rows of data: A row's digest holds those before
        capture.run.fed: leaf[row]) for key => leaf[: row + 1]) for key
        a_row_has_one_digest_in_every_batch
    places of weights: Exchanged weights have one digest
        capture.watching.digest: (index + seed) => (0 * index + seed)
        exchanged_weights_have_another_digest
    pieces of weights: Each rank counts its rows from nought
        capture.watching.digest: (top + at // wide) => (at // wide)
        pieces_add_up_to_the_whole
    a fault of its own: Errors reach the training loop
        capture.run.Guarded.__call__: except Exception as error => except OSError as error
        its_own_fault_reaches_nobody
    """
)


@pytest.mark.parametrize("name", each("Capture of another program", MUTANTS))
def test_a_mutant_is_found(name: str, parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slip, holds = MUTANTS[name][0], globals()[MUTANTS[name][1]]
    assert holds(parts, tmp_path / "right")
    slip.put(monkeypatch)
    assert not holds(parts, tmp_path / "wrong")
