"""Long work that is no step says that it moves."""

from __future__ import annotations

import torch

from harness.train.record import weights_digest
from harness.train.session import timed_workload


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
