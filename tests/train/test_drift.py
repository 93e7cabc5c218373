"""The plain model is asked the same as a run begins and as it ends: a model whose own code begins to do something else
is found in the run itself, whatever it is held against, and though the step that is worked out again agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config.schema import CkptPolicy, Config, Fp8, ModelFamily
from harness.models import llama
from harness.parity.alone import every_step
from harness.parity.outcome import Grade, Stage
from harness.parity.record import Record, load
from harness.parity.tiers.arithmetic import Arithmetic
from harness.train import again
from tests.support.factory import freeze, stopping, train
from tests.support.mutants import finds
from tests.train import test_again
from tests.train.runs import Passing
from tests.train.test_again import BEGINS, FORMATS, STEPS

CHECK = every_step.LOOKS["drift"].check
Patch = tuple[Any, str, Callable[[Any], Any]]
"""Whose attribute is another from some step on, which, and what is made of the one that was there."""


class Changing(Passing):
    """Changes the code of the model from a step on: of every model there is."""

    def __init__(self, engine: Any, patch: Patch, stack: ExitStack) -> None:
        super().__init__(engine)
        self.patch, self.stack = patch, stack

    def seen(self) -> Any:
        self._change()
        return self.engine.seen()

    def forward_backward(self, batch: Any, *, last: bool) -> Tensor:
        self._change()
        return self.engine.forward_backward(batch, last=last)

    def _change(self) -> None:
        owner, name, make = self.patch
        if self.number == BEGINS and not getattr(owner, name).__name__.startswith("changed"):
            self.stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))


def capped(forward: Any, cap: float = 1.0) -> Any:
    def changed(self: Any, x: Tensor) -> Tensor:
        return cap * torch.tanh(forward(self, x) / cap)

    return changed


def turned(rotate: Any) -> Any:
    def changed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x, cos.bfloat16().to(cos.dtype), sin.bfloat16().to(sin.dtype))

    return changed


def leaning(forward: Any) -> Any:
    """Whose gradient is a hundredth too large."""

    def changed(self: Any, x: Tensor) -> Tensor:
        found: Tensor = forward(self, x)
        found.register_hook(lambda gradient: gradient * 1.01)
        return found

    return changed


FAULTS: dict[str, Patch] = {
    "a softcap": (llama.Head, "forward", capped),
    "a wide softcap": (llama.Head, "forward", partial(capped, cap=50.0)),
    "a rounded table": (llama, "rotate", turned),
    "a custom backward": (llama.FeedForward, "forward", leaning),
}


def configured(kind: str, **changes: Any) -> Config:
    return test_again.configured(kind, **{"measure__capture_steps": [STEPS], **changes})


def trained(path: Path, kind: str, fault: str = "", **changes: Any) -> Record:
    config = configured(kind, model__tie_embeddings=False, **changes)
    with ExitStack() as stack:
        change = (lambda engine: Changing(engine, FAULTS[fault], stack)) if fault else (lambda engine: engine)
        train(config, path, wrap_engine=change)
    freeze(config, path)
    return load(path)


def found(run: Record) -> list[tuple[int | None, Grade]]:
    """What does not pass of the first step, worked out once more; all else must pass."""
    return test_again.found(run, CHECK)


def column(run: Record, name: str = "drift") -> Any:
    assert run.stream is not None
    return run.stream.column(name)


@pytest.mark.parametrize(
    ("kind", "recipe"), [*((kind, None) for kind in FORMATS), ("bf16", Fp8.current), ("bf16", Fp8.mx)]
)
def test_a_clean_run_ends_with_the_function_it_began_with(tmp_path: Path, kind: str, recipe: Fp8 | None) -> None:
    """In 8 bits weights are ones of its own in the main dtype, or a copy that was cast, which is no parameter."""
    sizes = {"model__dim": 64, "model__ffn_dim": 64, "model__vocab_size": 64} if recipe else {}
    run = trained(tmp_path, kind, dtype__fp8=recipe, **sizes)
    assert found(run) == []
    assert column(run)[STEPS - 1] == column(run, "again")[STEPS - 1] == 0
    assert np.isnan(column(run)[: STEPS - 1]).all()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_what_the_models_own_code_does_otherwise_since_some_step_is_found(
    tmp_path: Path, kind: str, fault: str
) -> None:
    """What roundings could explain is in doubt: that one process has the same kernels twice is no promise. In bf16 the
    softcap is more than they could: it changes gradients by 7 %, and 5.3 % are refuted.
    """
    run = trained(tmp_path, kind, fault)
    is_small = (kind == "bf16" and fault != "a softcap") or fault == "a wide softcap"
    assert found(run) == [(STEPS, Grade.doubt if is_small else Grade.bad)]
    (finding,) = [f for f in every_step.check(run, Arithmetic.of(run.config)) if f.check == CHECK]
    assert Stage.forward in finding.stages


def test_a_resumed_run_is_asked_twice_too(tmp_path: Path) -> None:
    """From where it goes on: the code before that is another process's."""
    config = configured("fp32", train__steps=6, measure__capture_steps=[6], ckpt__policy=CkptPolicy.last)
    train(config, tmp_path, should_stop=stopping(2))
    with ExitStack() as stack:
        train(config, tmp_path, wrap_engine=lambda engine: Changing(engine, FAULTS["a softcap"], stack))
    freeze(config, tmp_path)
    assert found(load(tmp_path)) == [(6, Grade.bad)]


