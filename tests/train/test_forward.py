"""Forwards in bf16 and fp32 against a baseline: what is far below bf16's rounding is seen where it begins; layouts,
microbatches and engines that do the same are not called different."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.config.schema import Config, Dtype
from harness.models import llama, workload
from harness.parity.judgement import Judgement
from harness.parity.outcome import Finding, Grade, Stage
from harness.parity.record import Record, load
from harness.parity.tiers import forward
from harness.parity.tiers.envelope import Envelope
from tests.support.factory import freeze, small_config, train, with_dtypes
from tests.support.mutants import finds
from tests.support.spawn import made_by
from tests.train.test_step_checks import SEEN, configured

BASELINE = "native-optim_grads_params"
CLEAN: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "native-no_shard": {"model__activation_checkpointing": True},
    "fsdp2": {},
    "ddp": {},
    "other microbatch": {"train__microbatch_size": 1},
    "one rank": {},
}


def bf16(kind: str) -> Config:
    changes = {"train__steps": 2, "measure__step_checks": True, **CLEAN.get(kind, {})}
    if kind == "one rank":
        return with_dtypes(small_config(**changes), Dtype.bf16, Dtype.fp32)
    return with_dtypes(configured(kind if kind in SEEN else BASELINE, **changes), Dtype.bf16, Dtype.fp32)


def softcapped(self: llama.Llama, tokens_BS: Tensor) -> Tensor:
    logits: Tensor = FORWARD(self, tokens_BS)
    return 50 * torch.tanh(logits / 50)


def eight_bits(config: Any, dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    cos, sin = (table.to(torch.bfloat16).to(dtype) for table in TABLES(config, dtype, device))
    return cos, sin


def other_base(config: Any, dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    return TABLES(replace(config, rope_theta=1.01 * config.rope_theta), dtype, device)


def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return CROSS_ENTROPY(logits, targets) + 1e-4 * torch.logsumexp(logits, -1).square().mean()


patch = mock.patch.object
FORWARD, TABLES, CROSS_ENTROPY = llama.Llama.forward, llama.rotary_tables, F.cross_entropy
FAULTS: dict[str, tuple[Callable[[], Any], str, str | None]] = {
    "softcap": (lambda: patch(llama.Llama, "forward", softcapped), forward.OUTPUT, None),
    "tables of 8 bits": (lambda: patch(llama, "rotary_tables", eight_bits), forward.OUTPUT, "blocks.0.attention.wo"),
    "base 1 % off": (lambda: patch(llama, "rotary_tables", other_base), forward.OUTPUT, "blocks.0.attention.wo"),
    "z-loss": (lambda: patch(workload.F, "cross_entropy", with_z_loss), forward.LOGITS, None),
}


FP32 = {
    "fp32": nullcontext,
    "fp32, fsdp2": nullcontext,
    "fp32, tables of 8 bits": lambda: patch(llama, "rotary_tables", eight_bits),
}


def fp32(name: str) -> Config:
    """Captured in step 1, of which gradients then say that the forward, too, may be another."""
    kind = "fsdp2" if name == "fp32, fsdp2" else BASELINE
    return configured(kind, train__steps=2, measure__step_checks=True, measure__capture_steps=[1])


CELLS: dict[str, tuple[Config, Callable[[], Any]]] = {
    **{name: (fp32(name), fault) for name, fault in FP32.items()},
    **{kind: (bf16(kind), nullcontext) for kind in CLEAN},
    **{name: (bf16(BASELINE), fault) for name, (fault, *_) in FAULTS.items()},
}


def trains(rank: int, folder: Path) -> None:
    for name, (config, fault) in CELLS.items():
        with fault():
            if config.mesh.world_size > rank:
                train(config, folder / name, rank)
        freeze(config, folder / name)


trained = made_by(trains, 2)


@pytest.fixture(scope="module")
def runs(trained: Path) -> dict[str, Record]:
    return {name: load(trained / name) for name in CELLS}


def found(arm: Record, control: Record) -> list[Finding]:
    return [finding for kind in forward.check(arm, control, Envelope.of(arm, control)) for finding in kind]


def doubtful(arm: Record, control: Record) -> list[Finding]:
    return [finding for finding in found(arm, control) if finding.grade is not Grade.ok]


def on_cuda(run: Record) -> Record:
    return replace(run, config={**run.config, "cluster.device": "cuda"})


def places(arm: Record, control: Record) -> set[str]:
    """Where the gradients of step 1 are said to have come apart."""
    numbers = [finding for kind in Judgement(arm, control, []).numbers for finding in kind]
    return {f.place for f in numbers if f.grade is not Grade.ok and f.stage is Stage.gradient and f.step == 1}


def wrong_orders(runs: dict[str, Record]) -> Iterator[str]:
    """A product was off by 6e-8 where its inner sum was made of two halves; a rotation changes a thousandth."""
    baseline = runs[BASELINE]
    assert baseline.forward is not None
    sketches, squares = baseline.forward.modules["blocks.0.ffn.w_gate"]
    size = math.sqrt(squares)
    for off, grade in ((6e-8, Grade.doubt), (1e-4, Grade.doubt), (1e-3, Grade.bad)):
        moved = tuple(value + off * size for value in sketches)
        one = {**baseline.forward.modules, "blocks.0.ffn.w_gate": (moved, squares)}
        wrong = doubtful(told(baseline, modules=one), baseline)
        if [(each.tensor, each.grade) for each in wrong] != [("blocks.0.ffn.w_gate", grade)]:
            yield f"{off}: {wrong}"


# -- mutants -----------------------------------------------------------------------------------------------------------


def told(run: Record, **changes: Any) -> Record:
    """The run, had its modules' outputs been written down otherwise."""
    assert run.forward is not None
    return replace(run, forward=replace(run.forward, **changes))


