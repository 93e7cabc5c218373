"""Long work that is no step says that it moves, to the launcher and to the rank's own watch."""

from __future__ import annotations

import torch

from harness.train.record import weights_digest
from harness.train.session import timed_workload
from harness.worker import rank
from harness.worker.rank import heartbeat


class Told:
    """A reporter with its pipe, and a watch, which remember what they were told."""

    def __init__(self) -> None:
        self.pipe = self
        self.kinds: list[str] = []
        self.steps = 0

    def send(self, kind: str) -> None:
        self.kinds.append(kind)

    def step(self) -> None:
        self.steps += 1


def test_a_beat_reaches_both_and_no_more_often_than_needed(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(rank.time, "monotonic", lambda: now[0])
    told = Told()
    beat = heartbeat(told, told)
    for moment in (0.1, 0.9, 1.0, 1.5, 2.1):
        now[0] = moment
        beat()
    assert told.kinds == ["alive", "alive"]
    assert told.steps == 2


def test_every_weight_that_is_digested_or_filled_is_a_sign_of_life() -> None:
    beats: list[str] = []
    weights = [(f"w{number}", torch.ones(2)) for number in range(3)]
    assert weights_digest(iter(weights), alive=lambda: beats.append("digest")) == weights_digest(iter(weights))
    assert beats == ["digest"] * 3

    class Inner:
        unit_classes, may_leave_unused = (), False

        def initial_weight(self, name, shape):
            return torch.zeros(shape)

    workload = timed_workload(Inner(), None, lambda: beats.append("fill"))
    workload.initial_weight("w", torch.Size([2]))
    assert beats[-1] == "fill"