def test_nobody_asks_where_no_step_is_worked_out_again_or_nothing_lies_between() -> None:
    asked = [again.is_same_function_asked(configured("fp32"), done) for done in (0, STEPS - 2, STEPS - 1)]
    assert asked == [True, True, False]
    nowhere = [{"measure__capture_steps": steps} for steps in ([1], [])]
    for changes in (*nowhere, {"mesh__tp": 2}, {"model__family": ModelFamily.ext}):
        assert not again.is_same_function_asked(configured("fp32", **changes), 0), changes


# -- mutants -----------------------------------------------------------------------------------------------------------


def wrong_runs(root: Path) -> Iterator[str]:
    """A clean run and a faulty one, by one rank each."""
    for fault, wanted in (("", []), ("a softcap", [(STEPS, Grade.bad)])):
        path = root / f"run{len(fault)}"
        try:
            if found(trained(path, "fp32", fault)) != wanted:
                yield f"a run with {fault or 'no fault'}"
        except AssertionError:
            yield f"a run with {fault or 'no fault'}: something else than the function of step 1 does not pass"


def wrong_bounds(root: Path) -> Iterator[str]:
    """What is allowed and what is refuted: on CPUs and elsewhere."""
    for kind, least, most in (("fp32", 1e-5, 1e-3), ("bf16", 0.02, 0.1)):
        run = trained(root / kind, kind)
        assert run.stream is not None
        of = Arithmetic.of(run.config)
        allowed, refuted = every_step.bounds("drift", run, run.stream, of)
        if allowed > every_step.EXACT or not least < refuted < most:
            yield f"in {kind}: {allowed}, {refuted}"
        elsewhere = replace(run, config={**run.config, "cluster.device": "cuda"})
        if not every_step.bounds("drift", elsewhere, run.stream, of)[0] > 1e-5:
            yield f"another device, {kind}"
    if again.is_same_function_asked(configured("fp32"), STEPS - 1):
        yield "a step is held against itself"


def in_any_order(attend: Any) -> Any:
    """Attention that meets the keys in another order each time, as kernels with atomic additions do."""
    generator = torch.Generator().manual_seed(5)

    def shuffled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **others: Any) -> Tensor:
        order = torch.randperm(k.shape[-2], generator=generator)
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        mask = (seen.tril() if is_causal else seen)[:, order]
        found: Tensor = attend(q, k[..., order, :], v[..., order, :], attn_mask=mask, **others)
        return found

    return shuffled


def wrong_orders(root: Path) -> Iterator[str]:
    """Kernels that add in another order each time are no fault; code that changes later is none of them."""
    captured = {"measure__capture_steps": [1, STEPS]}
    attend = llama.F.scaled_dot_product_attention
    with mock.patch.object(llama.F, "scaled_dot_product_attention", in_any_order(attend)):
        run = trained(root / "shuffled", "fp32", **captured)
    assert run.stream is not None
    assert 1e-9 < column(run)[STEPS - 1] < 1e-5
    failed = [f for f in every_step.check(run, Arithmetic.of(run.config)) if f.grade is not Grade.ok]
    if failed:
        yield f"another order: {failed}"
    if found(trained(root / "capped", "fp32", "a wide softcap", **captured)) != [(STEPS, Grade.doubt)]:
        yield "code that changed is another order"


