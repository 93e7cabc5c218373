"""Marks in a profile: every collective by its bucket, and nothing without a profiler."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import profile

from harness.fsdp import fully_shard
from harness.fsdp.comm import events
from tests.fsdp.checked import each_holds, each_is_found, of_slips

UNITS = ("0", "1", "2")


class Seen(events.Observer):
    """Collectives that the engine announces, by the names their marks should have."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def begin(self, label: events.Label, data: object) -> None:
        self.names[f"FSDP::{label.kind} ({label.bucket})"] += 1


def test_an_observer_of_the_version_before_is_told() -> None:
    with pytest.raises(TypeError, match=r"Old.collective\(kind, bucket\) is now begin\(\(kind, bucket\), data\)"):
        type("Old", (events.Observer,), {"collective": print})


def a_step(rank: int, strategy: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in UNITS), nn.Linear(4, 2))
    fully_shard(model, unit_modules=[nn.Sequential], strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.full((2, 4), 1.0 + rank, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def marks(profiler: profile) -> Counter[str]:
    """Marks in the file of a trace, as Perfetto reads it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(file))
        told: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return Counter(name for each in told if (name := str(each.get("name", ""))).startswith("FSDP::") and "dur" in each)


def marked(rank: int, strategy: str) -> list[str]:
    """Every collective is in the trace of a step."""
    step = a_step(rank, strategy)
    seen = Seen()
    seen.attach()
    try:
        with profile() as profiler:
            step()
    finally:
        seen.detach()
    found = marks(profiler)
    few = {name: (found[name], count) for name, count in seen.names.items() if found[name] < count}
    return [f"{name} is marked {has} times, and was issued {count} times" for name, (has, count) in few.items()]


def silent(rank: int, strategy: str) -> list[str]:
    """Without a profiler no mark is made."""
    step = a_step(rank, strategy)
    with mock.patch.object(events, "record_function", side_effect=AssertionError("a mark is made")):
        step()
    return []


CHECKS: dict[str, Callable[[int, str], list[str]]] = {"marked": marked, "silent": silent}


test_collectives_are_marked_in_a_profile_alone = each_holds(__name__, CHECKS)


MUTANTS = of_slips(
    """
    no collective marked: Collectives are not in a profile
        fsdp.comm.events.begin.__enter__: marked(*self._label) if is_profiled() else None => None
        marked / no_shard
    always marked: Collectives are marked without a profiler
        fsdp.comm.events.begin.__enter__: if is_profiled() else None => if True else None
        silent / optim
    """
)


test_what_a_profile_lacks_is_found = each_is_found(__name__, MUTANTS, "Marks in a profile")
