"""Forwards in bf16 against a bf16 twin: what is far below the rounding of bf16 is seen where it begins, and layouts,
microbatches and engines that do the same are not called different."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.config.schema import Config, Dtype
from harness.models import llama, workload
from harness.parity.judgement import Judgement
from harness.parity.outcome import Finding, Grade
from harness.parity.record import Record, load
from harness.parity.tiers import forward
from harness.parity.tiers.envelope import Envelope
from tests.support.factory import freeze, small_config, train, with_dtypes
from tests.support.spawn import run_ranks
from tests.train.test_vouching import SEEN, configured

TWIN = "native-optim_grads_params"
CLEAN: dict[str, dict[str, Any]] = {
    TWIN: {},
    "native-no_shard": {"model__activation_checkpointing": True},
    "fsdp2": {},
    "ddp": {},
    "other microbatch": {"train__microbatch_size": 1},
    "one rank": {},
}


def bf16(kind: str) -> Config:
    changes = {"train__steps": 2, "measure__vouch": True, **CLEAN.get(kind, {})}
    if kind == "one rank":
        return with_dtypes(small_config(**changes), Dtype.bf16, Dtype.fp32)
    return with_dtypes(configured(kind if kind in SEEN else TWIN, **changes), Dtype.bf16, Dtype.fp32)


@contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


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


FORWARD, TABLES, CROSS_ENTROPY = llama.Llama.forward, llama.rotary_tables, F.cross_entropy
FAULTS: dict[str, tuple[Callable[[], Any], str, str | None]] = {
    "softcap": (lambda: instead(llama.Llama, "forward", softcapped), forward.OUTPUT, None),
    "tables of 8 bits": (
        lambda: instead(llama, "rotary_tables", eight_bits),
        forward.OUTPUT,
        "blocks.0.attention.wo",
    ),
    "base 1 % off": (lambda: instead(llama, "rotary_tables", other_base), forward.OUTPUT, "blocks.0.attention.wo"),
    "z-loss": (lambda: instead(workload.F, "cross_entropy", with_z_loss), forward.LOGITS, None),
}


def trains(rank: int, folder: str) -> None:
    for kind in CLEAN:
        if bf16(kind).mesh.world_size > 1:
            train(bf16(kind), Path(folder, kind), rank)
    for name, (fault, *_) in FAULTS.items():
        with fault():
            train(bf16(TWIN), Path(folder, name), rank)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    folder = tmp_path_factory.mktemp("forwards")
    run_ranks(trains, 2, str(folder))
    train(bf16("one rank"), folder / "one rank")
    for name in (*CLEAN, *FAULTS):
        freeze(bf16(name), folder / name)
    return {name: load(folder / name) for name in (*CLEAN, *FAULTS)}


def found(arm: Record, control: Record) -> list[Finding]:
    return [each for kind in forward.check(arm, control, Envelope.of(arm, control)) for each in kind]


@pytest.mark.parametrize("name", FAULTS)
def test_a_forward_that_is_another_is_different_and_placed(runs: dict[str, Record], name: str) -> None:
    (wrong,) = [each for each in found(runs[name], runs[TWIN]) if each.grade is not Grade.ok]
    _, check, tensor = FAULTS[name]
    assert (wrong.check, wrong.tensor, wrong.grade, wrong.step) == (check, tensor, Grade.bad, 1)
    numbers = [each for kind in Judgement(runs[name], runs[TWIN], []).numbers for each in kind]
    assert wrong in numbers, "the verdict has it"


@pytest.mark.parametrize("name", [name for name in CLEAN if name != TWIN])
def test_layouts_microbatches_and_engines_are_not(runs: dict[str, Record], name: str) -> None:
    seen = found(runs[name], runs[TWIN])
    assert {each.grade for each in seen} == {Grade.ok}
    assert {each.check for each in seen} >= {forward.OUTPUT}
    told = runs[name].forward
    assert told is not None
    assert {"embedding", "blocks.1.ffn.w_down", "head.output", ""} <= told.modules.keys()


def test_on_other_devices_kernels_may_be_chosen_by_more(runs: dict[str, Record]) -> None:
    cuda = {"cluster.device": "cuda"}
    arm, control = (replace(runs[name], config={**runs[name].config, **cuda}) for name in ("softcap", TWIN))
    assert [each.grade for each in found(arm, control) if each.grade is not Grade.ok] == [Grade.doubt]


def test_what_has_other_dtypes_or_was_not_looked_at_says_nothing(runs: dict[str, Record]) -> None:
    twin = runs[TWIN]
    assert found(replace(twin, forward=None), twin) == []
    assert found(replace(twin, config={**twin.config, "dtype.compute": "fp32"}), twin) == []