test_a_mutant_is_found = finds(
    "The comparator: the same function",
    wrong_runs="""
        weights of nobody: They are drawn
            train.again._fill_first: workload.initial_weight(name, weight.shape) => torch.rand_like(weight)
        weights that are nothing: Nothing is computed
            train.again._fill_first: workload.initial_weight(name, weight.shape) => torch.zeros(())
        asked once: Nobody asks before the first step
            train.step_checks.StepChecks.work_out_again: step not in (self.done + 1, *self.again_at)
                => step not in self.again_at
        it is its own witness: Nothing differs
            train.step_checks.StepChecks._tell_local: self.drift, self.first, => self.first, self.first,
        nobody looks: What was found is not written down
            train.step_checks.step_numbers: nothing if blind_twice => nothing if True
        nothing is told: Nobody reads it
            parity.alone.every_step.LOOKS: {name: look for name, look in was.items() if name != "drift"}
    """,
    wrong_bounds="""
        roundings are allowed: One process may compute otherwise by roundings
            parity.alone.every_step.bounds: name == "drift" and on_cpu => False
        bits are owed anywhere: A GPU owes the same bits twice
            parity.alone.every_step.bounds: name == "drift" and on_cpu => name == "drift"
        a step against itself: The first step is asked for twice
            train.again.is_same_function_asked: > done + 1 => > done
    """,
    wrong_orders="""
        another order is a fault: Kernels owe the same bits
            parity.alone.every_step._reassociates: return len(seen) => return len(seen) > 9
        anything is another order: Code that changed is taken for another order
            parity.alone.every_step._reassociates: all( => any(
    """,
)


# -- experts: what is off where no route can flip is refuted, as of other models ---------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", ["", "tokens"])
def test_a_late_forward_is_refuted_of_experts_too(tmp_path: Path, kind: str, fault: str) -> None:
    """Which were let off: a route that flips may change an expert by anything, and on a CPU none does."""
    run = test_again.trained(tmp_path, kind, fault, model__family=ModelFamily.moe)
    assert test_again.found(run) == [(STEPS, Grade.bad)] * bool(fault)


@pytest.mark.parametrize("fault", ["", "a softcap"])
def test_another_function_is_refuted_of_experts_too(tmp_path: Path, fault: str) -> None:
    assert found(trained(tmp_path, "fp32", fault, model__family=ModelFamily.moe)) == [(STEPS, Grade.bad)] * bool(fault)


def wrong_routes(root: Path) -> Iterator[str]:
    """What is refuted of experts: where routes can flip, and where they cannot."""
    run = test_again.trained(root / "bounds", "bf16", model__tie_embeddings=False)
    assert run.stream is not None
    of = Arithmetic.of(run.config)
    routed = replace(of, num_experts=8)
    own, elsewhere = (
        replace(run, config={**run.config, key: other})
        for key, other in (("engine.name", "ext"), ("cluster.device", "cuda"))
    )
    for name, which in (("again", own), ("again", elsewhere), ("drift", elsewhere)):
        if every_step.bounds(name, which, run.stream, routed)[1] != float("inf"):
            yield "a route that rounding turned is refuted"
    for name in ("again", "drift"):
        if not 0.2 < every_step.bounds(name, run, run.stream, routed)[1] < 0.787:
            yield f"in bf16, {name}: {every_step.bounds(name, run, run.stream, routed)}"
    for compute in ("fp32", "fp64"):
        dense, chosen = (replace(each, compute=compute) for each in (of, routed))
        if every_step.bounds("again", run, run.stream, chosen) != every_step.bounds("again", run, run.stream, dense):
            yield f"routes that cannot flip in {compute}"
    many = replace(routed, compute="fp32", tokens=1 << 16)
    if not every_step.bounds("again", run, run.stream, many)[1] > 0.01:
        yield "of many routes in fp32, none can flip"


test_a_mutant_of_routes_is_found = finds(
    "The comparator: experts worked out again",
    wrong_routes="""
        routes are refuted: A token that took another route is a fault
            parity.alone.every_step.bounds: if owes_bits else => if True else
        no route is refuted: Experts may be anything on CPUs too
            parity.alone.every_step.bounds: if owes_bits else => if False else
        routes that never flip: No route flips on a CPU, in bf16 either
            parity.alone.every_step._rerouted: flips > RARE => False
        routes that always flip: A route of a few flips in fp32
            parity.alone.every_step._rerouted: flips > RARE => True
    """,
)
