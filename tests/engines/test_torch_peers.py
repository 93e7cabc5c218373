"""Torch's own engines against one process in fp64, and what each of them really does: dtypes, traffic, memory.

A case's spawn is shared by all tests of its world size. In fp64 a correct engine differs from `single` by a few hundred
roundings of sums in another order, 1e-13 at most here; a wrong scale of 2^-10 is ten billion times that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.engines.base.sharded import units_of
from tests.engines.peers import PEERS, SHARDED, Awkward, AwkwardWorkload, Case, Record, outers, run_cases
from tests.support.covering import once
from tests.support.spawn import run_ranks

WORLDS = (1, 2, 3, 4)
CLIP = {False: 0.5, True: 0.05}
"""Below the norms that occur on the decoder, and on the awkward model."""
EXACT = 1e-13
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-9, "bf16_comm": 2.0**-9, "fp16_comm": 2.0**-12}
SLACK, FLOOR_ROUNDINGS = 4.0, 8.0


def flat_cases(world_size: int) -> list[Case]:
    """Each peer meets SGD and AdamW, clipped and not, and the awkward model with both."""
    found = []
    for place, peer in enumerate(PEERS):
        k = 1 + (place + world_size) % 3 if world_size < 3 else 1 + place % 2
        found.append(Case(*peer, world_size, k, "adamw", CLIP[False]))
        found.append(Case(*peer, world_size, 1, "adamw", CLIP[True], awkward=True))
        found.append(Case(*peer, world_size, 2, "sgd", None, awkward=True))
    return found


def product_cases(world_size: int) -> list[Case]:
    """What `make test-all` adds: every k with both optimizers, each of them clipped and not."""
    found = []
    for place, peer in enumerate(PEERS):
        for k in (1, 2, 3) if world_size < 3 else (1, 5 - world_size):
            sgd, adamw = (None, CLIP[False]) if (place + k) % 2 else (CLIP[False], None)
            found += [Case(*peer, world_size, k, "sgd", sgd), Case(*peer, world_size, k, "adamw", adamw)]
    return found


def hybrid_cases(world_size: int, outer: int) -> list[Case]:
    """Those of the outer axis, on both models."""
    found = []
    for peer in SHARDED if outer in outers(world_size) else ():
        found += [Case(*peer, world_size, k, "adamw", CLIP[False], outer=outer) for k in (1, 2)]
        found.append(Case(*peer, world_size, 2, "sgd", CLIP[True], outer=outer, awkward=True))
    return found


def exact_cases(world_size: int) -> list[Case]:
    """What `make test` holds against fp64."""
    return flat_cases(world_size) + hybrid_cases(world_size, 2)


def rough_cases(world_size: int) -> list[Case]:
    """All policies where sums over ranks round several times; the hardest one on one rank and on two."""
    dtypes = {1: ("bf16_comm",), 2: ("bf16_comm",), 4: tuple(UNIT)}.get(world_size, ())
    return [Case(*peer, world_size, 2, "adamw", CLIP[False], dtype, steps=2) for peer in PEERS for dtype in dtypes]


def rough_group(dtype: str) -> Callable[[int], list[Case]]:
    """Those of one policy: a visit of its own, as `make test` asks for traffic in one of them."""
    return lambda world_size: [case for case in rough_cases(world_size) if case.dtype == dtype]


GROUPS: dict[str, Callable[[int], list[Case]]] = {
    "flat": flat_cases,
    "hybrid": lambda world_size: hybrid_cases(world_size, 2),
    **{f"rough {dtype}": rough_group(dtype) for dtype in UNIT},
    "product": lambda world_size: product_cases(world_size) + hybrid_cases(world_size, 4),
}


@once
def _of_group(name: str, world_size: int) -> dict[Case, list[Record]]:
    """One group's cases of one world size, in one process group: records of all ranks."""
    cases = GROUPS[name](world_size)
    by_rank = run_ranks(run_cases, world_size, cases)
    return dict(zip(cases, zip(*by_rank, strict=True), strict=True))  # type: ignore[arg-type]


def records(case: Case) -> list[Record]:
    """Of all ranks; the first of a group runs the group."""
    name = next(name for name, cases in GROUPS.items() if case in cases(case.world_size))
    return _of_group(name, case.world_size)[case]


