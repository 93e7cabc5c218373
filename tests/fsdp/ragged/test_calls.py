"""Torch calls on tensors that are cut unevenly give what one process has, or say on every rank why not."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from harness.fsdp.ragged import distribute_rows, operations, reductions
from tests.fsdp.ragged.calls import EDITS, FLATTENED, HALVES, LAYOUTS, READS, REFUSED, Layout, cut, mesh_of
from tests.fsdp.ragged.mutants import MUTANTS
from tests.support.covering import once
from tests.support.mutants import each
from tests.support.spawn import run_ranks

AREA = "ragged tensors"
Outcome = str
"""Empty where right."""


def test_calls_are_many_and_refusals_few() -> None:
    assert len({*READS, *EDITS, *FLATTENED}) >= 150
    assert len(set(REFUSED)) <= 12


@once
def outcomes(layout: str) -> dict[str, Outcome]:
    """Each call's outcome in one layout; `q` has the same cut, then another."""
    return _merged(run_ranks(try_all, _ranks(LAYOUTS[layout]), layout, [*READS, *EDITS, *FLATTENED, *REFUSED]))


def _ranks(layout: Layout) -> int:
    return torch.Size(layout.mesh).numel()


def _merged(told: list[dict[str, Outcome]]) -> dict[str, Outcome]:
    return {call: " | ".join(dict.fromkeys(each[call] for each in told if each[call])) for call in told[0]}


def try_all(rank: int, name: str, calls: list[str]) -> dict[str, Outcome]:
    """On one rank: what is wrong with each call."""
    warnings.simplefilter("ignore")
    layout = LAYOUTS[name]
    mesh = mesh_of(layout)
    others = [layout, LAYOUTS["first"]] if layout.mesh == (2,) else [layout]
    return {call: next(filter(None, (try_one(call, layout, other, mesh) for other in others)), "") for call in calls}


def try_one(call: str, layout: Layout, other: Layout, mesh: DeviceMesh) -> Outcome:
    """What is wrong with a call where `p` and `q` have these layouts."""
    source = torch.Generator().manual_seed(7)
    whole_p, whole_q = torch.randn(8, 3, generator=source), torch.randn(8, 3, generator=source)
    p, q = cut(whole_p, layout, mesh), cut(whole_q, other, mesh, "q")

    def whole(value: Tensor) -> DTensor:
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    under_tp = any(isinstance(each, Shard) for each in p.placements[:-1])
    if call in REFUSED or (call in FLATTENED and under_tp):
        return _refused(call, p, q, whole_p, whole)
    names = {"torch": torch, "nn": nn, "F": F, "copy": copy}
    given, wanted = dict(names, p=p, q=q, whole=whole), dict(names, p=whole_p, q=whole_q, whole=lambda value: value)
    try:
        torch.manual_seed(5)
        found = eval(call, given)
        found = _gathered(found if call in READS else p)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    torch.manual_seed(5)
    right = eval(call, wanted)
    right = right if call in READS else whole_p
    return "" if _same(found, right) else f"{found} instead of {right}"


def _refused(call: str, p: Tensor, q: Tensor, before: Tensor, whole: Any) -> Outcome:
    messages: list[str | None] = [None] * dist.get_world_size()
    message = "not refused"
    try:
        exec(call, {"torch": torch, "nn": nn, "p": p, "q": q, "whole": whole})
    except (NotImplementedError, RuntimeError) as error:
        message = str(error)
    dist.all_gather_object(messages, message)
    if len(set(messages)) > 1:
        return f"ranks differ: {messages}"
    if "full_tensor()" not in message and "mixed torch.Tensor and DTensor" not in message:
        return f"no fix in: {message}"
    return "" if torch.equal(_gathered(p), before) else "an edit came through"


def _gathered(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_gathered(each) for each in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def _same(found: Any, right: Any) -> bool:
    if isinstance(right, list | tuple):
        return len(found) == len(right) and all(map(_same, found, right))
    if isinstance(right, Tensor):
        if not isinstance(found, Tensor) or found.shape != right.shape or found.dtype != right.dtype:
            return False
        close = 1e-2 if right.dtype.itemsize < 4 and right.dtype.is_floating_point else 1e-5
        return torch.allclose(found.double(), right.double(), rtol=close, atol=1e-6, equal_nan=True)
    return bool(found == right) if not isinstance(right, float) else found == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_call_is_right_or_refused(layout: str) -> None:
    wrong = {call: outcome for call, outcome in outcomes(layout).items() if outcome}
    assert not wrong, "\n".join(f"{call}: {outcome}" for call, outcome in wrong.items())


def with_mistake(rank: int, names: list[str]) -> dict[str, Outcome]:
    """On one rank: what is wrong with a mutant's call while its mistake is in place."""
    found = {}
    for name in names:
        slip, layout, call = MUTANTS[name]
        made = slip.made()
        with pytest.MonkeyPatch.context() as patch:
            for owner in (slip.owner, operations, reductions):
                if owner is slip.owner or hasattr(owner, slip.name):
                    patch.setattr(owner, slip.name, made)
            operations._rule_of.cache_clear()
            for key in [key for key, rule in operations.SPECIAL.items() if rule.__name__ == slip.name]:
                patch.setitem(operations.SPECIAL, key, made)
            found[name] = try_all(rank, layout, [call])[call]
    return found


@once
def mistakes(ranks: int) -> dict[str, Outcome]:
    names = [name for name, (_, layout, _) in MUTANTS.items() if _ranks(LAYOUTS[layout]) == ranks]
    return _merged(run_ranks(with_mistake, ranks, names))


@pytest.mark.parametrize("name", each(AREA, [(name, slip.breaks) for name, (slip, _, _) in MUTANTS.items()]))
def test_a_mistake_is_found(name: str) -> None:
    _, layout, call = MUTANTS[name]
    assert not outcomes(layout)[call]
    assert mistakes(_ranks(LAYOUTS[layout]))[name]


def placed(rank: int) -> list[str]:
    """Placements equal themselves alone, and torch makes no DTensor that its own rules would misread."""
    mesh, told = mesh_of(HALVES), []
    parameter = cut(torch.arange(24.0).view(8, 3), HALVES, mesh)
    ragged = parameter.placements[0]
    other = cut(torch.arange(24.0).view(8, 3), LAYOUTS["uneven"], mesh).placements[0]
    told += ["is not itself"] if ragged != copy.deepcopy(ragged) else []
    told += ["equals another cut"] if other == ragged else []
    told += ["equals Shard(0)"] if ragged == Shard(0) or Shard(0) == ragged else []
    shape, stride = parameter.shape, parameter.stride()
    for make in (
        lambda: DTensor.from_local(parameter.to_local(), mesh, [ragged], shape=shape, stride=stride),
        lambda: distribute_tensor(torch.ones(8, 3), mesh).redistribute(mesh, [ragged]),
    ):
        with contextlib.suppress(AssertionError, RuntimeError):
            told.append(f"torch made {make()}")
    again = distribute_rows(torch.arange(24.0).view(8, 3), like=parameter)
    return told + ([] if torch.equal(again, parameter) else ["distribute_rows"])


def test_placements_are_never_mistaken() -> None:
    assert run_ranks(placed, 2) == [[], []]
