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

from harness.fsdp.ragged import distribute_rows, operations
from tests.fsdp.ragged.calls import EDITS, HALVES, LAYOUTS, READS, REFUSED, Layout, cut, mesh_of
from tests.support.covering import once
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

AREA = "ragged tensors"
Outcome = str
"""Empty where right."""


def test_calls_are_many_and_refusals_few() -> None:
    assert len({*READS, *EDITS}) >= 150
    assert len(set(REFUSED)) <= 14


@once
def outcomes(layout: str) -> dict[str, Outcome]:
    """Each call's outcome in one layout; `q` has the same cut, then another."""
    return _merged(run_ranks(try_all, _ranks(LAYOUTS[layout]), layout, [*READS, *EDITS, *REFUSED]))


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

    if call in REFUSED:
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


# -- mistakes ----------------------------------------------------------------------------------------------------------

MUTANTS = {
    name: (slip, *where.split(": ", 1))
    for name, (slip, where) in slips(
        r"""
    other cuts: Rows meet rows of another cut
        fsdp.ragged.operations._same_cut: mine.placements != theirs.placements or  =>
        halves: p + q
    own numbers: Every rank draws the first rows' random numbers
        fsdp.ragged.operations._random: like.rows_of(_first_ranks(drawn, mesh)) => drawn[: len(like._local_tensor)]
        uneven: p.normal_()
    rows in rank order: Rows are put together in the order of ranks
        fsdp.ragged.tensor.RaggedShard.gather: sorted(zip(self.spans, found, strict=True), key=lambda each: each[0])
            => zip(self.spans, found, strict=True)
        turned: p.cumsum(1)
    rows alone: A norm over rows is one of all elements
        fsdp.ragged.operations._norm: < like.dim() => < 0
        uneven: p.norm(dim=0)
    copies of whole: All ranks take the first rows
        fsdp.ragged.tensor.RaggedTensor.rows_of: offsets[dim] if sizes[dim] else 0 => 0
        uneven: p.copy_(torch.arange(24.0).view(8, 3))
    edits of views: Edits of a copy are lost
        fsdp.ragged.operations._view_of_whole: GatheredView.of(found, name) => found
        uneven: p[0].zero_()
    plain tensors: A rank's plain tensor is taken for all ranks'
        fsdp.ragged.operations._whole: value.numel() > 1 => False
        uneven: torch.ones(8, 3) + p
    short rows: Fewer rows than the longest cut's are lost in a gather
        fsdp.ragged.tensor.RaggedShard.gather: cat([local, => cat([local * (len(local) == most),
        uneven: p.cumsum(1)
    long rows: What fills up a gather is taken for rows
        fsdp.ragged.tensor.RaggedShard.gather: rows[: end - begin] => rows
        uneven: p.cumsum(1)
    all cuts are equal: Cuts of other rows are equal
        fsdp.ragged.tensor.RaggedShard.__eq__: and self.spans == other.spans =>
        uneven: p + q
    spans of rank 0: Every rank takes the first one's rows of a whole tensor
        fsdp.ragged.tensor.RaggedTensor.place: each.spans[here[axis]] => each.spans[0]
        uneven: p.copy_(torch.arange(24.0).view(8, 3))
    whole meets rows: A whole tensor meets the rows of a rank
        fsdp.ragged.operations._local: return like.rows_of(value if => return (value if
        uneven: p.copy_(torch.arange(24.0).view(8, 3))
    lists row by row: Lists of tensors that are cut otherwise meet row by row
        fsdp.ragged.operations._foreach: _local(each, first) if isinstance(each, DTensor) else
            => local_tensor(each) if isinstance(each, DTensor) else
        uneven: torch._foreach_add([p, q], [q, p], alpha=2.0)
    lists stay plain: What is made of a list of tensors is this rank's rows
        fsdp.ragged.operations._foreach: wrap_rows(each, first) if isinstance(first, RaggedTensor) else each => each
        uneven: torch._foreach_mul([p, q], 2.0)
    views of rows: A view of another shape has the rows' cut
        fsdp.ragged.operations._view: len(size) != like.dim() => False
        uneven: p.view(-1)
    norms added: Norms of rows are added
        fsdp.ragged.operations._norms_of: else norm(parts, order, dim=0) => else parts.sum(0)
        uneven: p.norm()
    a norm of nothing: A rank without rows has a norm
        fsdp.ragged.operations._norms_of: math.inf if order < 0 else 0 => math.inf if order < 0 else 1
        first: p.norm()
    least norm of nothing: A rank without rows has the least norm
        fsdp.ragged.operations._norms_of: math.inf if order < 0 else 0 => 0
        first: p.norm(-float("inf"))
    kept dimensions: keepdim is forgotten
        fsdp.ragged.operations._norm: if keepdim => if False
        uneven: p.norm(dim=(0, 1), keepdim=True)
    first rank's norm: The first rank's norm is taken for all
        fsdp.ragged.operations._norms_of: else norm(parts, order, dim=0) => else parts[0]
        uneven: p.norm()
    last rank's order: Norms of a list are one tensor's
        fsdp.ragged.operations._norms_of: found[place] = value\n    return => found[where[0]] = value\n    return
        uneven: torch._foreach_norm([p, q])
    copies edited: Edits of a view of a copy are lost
        fsdp.ragged.tensor.GatheredView.__torch_dispatch__: schema_of(func).is_mutable and => False and
        uneven: p.t().mul_(2)
    out elsewhere: out= is left as it was
        fsdp.ragged.operations._into: func(*local, **{**kwargs, "out": local_tensor(out)}) => pass
        uneven: torch.add(p, q, out=p)
    drawn rows alone: Each rank draws as many numbers as it has rows, and generators part
        fsdp.ragged.operations._random: drawn = func(local_tensor(like).new_empty(like.shape),
            => drawn = func(local_tensor(like).new_empty(local_tensor(like).shape),
        uneven: p.normal_()
    replicas added: Replicas are summed
        fsdp.ragged.operations._norms_of: in enumerate(cuts) if is_cut) => in enumerate(cuts))
        hsdp: p.norm()
    several results: Of several results each is this rank's rows
        fsdp.ragged.tensor.wrap_rows: type(result)(wrap_rows(each, like) for each in result) => result
        uneven: tuple(torch.frexp(p))
    numbers of lists: A number that all ranks have stays a DTensor in a list's operation
        fsdp.ragged.operations._foreach: return _whole(value) if isinstance(value, Tensor) else value => return value
        uneven: torch._foreach_div_([p], q.norm())
    plain rows: What is computed row by row is plain
        fsdp.ragged.tensor.wrap_rows: return RaggedTensor.of(result, spec)\n    tail => return result\n    tail
        uneven: p * 2
    zero norms: Norms of order 0 are not added
        fsdp.ragged.operations._norms_of: if order == 0 else => if order == 1 else
        uneven: p.norm(0)
    edits of torch's: torch's DTensors in a list that meet rows are copies
        fsdp.ragged.operations._foreach: held = DTensor if in_place else RaggedTensor => held = RaggedTensor
        uneven: (lambda own: (torch._foreach_lerp_([own], [p], 0.5), p.copy_(own)))(whole(torch.ones(8, 3)))
    collectives of whole: A collective of the program's own gets a copy
        fsdp.ragged.operations._rule_of: if "c10d" in func.namespace: => if False:
        uneven: torch.distributed.all_reduce(p)
    a TP shard for the whole: A TP shard of the tensor-parallel axis is taken for the whole
        fsdp.ragged.tensor.RaggedTensor.whole: not any(isinstance(placement, Shard) for placement in
            => True or not any(isinstance(placement, Shard) for placement in
        tp_rows: p.cumsum(1)
    """
    ).items()
}
"""Each with a layout and a call that finds it."""


def with_mistake(rank: int, names: list[str]) -> dict[str, Outcome]:
    """On one rank: what is wrong with a mutant's call while its mistake is in place."""
    found = {}
    for name in names:
        slip, layout, call = MUTANTS[name]
        made = slip.made()
        with pytest.MonkeyPatch.context() as patch:
            for owner in (slip.owner, operations):
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