@once
def reference(case: Case) -> Record:
    return run_ranks(run_cases, 1, [case])[0][0]


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of `a` to the fp64 value `b`; absolute where that is zero."""
    return ((a.double() - b).norm() / (b.norm() if b.norm() > 0 else 1.0)).item()


def check(record: Record, slack: float = 1.0) -> None:
    """Hold gradients, updates and norms of an fp64 run against `single`."""
    right = reference(record.case.reference())
    assert list(record.weights[0]) == list(right.weights[0]), "the model's own names, in its order"
    assert list(record.gradients) == list(right.gradients), "trained ones, those unused included"
    for name, gradient in right.gradients.items():
        assert record.gradients[name].dtype == gradient.dtype
        assert distance(record.gradients[name], gradient) <= EXACT * slack, f"gradient of {name} at step 1"
    for step, weights in right.weights.items():
        for name, weight in weights.items():
            if step == 0:
                assert torch.equal(record.weights[0][name], weight), f"initial value of {name}"
                continue
            moved = weight - right.weights[0][name]
            # an update is a small difference of weights that are themselves rounded
            rounding = (weight.norm() / moved.norm()).item() * 2.0**-52 if moved.norm() > 0 else 0.0
            ours = record.weights[step][name] - record.weights[0][name]
            assert distance(ours, moved) <= 10 * EXACT * slack + rounding, f"update of {name} after step {step}"
    assert record.norms == pytest.approx(right.norms, rel=EXACT), "gradient norms"
    assert record.weight_norms == pytest.approx(right.weight_norms, rel=EXACT), "weight norms"


def by_peer(cases: list[Case], peer: tuple[str, str]) -> list[Case]:
    return [case for case in cases if (case.engine, case.strategy) == peer]


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("peer", PEERS, ids="-".join)
def test_training_equals_one_process_in_fp64(peer: tuple[str, str], world_size: int) -> None:
    """SGD with momentum and AdamW over two groups; clipped and not; groups of one rank; both models."""
    hold(by_peer(flat_cases(world_size), peer))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("peer", SHARDED, ids="-".join)
def test_replicas_of_shards_train_as_one_process_in_fp64(peer: tuple[str, str], world_size: int) -> None:
    hold(by_peer(hybrid_cases(world_size, 2), peer))


@pytest.mark.full
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("peer", PEERS, ids="-".join)
def test_every_product_trains_as_one_process_in_fp64(peer: tuple[str, str], world_size: int) -> None:
    """k = 1, 2, 3 with both optimizers, each clipped and not; groups of one inside four replicas."""
    hold(by_peer(GROUPS["product"](world_size), peer))


def hold(cases: list[Case]) -> None:
    assert len(cases) >= 3
    for case in cases:
        of_ranks = records(case)
        check(of_ranks[0])
        assert all(record.norms == of_ranks[0].norms for record in of_ranks), "ranks agree on the norm"
        if case.clip is not None:
            assert min(of_ranks[0].norms) > case.clip, f"clipping must act, or {case} tests nothing"
        if case.world_size > 1:
            assert of_ranks[0].losses != of_ranks[1].losses, "ranks see distinct data"


def test_the_awkward_model_is_awkward() -> None:
    """What the cases above rely on: microbatches, not all of them, leave a parameter without a gradient; ties hold."""
    case = Case(*PEERS[0], 4, 1, awkward=True)
    uses = [bool(batch.tokens[0, 0] % 2) for rank in range(4) for batch in case.batches(rank, 1)]
    assert len(set(uses)) == 2, "at step 1 some ranks use `at_times` and others do not"
    right = reference(replace(case, k=1).reference())
    assert right.gradients["once.at_times"].norm() > 0
    assert right.gradients["unused"].norm() == right.gradients["never.up"].norm() == 0
    assert "head.weight" not in right.weights[0]
    assert "once.frozen" not in right.gradients
    assert not torch.equal(right.weights[1]["never.up"], right.weights[0]["never.up"]), "zero gradients still decay"


def test_what_is_tied_beyond_a_unit_is_left_to_the_root() -> None:
    model = Awkward("meta", torch.float32)
    units = units_of(model, AwkwardWorkload.unit_classes)
    assert units == [model.never, model.once, model.twice], "neither embedding nor head; innermost and last first"


@pytest.mark.parametrize("peer", PEERS, ids="-".join)
def test_a_wrong_scale_is_noticed(peer: tuple[str, str]) -> None:
    """One part in 1024, inside the engine, under SGD and under AdamW, which hides a scale from the update."""
    for optimizer in ("sgd", "adamw"):
        case = Case(*peer, 1, 1, optimizer, None, scale=1 + 2.0**-10)
        with pytest.raises(AssertionError, match="gradient of"):
            check(reference(case))
    with pytest.raises(AssertionError, match="gradient of"):
        check(reference(case), slack=1e9)  # by a wide margin


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("peer", PEERS, ids="-".join)
def test_low_precision_is_as_far_from_fp64_as_single_is(peer: tuple[str, str], world_size: int) -> None:
    """`single` in the same compute dtype makes every rounding but those of the wire and of the order of sums."""
    for case in (case for case in rough_cases(world_size) if (case.engine, case.strategy) == peer):
        record, unit = records(case)[0], UNIT[case.dtype]
        exact = reference(case.reference())
        rough = reference(case.reference("bf16" if case.dtype.startswith("bf16") else "fp32"))
        for name, gradient in exact.gradients.items():
            assert record.gradients[name].dtype is torch.float32, "main gradients"
            bound = SLACK * max(distance(rough.gradients[name], gradient), FLOOR_ROUNDINGS * unit)
            assert distance(record.gradients[name], gradient) <= bound, f"{case}: gradient of {name}"
        for norm, right in zip(record.norms, exact.norms, strict=True):
            assert abs(norm / right - 1) <= SLACK * FLOOR_ROUNDINGS * unit


# What goes over the wire on four ranks: whole bytes of whole buffers, by kind, in the second step.

NUMEL = 13 * 24 + 2 * (2 * 24 + 2 * 24 * 24 + 2 * 12 * 24 + 3 * 20 * 24) + 24 + 13 * 24
"""Weights of the decoder. Its sizes are multiples of FSDP1's alignment and of four ranks: nothing is padded there."""


