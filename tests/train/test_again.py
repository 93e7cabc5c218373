"""The last captured step is worked out a second time beside the engine: a forward or backward that is not the model's
is found in the run itself, whatever it is held against."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from harness.config.schema import Config, Dtype, ModelFamily
from harness.data import loader
from harness.data.sources import SyntheticSource
from harness.engines.base import plain_model
from harness.engines.protocol import Engine, Microbatch, Seen
from harness.models.workload import workload_for
from harness.parity.alone import every_step
from harness.parity.outcome import Grade, Stage
from harness.parity.record import Record, load
from harness.parity.tiers.arithmetic import Arithmetic
from harness.probe.step_checks.sketch import Sketch
from harness.train import again
from tests.support.factory import freeze, small_config, train, with_dtypes
from tests.support.mutants import finds
from tests.train.runs import Passing

STEPS, BEGINS = 4, 3
CHECK = every_step.LOOKS["again"].check


class Spoiled(Passing):
    """Does something to an engine in some steps."""

    last: Any = None

    def __init__(self, engine: Engine, fault: Callable[[Spoiled, Any], Any], steps: Container[int]) -> None:
        super().__init__(engine)
        self.fault, self.steps = fault, steps

    def forward_backward(self, batch: Any, *, last: bool) -> Tensor:
        given = self.fault(self, batch) if self.number in self.steps else batch
        self.last = batch
        return self.engine.forward_backward(given, last=last)


def stale_tokens(engine: Spoiled, batch: Any) -> Any:
    """What was fed before is fed again, as by a copy that did not wait."""
    return engine.last


def rounded_table(engine: Spoiled, batch: Any) -> Any:
    """The rotary table in bf16, as by an engine that casts buffers."""
    table = engine.engine.model.cos_SE  # type: ignore[attr-defined] # of this engine
    table.copy_(table.bfloat16())
    return batch


def another_loss(engine: Spoiled, batch: Any) -> Any:
    """A tenth of the loss is that of a uniform target."""

    def smoothed(model: Any, batch: Any) -> Tensor:
        logits = model(batch.tokens).float().flatten(0, 1)
        return functional.cross_entropy(logits, batch.targets.flatten(), label_smoothing=0.1)

    engine.engine.workload.loss = smoothed  # type: ignore[attr-defined] # of this engine
    return batch


def tilted_loss(engine: Spoiled, batch: Any) -> Any:
    """Gradients are 1e-5 too long, of a loss that is as it was."""
    right = workload_for(engine.engine.config).loss  # type: ignore[attr-defined] # of this engine

    def tilted(model: Any, batch: Any) -> Tensor:
        loss = right(model, batch)
        return loss + 1e-5 * (loss - loss.detach())

    engine.engine.workload.loss = tilted  # type: ignore[attr-defined] # of this engine
    return batch


FAULTS = {"tokens": stale_tokens, "table": rounded_table, "loss": another_loss, "tilt": tilted_loss}
FORMATS = {"fp32": (Dtype.fp32, Dtype.fp32), "bf16": (Dtype.bf16, Dtype.fp32), "fp64": (Dtype.fp64, Dtype.fp64)}


def configured(kind: str, **changes: Any) -> Config:
    usual = {"train__steps": STEPS, "measure__step_checks": True, "measure__capture_steps": [1, STEPS]}
    usual["measure__again"] = 0.0
    return with_dtypes(small_config(**{**usual, **changes}), *FORMATS[kind])


LATE = range(BEGINS, STEPS + 1)


def trained(path: Path, kind: str, fault: str = "", steps: Container[int] = LATE, **changes: Any) -> Record:
    config = configured(kind, **changes)
    spoiled = (lambda engine: Spoiled(engine, FAULTS[fault], steps)) if fault else (lambda engine: engine)
    train(config, path, wrap_engine=spoiled)
    freeze(config, path)
    return load(path)


def found(run: Record, check: str = CHECK) -> list[tuple[int | None, Grade]]:
    """What does not pass of the steps that were worked out again; all other checks must."""
    failed = [each for each in every_step.check(run, Arithmetic.of(run.config)) if each.grade is not Grade.ok]
    assert {each.check for each in failed} <= {check}, failed
    return [(each.step, each.grade) for each in failed]


@pytest.mark.parametrize("fault", ["tokens", "table", "loss"])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_what_began_late_is_found_in_the_run_itself(tmp_path: Path, kind: str, fault: str) -> None:
    """In 16 bits what a few roundings could explain is in doubt: that a CPU's kernels are the same is no promise."""
    run = trained(tmp_path, kind, fault)
    assert found(run) == [(STEPS, Grade.doubt if (kind, fault) == ("bf16", "table") else Grade.bad)]
    (finding,) = [f for f in every_step.check(run, Arithmetic.of(run.config)) if f.check == CHECK and f.step == STEPS]
    assert finding.place == "between forward and gradient"
    assert Stage.forward in finding.stages


