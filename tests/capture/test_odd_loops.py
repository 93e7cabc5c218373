"""Loops that do what the plain one does not: a loss scale, several updates a step, a NaN, lists, a notebook."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.capture import run as runs, watch
from harness.launch import submit
from harness.parity.compare import compare
from harness.parity.outcome import Outcome, Verdict
from harness.parity.record import load
from harness.store.rundir import RunDir
from harness.store.status import State, read
from tests.capture import loops
from tests.support.mutants import finds

STEPS = 4
CLEAN = (Outcome.EQUAL, Outcome.EQUIVALENT)


def train(path: Path, *, updates: int = 1, chunks: int = 1, overflows: int = 0, **options: Any) -> Path:
    """Train under torch's loss scale. Args: updates: of each step. chunks: parts of a batch. overflows: step whose
    loss is infinite. options: of AdamW."""
    torch.manual_seed(0)
    net = loops.Net()
    optimizer, scaler = torch.optim.AdamW(net.parameters(), lr=1e-3, **options), torch.amp.GradScaler("cpu", 2.0**16)
    run = watch(net, optimizer, path)
    for step, rows in enumerate(loops.batches(STEPS), start=1):
        for _ in range(updates):
            for part in rows.chunk(chunks):
                loss = nn.functional.cross_entropy(net(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / chunks
                scaler.scale(loss * (torch.inf if step == overflows else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        run.step(data=rows)
    run.close()
    return path


def both(to: Path, left: dict[str, Any], right: dict[str, Any]) -> Verdict:
    return compare(train(to / "study" / "left", **left), train(to / "study" / "right", **right))


def a_loss_scale_is_no_distance(to: Path) -> None:
    """A fused optimizer divides by it itself; sums in two parts are rounded otherwise."""
    assert both(to, {"fused": True, "chunks": 2}, {"fused": False}).outcome is Outcome.EQUIVALENT


def an_update_that_overflowed_is_none(to: Path) -> None:
    assert both(to, {"fused": True, "overflows": 2}, {"fused": False, "overflows": 2}).outcome in CLEAN
    assert load(to / "study" / "left").length == STEPS - 1


def several_updates_are_no_fault(to: Path) -> None:
    assert both(to, {"updates": 2}, {"updates": 2}).outcome in CLEAN


def groups_one_by_one_are_one_update(to: Path) -> None:
    """As DeepSpeed's ZeRO steps them."""
    paths = [by_groups(to / "study" / str(apart), apart=apart) for apart in (True, False)]
    assert compare(*paths).outcome is Outcome.EQUAL
    assert load(paths[0]).config["optimizer.name"] == "adamw"


def by_groups(path: Path, *, apart: bool) -> Path:
    torch.manual_seed(0)
    net = loops.Net()
    groups = [{"params": [each for each in net.parameters() if (each.ndim > 1) is wide]} for wide in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    every = optimizer.param_groups
    with watch(net, optimizer, path, share=1.0) as run:
        for rows in loops.batches(STEPS):
            loss = nn.functional.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            for optimizer.param_groups in [[each] for each in every] if apart else [every]:
                optimizer.step()
            optimizer.param_groups = every
            optimizer.zero_grad()
            run.step(loss=loss, data=rows)
    return path


def numbers_that_are_none_are_recorded(to: Path) -> None:
    path = to / "study" / "spoilt"
    with watch(nn.Linear(1, 1), None, path) as run:
        for loss in (1.0, torch.nan, torch.inf):
            run.step(loss=loss)
    assert state_of(path) is State.done
    assert str(load(path).series("loss")[1]) == "nan"


def state_of(path: Path) -> State | None:
    found = read(path)
    return found and found.state


def lists_have_rows() -> None:
    batch = {"words": ["one", "three", "two"], "label": [1, 2, 3], "ids": torch.arange(6).view(3, 2)}
    parts = [runs.fed({key: each[rows] for key, each in batch.items()}).rows for rows in (slice(0, 1), slice(1, 3))]
    assert [*parts[0], *parts[1]] == runs.fed(batch).rows
    assert len(set(runs.fed(batch).rows)) == 3


def an_earlier_error_is_not_of_the_run(to: Path) -> None:
    """As in a notebook, one of whose cells failed before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "last_value", NameError("of another cell"), raising=False)
        assert state_of(train(to / "study" / "later")) is State.done


def it_is_not_tried_again(to: Path) -> None:
    run = RunDir(train(to / "study" / "run"))
    with pytest.raises(Exception, match="another program"):
        submit.frozen(run)


test_a_mutant_is_found = finds(
    "Odd loops under a watch",
    a_loss_scale_is_no_distance="""
        loss scale: Scaled local gradients are held against unscaled ones
            parity.tiers.divergence._scale: found > 0 => found < 0
        fused scale: Gradients that a fused optimizer is to unscale are recorded with the scale
            capture.watching.Watching._reduced_gradient: local if scale is None else local / scale.to(local.device)
            => local
    """,
    an_update_that_overflowed_is_none="""
        fused overflow: An update that is left out counts as one
            capture.watching.Watching._update: "found_inf" => "nothing"
    """,
    several_updates_are_no_fault="""
        several updates: Two updates are held to be one
            capture.describe.config: if any(each["repeats"] => if not any(each["repeats"]
    """,
    groups_one_by_one_are_one_update="""
        groups: Groups stepped in turn are several updates
            capture.watching.Watching._update: id(param) for => id(optimizer) for
    """,
    lists_have_rows="""
        lists: Lists of a batch have another digest in each layout
            capture.run._leaves: str | int | float => complex
    """,
    an_earlier_error_is_not_of_the_run="""
        notebook: An error of an earlier cell ends a run
            capture.run.Run.close: is self._earlier => is None
    """,
    it_is_not_tried_again="""
        retry: A new attempt of another program is promised
            launch.submit.frozen: provenance.WATCHED in => "" in
    """,
    numbers_that_are_none_are_recorded="""
        NaN: A run whose loss is no number is lost
            capture.merge.decode: __import__("json").loads
    """,
)
