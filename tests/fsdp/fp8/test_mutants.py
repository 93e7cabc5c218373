"""Mistakes that an engine of FP8 weights could have; following plain torch finds each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest

from harness.fp8 import tile_scales
from harness.fp8.delayed import History
from harness.fp8.formats import exponent_above
from harness.fp8.quantize import spread
from harness.fsdp.runtime.weights import Weights
from harness.fsdp.storage import codec
from harness.fsdp.vocabulary import Fp8
from tests.fsdp.fp8.sharded import Case, follow
from tests.fsdp.fp8.test_sharded import ZERO_3, going_on
from tests.streams.recorder import Recorder, believing_in
from tests.support.mutants import each
from tests.support.spawn import run_ranks

INSTALL, RESCALE, UPDATE = Weights.install, codec.Fp8Weight.rescale, History.update


def _own_rows_alone() -> AbstractContextManager[Any]:
    return mock.patch.object(codec, "_take_largest", return_value=None)


def _first_row(grid: Any, tile: Any, shape: Any, first_row: int = 0) -> Any:
    return spread(grid, tile, shape)


def _stale(self: Any, amaxes: Any) -> None:
    if not hasattr(self, "stale"):
        RESCALE(self, amaxes)
    self.stale = True


def _rounded_down(values: Any) -> Any:
    return exponent_above(values * 0.5)


def _always_a_step(self: Any, *, step_ended: bool = False) -> None:
    INSTALL(self, step_ended=True)


def _never_a_step(self: Any, *, step_ended: bool = False) -> None:
    INSTALL(self)


def _only_expect(self: Any, gradients: Any) -> None:
    gradients.expect()


@contextmanager
def _waiting_in_8_bits() -> Iterator[None]:
    """Where work is queued: elsewhere gradients come in the bucket's dtype."""
    with believing_in(Recorder().cuda), mock.patch.object(codec.Fp8Codec, "prepare", _only_expect):
        yield


MUTANTS: dict[str, tuple[str, Case, Any]] = {
    "amax-of-own-rows": (
        "Each rank makes scales of the rows it has",
        Case(Fp8.current, "optim"),
        _own_rows_alone,
    ),
    "scale-of-first-rows": (
        "A shard is quantized under the scales of the weight's first rows",
        Case(Fp8.block, ZERO_3),
        lambda: mock.patch.object(tile_scales, "spread", _first_row),
    ),
    "stale-scale": (
        "Weights are quantized under the scales they began with",
        Case(Fp8.block, "optim_grads"),
        lambda: mock.patch.object(codec.Fp8Weight, "rescale", _stale),
    ),
    "scaling-of-others": (
        "The exponent of a tile is rounded down, so that its largest values saturate",
        Case(Fp8.mx_32x32, ZERO_3),
        lambda: mock.patch.object(tile_scales, "exponent_above", _rounded_down),
    ),
    "gradients-of-8-bits": (
        "Gradients are cast to the dtype of the weight, as they are of weights that are not held in 8 bits",
        Case(Fp8.current, "optim_grads"),
        _waiting_in_8_bits,
    ),
    "history-stands": (
        "No step of delayed scaling ever ends",
        Case(Fp8.delayed, "optim"),
        lambda: mock.patch.object(Weights, "install", _never_a_step),
    ),
    "loading-is-a-step": (
        "Weights that are loaded end a step of delayed scaling, and are quantized under its next scale",
        Case(Fp8.delayed, ZERO_3),
        lambda: mock.patch.object(Weights, "install", _always_a_step),
    ),
}


def _visit(rank: int) -> dict[str, list[str]]:
    told = {}
    for name, (_, case, mutant) in MUTANTS.items():
        with mutant():
            told[name] = going_on(rank, case, case) if name == "loading-is-a-step" else follow(rank, case)
    return told


@pytest.fixture(scope="module")
def told() -> list[dict[str, list[str]]]:
    """What each rank finds wrong with each mutant."""
    return run_ranks(_visit, 2)


@pytest.mark.parametrize("name", each("The engine, by its 8-bit weights", ((n, m[0]) for n, m in MUTANTS.items())))
def test_a_mutant_is_found(name: str, told: list[dict[str, list[str]]]) -> None:
    assert any(found[name] for found in told)