@pytest.mark.parametrize("fault", ["", "tilt"])
def test_a_small_factor_is_in_doubt_in_hot_training(tmp_path: Path, fault: str) -> None:
    """Where no two runs are alike for long: it passed up to 3.6e-5, though a CPU gives the same bits twice."""
    assert found(trained(tmp_path, "fp32", fault, optimizer__lr=0.06)) == [(STEPS, Grade.doubt)] * bool(fault)


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_one_wrong_step_is_found_if_it_is_worked_out_again(tmp_path: Path, share: float) -> None:
    run = trained(tmp_path, "fp32", "tokens", {BEGINS - 1}, measure__again=share)
    assert found(run) == [(BEGINS - 1, Grade.bad)] * bool(share)
    assert run.summary["worked_out_again"]["steps"] == (STEPS if share else 2)


def test_captured_steps_are_worked_out_again_and_a_share_of_the_others() -> None:
    def steps(share: float, **changes: Any) -> list[int]:
        return sorted(again.steps_of(configured("fp32", measure__again=share, **changes)))

    for elsewhere in ({"mesh__tp": 2}, {"model__family": ModelFamily.ext}):  # which may come to something else
        assert steps(1.0, **elsewhere) == []

    assert steps(0.0) == [1, STEPS]
    assert steps(0.0, measure__capture_steps=[2, 3]) == [2, 3]
    assert steps(0.0, measure__capture_steps=[]) == []
    assert steps(1.0) == [1, 2, 3, STEPS]
    long = {"train__steps": 1000, "measure__capture_steps": []}
    drawn = steps(0.01, **long)
    assert len(drawn) == 10
    assert 1 <= drawn[0] <= drawn[-1] <= 1000
    assert drawn == steps(0.01, **long) != steps(0.01, **long, train__seed=5)
    assert set(drawn) < set(steps(0.02, **long))


def test_nobody_looks_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "free_bytes", lambda device, sharing: 0)
    run = trained(tmp_path, "fp32", "loss")
    assert found(run) == []
    assert run.stream is not None
    assert bool(np.isnan(run.stream.column("again")).all())


def test_the_plain_model_is_gone_when_it_was_asked() -> None:
    """At once: the step that follows needs its memory. A model with weights of its own, not of its modules, and the
    hook that casts them hold each other."""
    config = configured("bf16", model__family=ModelFamily.odd)
    workload = workload_for(config)
    gc.disable()
    try:
        with plain_model(workload, config, torch.device("cpu")) as model:
            for param in model.parameters():
                param.detach().zero_()
            tokens = torch.zeros(1, 4, dtype=torch.int64)
            workload.loss(model, Microbatch(tokens, tokens)).backward()
            gone = weakref.ref(model)
        del model, param
        assert gone() is None
    finally:
        gc.enable()


# -- mutants -----------------------------------------------------------------------------------------------------------


def wrong_runs(root: Path) -> Iterator[str]:
    """A clean run and a faulty one, by one rank each."""
    for fault, wanted in (("", []), ("loss", [(STEPS, Grade.bad)])):
        path = root / f"run{fault}"
        if found(trained(path, "fp32", fault)) != wanted:
            yield f"a run with {fault or 'no fault'}"
    right = loader.Loader.batch
    with mock.patch.object(loader.Loader, "batch", lambda self, step: right(self, max(1, step - 1))):
        if found(trained(root / "behind", "fp32")) != [(STEPS, Grade.bad)]:
            yield "every loader gave the microbatches of the step before"
    of_source = SyntheticSource.__getitem__
    with mock.patch.object(SyntheticSource, "__getitem__", lambda self, index: np.roll(of_source(self, index), 1)):
        if found(trained(root / "source", "fp32")) != [(1, Grade.bad), (STEPS, Grade.bad)]:
            yield "every source gave other tokens than its formula"