def traffic(case: Case) -> dict[str, dict[str, int]]:
    return records(case)[0].traffic[1]


def padded_rows(case: Case) -> int:
    """Elements of all weights when every weight's rows are dealt evenly, as FSDP2 pads them."""
    inner = case.world_size // case.outer
    right = reference(case.reference()).weights[0].values()
    return sum(-(-weight.shape[0] // inner) * inner * weight[0].numel() for weight in right)


POLICIES = [pytest.param(dtype, marks=() if dtype == "bf16_comm" else pytest.mark.full) for dtype in UNIT]
"""For bytes: `make test` takes the policy in which both weights and gradients travel in less than they are kept in."""


def widths(dtype: str) -> tuple[int, int]:
    """Bytes of an element of the weights that are gathered, and of the gradients on the wire."""
    return 2 if dtype.startswith("bf16") else 4, 2 if dtype.endswith("comm") else 4


@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_weights_travel_in_the_compute_dtype_and_gradients_in_the_wires(engine: str, dtype: str) -> None:
    """Four units, two microbatches. FSDP2 keeps weights over the microbatches of `optim_grads`, FSDP1 does not."""
    compute, wire = widths(dtype)
    for strategy, gathers in (("optim_grads", 1 if engine == "fsdp2" else 2), ("optim_grads_params", 4)):
        case = Case(engine, strategy, 4, 2, "adamw", CLIP[False], dtype, steps=2)
        once = (padded_rows(case) if engine == "fsdp2" else NUMEL) * 3 // 4
        assert traffic(case) == {
            "all_gather": {"count": 4 * gathers, "bytes": once * compute * gathers},
            "reduce_scatter": {"count": 4 * 2, "bytes": once * wire * 2},
            "all_reduce": {"count": 1, "bytes": 12},  # the norm: 8 bytes
        }


@pytest.mark.parametrize("dtype", POLICIES)
def test_replicas_reduce_once_a_step_in_the_wire_dtype(dtype: str) -> None:
    _, wire = widths(dtype)
    reduced = 2 * NUMEL * 3 // 4 * wire
    whole, plain, sharded = (
        Case(*peer, 4, 2, "adamw", CLIP[False], dtype, steps=2)
        for peer in (("fsdp1", "no_shard"), ("ddp", "no_shard"), ("ddp", "optim"))
    )
    assert traffic(whole) == {"all_reduce": {"count": 4, "bytes": reduced}}
    assert traffic(plain)["all_reduce"] == traffic(sharded)["all_reduce"] == {"count": 1, "bytes": reduced}
    # beyond what plain DDP sends in its second step, where it lays out its buckets anew, every rank sends its partition
    before = [record.traffic[1].get("broadcast", {"bytes": 0})["bytes"] for record in records(plain)]
    after = [record.traffic[1]["broadcast"]["bytes"] for record in records(sharded)]
    assert sum(after) - sum(before) == NUMEL * 4 * 3
    assert all(b > a for a, b in zip(before, after, strict=True)), "no rank is without weights to step"


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("outer", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("peer", SHARDED, ids="-".join)
def test_hybrids_reduce_outside_in_replicas(peer: tuple[str, str], outer: int, k: int) -> None:
    """FSDP2 once a step, FSDP1 every microbatch; both move shards only."""
    case = Case(*peer, 4, k, "adamw", CLIP[False], outer=outer)
    inner, elements = 4 // outer, padded_rows(case) if peer[0] == "fsdp2" else NUMEL
    times = k if peer[0] == "fsdp1" else 1
    outside = 2 * (elements // inner) * 8 * (outer - 1) // outer * times
    if inner == 1:  # nothing is split
        assert traffic(case) == {"all_reduce": {"count": 4 * times, "bytes": outside}}
        return
    assert traffic(case)["all_reduce"] == {"count": 4 * times + 1, "bytes": outside + 8}
    assert traffic(case)["reduce_scatter"] == {"count": 4 * k, "bytes": elements * 8 // inner * k}


# What stays on a rank between steps.


@pytest.mark.parametrize("awkward", [False, True], ids=["decoder", "awkward"])
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("peer", PEERS, ids="-".join)
def test_kept_bytes_add_up_over_ranks(peer: tuple[str, str], world_size: int, awkward: bool) -> None:
    case = next(
        each
        for each in exact_cases(world_size)
        if (each.engine, each.strategy, each.awkward, each.optimizer, each.outer) == (*peer, awkward, "adamw", 1)
    )
    of_ranks = [record.bytes for record in records(case)]
    right = reference(case.reference())
    weights = 8 * sum(weight.numel() for weight in right.weights[0].values())
    trained = 8 * sum(gradient.numel() for gradient in right.gradients.values())
    copies = world_size if peer[1] == "no_shard" else 1
    states = world_size if peer[1] == "no_shard" or peer[0] != "ddp" else 1  # a step count each rank keeps, or one
    counts = 4 * len(right.gradients) * states
    whole = world_size if peer[0] == "ddp" else copies
    assert sum(each["main_weights"] for each in of_ranks) == weights * whole
    assert sum(each["main_grads"] for each in of_ranks) == trained * whole
    assert sum(each["optimizer"] for each in of_ranks) == 2 * trained * copies + counts
    assert all(each["compute_weights"] == 0 for each in of_ranks)
    assert all(each["buffers"] == right.bytes["buffers"] for each in of_ranks)
    assert all(each["padding"] >= 0 for each in of_ranks)
    if peer[1] == "no_shard" and peer[0] == "ddp":
        assert of_ranks == [right.bytes] * world_size


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_fsdp2_pads_rows_to_those_of_the_first_rank(world_size: int) -> None:
    case = next(case for case in exact_cases(world_size) if case.engine == "fsdp2" and case.outer == 1)
    total = sum(record.bytes["main_weights"] for record in records(case))
    padding = sum(record.bytes["padding"] for record in records(case))
    assert padding == 2 * (padded_rows(case) * 8 - total)
    assert world_size == 2 or padding > 0, "13 rows are not a multiple of 3 or 4, and 13 of 2"
