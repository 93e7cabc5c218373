"""The parts of a step's time add up to it, whatever looks at the step meanwhile."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.probe.meters import ASIDE, Timers
from harness.probe.step_checks.local import ForwardWatch, LocalWatch
from harness.store.metrics import read_metrics
from harness.train import again
from harness.train.again import local_gradients
from tests.support.factory import layouts, small_config, train
from tests.support.mutants import finds
from tests.support.spawn import made_by

PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s")
ENGINES = layouts(native="no_shard optim optim_grads optim_grads_params", fsdp2="optim_grads_params", ddp="no_shard")
RUNS = [
    *((engine, 4, True) for engine in ENGINES),
    *((f"{engine}-optim_grads_params", 1, looks) for engine in ("native", "fsdp2") for looks in (True, False)),
    ("ddp-no_shard", 4, False),
]
"""Engine, microbatches a rank, and whether every step is checked."""


def trains(rank: int, folder: Path) -> None:
    for engine, k, looks in RUNS:
        changes = {**ENGINES[engine], "train__microbatch_size": 4 // k, "measure__step_checks": looks}
        captured = [2] if looks else []
        config = small_config(mesh__world_size=2, train__steps=5, measure__capture_steps=captured, **changes)
        train(config, folder / f"{engine}-{k}-{looks}", rank)


runs = made_by(trains, 2)


def shares(run_dir: Path) -> list[float]:
    """By step, what the parts are of it."""
    found = []
    for line in read_metrics(run_dir / "metrics.jsonl"):
        parts = [line["time"][part] for part in PARTS]
        assert min(parts) >= 0
        assert sum(parts) + line["time"]["other_s"] == pytest.approx(line["step_time_s"], rel=1e-9)
        found.append(sum(parts) / line["step_time_s"])
    return found


@pytest.mark.parametrize(("engine", "k", "looks"), RUNS)
def test_parts_add_up_to_the_step(runs: Path, engine: str, k: int, looks: bool) -> None:
    """A rank that loses its core between two parts makes one step's share smaller, none larger."""
    found = shares(runs / f"{engine}-{k}-{looks}")
    assert max(found) <= 1 + 1e-9, found
    assert statistics.median(found) >= 0.95, found


# -- what looks takes --------------------------------------------------------------------------------------------------

LOOK_S = 0.006


def wrong_steps(root: Path) -> Iterator[str]:
    """A step in one process whose every look takes long; looks at what is worked out again are not the step's."""
    slept: Counter[str] = Counter()
    elsewhere = [False]

    def slow(look: Any, kind: str) -> Any:
        def slowly(*args: Any, **named: Any) -> Any:
            if not elsewhere[0]:
                time.sleep(LOOK_S)
                slept[kind] += 1
            return look(*args, **named)

        return slowly

    def worked_out(*args: Any, **named: Any) -> Any:
        elsewhere[0] = True
        try:
            return local_gradients(*args, **named)
        finally:
            elsewhere[0] = False

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(again, "local_gradients", worked_out))
        for owner, name in LOOKS:
            stack.enter_context(mock.patch.object(owner, name, slow(getattr(owner, name), f"{owner.__name__}.{name}")))
        train(small_config(train__steps=1, measure__step_checks=True, measure__capture_steps=[]), root)
    (line,) = read_metrics(root / "metrics.jsonl")
    if not line["step_time_s"] < LOOK_S * min(slept[f"{owner.__name__}.{name}"] for owner, name in LOOKS):
        yield f"a step took {line['step_time_s']} with looks {slept} of {LOOK_S} s"
    if not shares(root)[0] <= 1 + 1e-9:
        yield f"parts are {shares(root)[0]} of the step"


LOOKS = [(LocalWatch, "_gradient"), (LocalWatch, "_forward"), (ForwardWatch, "_look")]


def wrong_timers(_: Path) -> Iterator[str]:
    """Spans around, beside and within what is left out of them."""
    meter = Timers(torch.device("cpu"))
    with meter.span("outer"), meter.span("inner"):
        with meter.aside(), meter.aside(), meter.span("within"):
            time.sleep(0.1)
        with meter.aside():
            time.sleep(0.1)
    with meter.span("beside"):
        time.sleep(0.01)
    found = meter.take()
    if "within" in found:
        yield "a span of the harness's own work is a step's"
    if not 0.2 <= found[ASIDE] < 0.3:
        yield f"{found[ASIDE]} s were aside, of 0.2"
    yield from (f"{name} took {found[name]}" for name in ("outer", "inner") if not 0 <= found[name] < 0.1)
    if found["beside"] < 0.01:
        yield "what was aside is taken off other spans"


test_a_mutant_is_found = finds(
    "The parts of a step's time",
    wrong_steps="""
        weights looked at: Looks at weights count as forwards
            probe.hooks.ParameterHooks._before: self._aside() => nullcontext()
        gradients looked at: Looks at gradients count
            probe.hooks.ParameterHooks._handed: self._aside() => nullcontext()
        outputs looked at: Looks at outputs count as forwards
            probe.step_checks.local.ForwardWatch._hook: self._aside() => nullcontext()
        left in the step: What looks take is taken off the parts, not off the step
            train.loop.Loop._update:  - spans[ASIDE] =>
        forwards counted twice: Parts overlap
            train.record._parts: spans["forward_backward"] - forward => spans["forward_backward"]
    """,
    wrong_timers="""
        left in the spans: What looks take is taken off the step, not off its parts
            probe.meters.Timers.span: for around in self._open => for around in ()
        counted twice: A look within a look is taken off twice
            probe.meters.Timers.span: if ASIDE in self._open: => if name != ASIDE and ASIDE in self._open:
        spans of one's own: What the harness computes for itself is a forward
            probe.meters.Timers.span: if ASIDE in self._open: => if name == ASIDE and ASIDE in self._open:
    """,
)
