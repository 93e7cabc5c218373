"""Whatever becomes of the record, training goes on with the same bits, and the run says what is not known."""

from __future__ import annotations

import copy
import errno
import logging
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.capture import parts, watch, watching
from harness.capture.__main__ import main
from harness.capture.parts import FOLDER, Part
from harness.capture.watching import Watching
from harness.parity.compare import compare
from harness.parity.outcome import Outcome
from harness.parity.record import load
from tests.capture import loops
from tests.support.spawn import run_ranks


def trained(path: Path | None, layout: str = "single", **keywords: Any) -> list[Any]:
    found: list[Any] = run_ranks(partial(loops.train, steps=4, **keywords), loops.LAYOUTS[layout].ranks, layout, path)
    return found


def renamed(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 2:
        model.add_module("late", nn.Linear(1, 1))
        nn.init.zeros_(model.late.weight)  # type: ignore[arg-type] # added by hand


def rewritten(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def frozen(model: loops.Net) -> None:
    model.embedding.weight.requires_grad_(False)


def _raises(*_: Any, **__: Any) -> None:
    raise RuntimeError("a fault of its own")


def _full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a hook of the forward": (watching, "count", _raises),
    "a hook of the backward": (Watching, "_local_part", _raises),
    "a hook of the optimizer": (Watching, "_first_update", _raises),
    "a full disk at a step": (Part, "step", _full),
    "a full disk at a capture": (Part, "tensors", _full),
    "a full disk behind the loop": (parts, "save_file", _full),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_its_own_is_one_warning_and_an_incomplete_run(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    told = "No space left on device" if FAULTS[fault][2] is _full else "RuntimeError: a fault of its own"
    with caplog.at_level(logging.WARNING, "harness.capture"):
        assert trained(tmp_path / "study" / "run") == trained(None)
    assert len(caplog.records) == 1
    assert told in caplog.text
    (state,) = [each for each in load(tmp_path / "study" / "run").problems if "not done" in each]
    assert "incomplete" in state
    assert told in state


def test_names_that_change_end_the_record_and_not_the_training(tmp_path: Path) -> None:
    path = tmp_path / "study" / "run"
    assert trained(path, after_update=renamed) == trained(None, after_update=renamed)
    assert any("late.bias" in problem for problem in load(path).problems)


@pytest.mark.parametrize("layout", ["single", "fsdp2"])
def test_a_tied_weight_is_recorded_once(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "study" / layout
    assert trained(path, layout, tied=True) == trained(None, layout, tied=True)
    record = load(path)
    assert record.problems == ()
    assert "head.weight" not in record.captures[1].tensors


def test_a_tied_weight_that_another_program_unties_is_different(tmp_path: Path) -> None:
    for name, tied in (("one", True), ("other", False)):
        trained(tmp_path / "study" / name, tied=tied)
    assert compare(tmp_path / "study" / "one", tmp_path / "study" / "other").outcome is Outcome.NOT_COMPARABLE


def test_a_frozen_part_has_no_gradient_and_does_not_move(tmp_path: Path) -> None:
    for layout in ("ddp", "fsdp2"):
        trained(tmp_path / "study" / layout, layout, build=frozen)
    record = load(tmp_path / "study" / "ddp")
    assert "embedding.weight" not in record.captures[1].tensors
    verdict = compare(tmp_path / "study" / "fsdp2", record.path)
    assert verdict.outcome in (Outcome.EQUAL, Outcome.EQUIVALENT), verdict.sentence


def test_weights_in_new_memory_are_followed(tmp_path: Path) -> None:
    """As an optimizer leaves them that rewrites parameters."""
    trained(tmp_path / "study" / "rewritten", after_update=rewritten)
    trained(tmp_path / "study" / "usual")
    verdict = compare(tmp_path / "study" / "rewritten", tmp_path / "study" / "usual")
    assert verdict.outcome is Outcome.EQUAL, verdict.sentence


def stepping(rank: int, path: Path, steps: tuple[int, int], close: bool = True) -> int:
    """Ranks without a collective of their own. Args: steps: of each. close: of the second rank too."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = watch(model, optimizer, path)
    for _ in range(steps[rank]):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    if close or rank == 0:
        run.close()
    return run.steps


def test_ranks_that_stop_at_different_steps_do_not_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "study" / "uneven"
    assert run_ranks(stepping, 2, path, (5, 3)) == [5, 3]
    record = load(path)
    assert record.length == 3
    assert any("rank-00000 made 5 steps, and another 3" in problem for problem in record.problems)


def test_what_a_killed_rank_saw_can_be_put_together(tmp_path: Path) -> None:
    path = tmp_path / "study" / "killed"
    run_ranks(stepping, 2, path, (3, 3), False)
    assert (path / FOLDER).exists(), "its last rank has not ended"
    assert main([str(path)]) == 0
    record = load(path)
    assert record.length == 3
    assert any("rank-00001 has not ended" in problem for problem in record.problems)


def test_a_watched_model_can_be_copied_and_pickled(tmp_path: Path) -> None:
    """Whole, as an average of weights begins; the copy is not watched."""
    model = loops.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = watch(model, optimizer, tmp_path / "study" / "run")
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for rows in loops.batches(3):
        for each in (model, *copies):
            loss = each(rows).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss, data=rows)
    run.close()
    record = load(run.path)
    assert record.problems == ()
    assert record.stream is not None
    local, reduced = (record.stream.column(f"{kind}_0") for kind in ("local", "reduced"))
    assert abs(local - reduced).max() < 1e-5 * abs(reduced).max(), "the gradients of the copies are not counted"
