"""FSDP2 casts weights before 8-bit layers quantize them: another arithmetic, said so, and no fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import Config, Dtype, EngineName, Fp8, Strategy
from harness.engines.adapters.fsdp2 import Fsdp2Engine
from harness.parity.judgement import CAST_FIRST, Judgement
from harness.parity.outcome import Grade
from harness.parity.record import Record, load
from tests.support.factory import freeze, small_config, train, with_dtypes
from tests.support.mutants import Slip, kills
from tests.support.spawn import made_by
from tests.train.test_forward import found as forwards

USUAL: dict[str, Any] = {"model__dim": 64, "model__ffn_dim": 64, "dtype__fp8": Fp8.current}
ZERO_3 = {"engine__name": EngineName.fsdp2, "sharding__strategy": Strategy.optim_grads_params}
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"engine__name": EngineName.ddp},
    "fsdp2": ZERO_3,
    "fsdp2, as others": ZERO_3,
}


def configured(kind: str) -> Config:
    config = small_config(mesh__world_size=2, measure__step_checks=True, measure__again=1.0, **USUAL, **KINDS[kind])
    return with_dtypes(config, Dtype.bf16, Dtype.fp32)


def trains(rank: int, folder: Path) -> None:
    for kind in KINDS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if kind == "fsdp2, as others":
                Slip(Fsdp2Engine, "seen", ", rounded=self.compute_dtype", "").put(monkeypatch)
            train(configured(kind), folder / kind, rank)
        freeze(configured(kind), folder / kind)


trained = made_by(trains, 2)


@pytest.fixture(scope="module")
def runs(trained: Path) -> dict[str, Record]:
    return {kind: load(trained / kind) for kind in KINDS}


def failed(run: Record) -> set[str]:
    """Checks of a run alone that fail."""
    kinds = Judgement(run, run, []).alone
    return {finding.check for kind in kinds for finding in kind if finding.grade is not Grade.ok}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_its_own_checks_know_what_it_quantizes(runs: dict[str, Record], kind: str) -> None:
    assert failed(runs[kind]) == set()
    assert runs[kind].witnesses


def test_the_sentence_says_that_it_is_another_arithmetic(runs: dict[str, Record]) -> None:
    for arm, control in (("fsdp2", "ddp"), ("ddp", "fsdp2")):
        assert Judgement(runs[arm], runs[control], []).limits == [f"{runs['fsdp2'].name} {CAST_FIRST}"]
        assert not forwards(runs[arm], runs[control])
    assert Judgement(runs["fsdp2"], runs["fsdp2"], []).limits == []
    assert forwards(runs["fsdp2"], runs["fsdp2"]), "two that cast first are held to the same bits"


@kills("Witnesses", "main weights quantized", "FSDP2 in 8 bits is DIFFERENT, in weights of its forwards")
def test_held_to_quantized_main_weights_it_would_be_different(runs: dict[str, Record]) -> None:
    assert "weights of the forward" in failed(runs["fsdp2, as others"])