def wrong_bounds(root: Path) -> Iterator[str]:
    """What is allowed and what is refuted."""
    run = trained(root / "bounds", "bf16", model__tie_embeddings=False)
    assert run.stream is not None
    of = Arithmetic.of(run.config)
    tied = replace(of, reused="x")
    allowed, refuted = every_step.bounds("again", run, run.stream, of)
    if not allowed <= every_step.EXACT or not 0.02 < refuted < 0.1:
        yield f"in bf16: {allowed}, {refuted}"
    own = replace(run, config={**run.config, "engine.name": "ext"})
    for name, bounds in (
        ("own kernels", every_step.bounds("again", own, run.stream, of)),
        ("8 bits", every_step.bounds("again", run, run.stream, replace(of, fp8="block"))),
    ):
        if not bounds[1] > 0.1:
            yield f"{name}: {bounds}"
    if not 1e-3 < every_step.bounds("again", run, run.stream, tied)[0] < 1e-1:
        yield "gradients of a weight that is used twice"
    elsewhere = replace(run, config={**run.config, "cluster.device": "cuda"})
    wider = replace(of, compute="fp32")
    for name, which, least, most in (("fp32", run, 1e-7, 1e-6), ("own", own, 1e-5, 1), ("cuda", elsewhere, 1e-5, 1)):
        if not least < every_step.bounds("again", which, run.stream, wider)[0] < most:
            yield f"in fp32, {name}: {every_step.bounds('again', which, run.stream, wider)}"
    if not every_step.bounds("again", run, run.stream, wider)[1] > 1e-5:
        yield "roundings of fp32 are refuted"
    if not 0.05 < every_step.bounds("again", elsewhere, run.stream, of)[0] < 5:
        yield "another device"


def wrong_numbers(root: Path) -> Iterator[str]:
    """How losses are scaled, and what two sketches differ by."""
    config = configured("fp32")  # four microbatches of two
    loss = torch.tensor(12.0)
    for divisor, wanted in ((4, 12.0), (2, 6.0), (1, 3.0), (32, 96.0)):
        seen = Seen(torch.nn.Linear(1, 1), divisor, torch.float32)
        if float(again._scaled(loss, seen, config)) != wanted:
            yield f"a divisor of {divisor}"
    values = torch.ones(4, 4, dtype=torch.float64)
    other = values.clone()
    other[1, 2] += 0.5
    other[2, 0] = torch.nan
    other[3] += 1.0
    first, second = Sketch(other, torch.ones(4)), Sketch(values, torch.full((4,), 4.0, dtype=torch.float64))
    if again.off_by(first, second, [(8, 8)] * 3 + [(31,)]).tolist() != [0.0, 0.25, float("inf"), 0.0]:
        yield f"off by {again.off_by(first, second, [(8, 8)] * 3 + [(31,)])}"


test_a_mutant_is_found = finds(
    "The comparator: a step worked out again",
    wrong_runs="""
        the loader that fed the run: Tokens are asked of the loader that gave them once before
            train.again.local_gradients: Reread(session.config, session.ranks.data_rank).sequences(step)
                => np.concatenate([np.c_[tokens, targets[:, -1:]] for tokens, targets in session.loader.batch(step)])
        the source that fed the run: Tokens are asked of a source of the class that gave them once before
            data.reread.Reread.__init__: _Hashed(config)
                => __import__('harness.data.sources', fromlist=['']).open_source(config)
        the first captured step: The first captured step alone is worked out again
            train.again.steps_of: (*captured(config).gradients, *drawn.tolist()) => captured(config).gradients[:1]
        the batch before: The second time has another step's tokens
            train.again.local_gradients: sequences(step) => sequences(max(1, step - 1))
        half of the batch: One microbatch is worked out again
            train.again.local_gradients: _size): => _size)[:1]:
        weights of nobody: Weights are not the engine's
            train.again._fill: weights[name].copy_(weight if => weights[name].copy_(0 * weight if
        nothing is told: Nobody asks
            parity.alone.every_step.LOOKS: {name: look for name, look in was.items() if name != "again"}
    """,
    wrong_numbers="""
        a quotient for a product: The loss is not scaled as the engine's
            train.again._scaled: loss / (count // seen.divisor) => loss
        the nearest sketch: Of four sketches the one that is least off counts
            train.again.off_by: amax(1) => amin(1)
        no number is right: What is no number is taken for right
            train.again.off_by: nan=torch.inf => nan=0.0
    """,
    wrong_bounds="""
        bits are owed twice: A rounding is allowed to all
            parity.alone.every_step.bounds: if arithmetic.reused else EXACT => if True else EXACT
        bits are owed anywhere: Kernels of any device are one
            parity.alone.every_step.bounds: run.config.get("cluster.device") == "cpu" => True
        fp32 is not asked: A factor of 1e-5 passes in hot training
            parity.alone.every_step.bounds: elif shared and on_cpu => elif False
        own kernels are ours: One's own kernels owe a plain one's bits
            parity.alone.every_step.bounds: run.config.get("engine.name") != "ext" => True
        cast weights are ours: 8 bits of weights that were cast are a fault
            parity.alone.every_step.bounds: not arithmetic.fp8 => True
    """,
)
