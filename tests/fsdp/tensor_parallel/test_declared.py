"""Modules that declare their own meshes are told the right ones, begin, train and are saved as whole ones are."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from harness.fsdp import build, tensor_parallel
from harness.fsdp.comm import mesh
from harness.fsdp.runtime import materialize
from tests.fsdp.tensor_parallel.declared import follow, told_before
from tests.fsdp.tensor_parallel.training import Case
from tests.support.mutants import each
from tests.support.spawn import run_ranks

HSDP = Case(1, 2, outer=2)
CASES = (
    Case(2, 2),
    Case(2, 2, strategy="no_shard"),
    HSDP,
    Case(1, 2, outer=2, outer_strategy="optim"),
    Case(2, 1, outer=2, strategy="optim"),
    Case(1, 4, strategy="optim"),
)
"""DP 2 x TP 2, sharded and not; HSDP and HFSDP x TP 2; HSDP; TP 4."""
META: dict[str, Any] = {"device": torch.device("cpu"), "init_model_with_meta_device": True}

MUTANTS: dict[str, tuple[str, Case, dict[str, Any], Any]] = {
    "copies are in the mesh": (
        "Ranks that replicate weights are told to a module as ranks that cut them",
        HSDP,
        {},
        lambda: mock.patch.object(build, "_cutting", lambda groups, placements: groups.everyone),
    ),
    "TP shards are not told": (
        "A module that sizes itself for its TP shard is told of the data-parallel ranks alone",
        Case(2, 2),
        {},
        lambda: mock.patch.object(build, "mesh_of", lambda data, tensor, kind: mesh.mesh_of(data, None, kind)),
    ),
    "reset whole": (
        "A module that resets its own TP shard is given the whole parameter",
        Case(2, 2),
        META,
        lambda: mock.patch.object(materialize, "declares", return_value=False),
    ),
    "other objects": (
        "An optimizer that was built before holds parameters that the module has no more",
        Case(2, 2),
        {},
        lambda: mock.patch.object(tensor_parallel, "_succeed"),
    ),
}


def _visit(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "right": [follow(rank, case) for case in CASES],
        "meta": [follow(rank, case, **META) for case in (Case(2, 2), HSDP)],
        "before": told_before(rank),
    }
    for name, (_, case, options, mutant) in MUTANTS.items():
        with mutant():
            try:
                found[name] = follow(rank, case, **options)
            except (ValueError, RuntimeError) as error:
                found[name] = [str(error)]
    return found


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """One visit of four ranks; what each has to tell."""
    return run_ranks(_visit, 4)


def test_modules_are_told_the_axes_that_cut_them_and_train_as_whole_ones(told: list[dict[str, Any]]) -> None:
    assert [found["right"] for found in told] == [[[]] * len(CASES)] * 4


def test_modules_on_the_meta_device_reset_their_own_tp_shards(told: list[dict[str, Any]]) -> None:
    assert [found["meta"] for found in told] == [[[], []]] * 4


def test_a_module_that_was_told_is_left_alone(told: list[dict[str, Any]]) -> None:
    assert [found["before"] for found in told] == [[]] * 4


@pytest.mark.parametrize(
    "name", each("The engine, by declared meshes", ((name, mutant[0]) for name, mutant in MUTANTS.items()))
)
def test_a_mutant_is_found(name: str, told: list[dict[str, Any]]) -> None:
    assert any(found[name] for found in told)