def wrong_findings(runs: dict[str, Record]) -> Iterator[str]:
    """Of forwards that are another, in the verdict too; of layouts, microbatches and engines that do the same."""
    baseline = runs[BASELINE]
    for name, (_, check, tensor) in FAULTS.items():
        wrong = doubtful(runs[name], baseline)
        if [(each.check, each.tensor, each.grade, each.step) for each in wrong] != [(check, tensor, Grade.bad, 1)]:
            yield f"{name} is not found where it begins"
        elif wrong[0] not in [each for kind in Judgement(runs[name], baseline, []).numbers for each in kind]:
            yield f"the verdict does not have {name}"
    for name in CLEAN:
        if doubtful(runs[name], baseline) or forward.OUTPUT not in {each.check for each in found(runs[name], baseline)}:
            yield f"{name} does not pass"
        seen = runs[name].forward
        if seen is None or not {"embedding", "blocks.1.ffn.w_down", "head.output", ""} <= seen.modules.keys():
            yield f"{name} lacks modules"


def broken_expectations(runs: dict[str, Record]) -> Iterator[str]:
    """What is not as it should be, lazily."""
    baseline = runs[BASELINE]
    assert baseline.forward is not None
    yield from wrong_findings(runs)
    if {wrong.grade for wrong in doubtful(on_cuda(runs["softcap"]), on_cuda(baseline))} != {Grade.doubt}:
        yield "kernels of another device are refuted"
    if found(replace(baseline, config={**baseline.config, "dtype.compute": "fp32"}), baseline):
        yield "forwards in two dtypes are compared"
    if found(replace(baseline, forward=None), baseline):
        yield "forwards that nobody looked at are compared"
    if found(told(baseline, rows=baseline.forward.rows + 1), baseline):
        yield "forwards of other positions are compared"
    yield from broken_besides(runs)
    batch = (1, baseline.forward.batch[1])
    for factor, wrong in ((1.3, [("head.output", Grade.bad)]), (1.001, [])):
        sketches, squares = baseline.forward.modules["head.output"]
        one = {**baseline.forward.modules, "head.output": (tuple(factor * value for value in sketches), squares)}
        told_so = doubtful(told(baseline, modules=one, batch=batch), baseline)
        if [(finding.tensor, finding.grade) for finding in told_so] != wrong:
            yield f"in other microbatches outputs {factor} times as large are {told_so}"


def broken_besides(runs: dict[str, Record]) -> Iterator[str]:
    """In fp32, and where another order of additions is no fault."""
    yield from wrong_orders(runs)
    if places(runs["fp32, tables of 8 bits"], runs["fp32"]) != {"between forward and gradient"}:
        yield "a forward in fp32 is not seen"
    if doubtful(runs["fp32, fsdp2"], runs["fp32"]) or forward.parts(runs["fp32, fsdp2"], runs["fp32"]):
        yield "engines that do the same part in fp32"


test_a_mutant_is_found = finds(
    "The comparator: forwards in 16 bits",
    broken_expectations="""
        no other order: A product that was split is another computation
            parity.tiers.forward.check: max(refuted, another_order) => refuted
        any other order: Another order explains a rotation, too
            parity.tiers.forward.check: max(refuted, another_order) => max(refuted, 5e-3)
        the farthest module: The module that is farthest off is named, and not the first
            parity.tiers.forward.check: next((name for name, off in distances.items() if off > SAME), None)
                => max((name for name, off in distances.items() if off > SAME), key=distances.get, default=None)
        whatever the microbatch: Kernels of other shapes are taken to be the same
            parity.tiers.forward.check: left.batch != right.batch => False
        nothing of other microbatches: Forwards in other microbatches pass, whatever they give out
            parity.tiers.forward.check: for name, off in shown.items() => for name, off in ()
        no forward in fp32: A gradient of another forward is called the backward's
            parity.judgement.Judgement._placed: and forward.parts(self.arm, self.control) => and False
        the norm squared: Distances are over the norm's square
            parity.tiers.forward._distances: off / math.sqrt(squares) => off / squares
        refuted on any device: Other kernels on another device are a fault
            parity.tiers.forward.check: SAME if on_cpu else math.inf => SAME
        of two dtypes: A forward in bf16 is held to one in fp32
            parity.tiers.forward.check: or not same_dtype =>
        of other positions: Sketches of other parts of the batch are compared
            parity.tiers.forward.check: or left.rows != right.rows =>
        SAME is what bf16 explains: Forwards agree to the count of roundings
            parity.tiers.forward.SAME: 5e-3
        anything parts: Forwards that agree are said to part
            parity.tiers.forward.REORDERED: -1.0
        no loss given the logits: The loss is not held to the logits
            parity.tiers.forward._loss: lambda *_: []
        a loss of bf16: The loss is allowed what bf16 logits explain
            parity.tiers.forward.LOSS: 5e-3
    """,
)
