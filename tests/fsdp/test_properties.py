"""Random models, trained by the engine in random ways, against plain torch in fp64; under numerics=exact, to the bit.

Bounds come from the dtypes alone. Of the first gradient: with the same weights, the engine and plain torch have the
same bits in every microbatch, so they differ by the roundings of sums and of the wire, a few units of the sum of
absolute values, element by element. Later: as far from fp64 as plain torch in the same dtypes is, times `SLACK`, with
the floor of `tests.fsdp.test_oracle`.

FSDP_PROPERTIES=400 runs more programs than CI does; FSDP_PROPERTIES=17:18 runs number 17 alone.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.fsdp import Dtypes, fully_shard
from tests.fsdp.pairs import mesh_of as grid
from tests.fsdp.random_programs import (
    MESHES,
    POLICIES,
    STEPS,
    Cell,
    Program,
    Record,
    build,
    draw,
    loss_of,
    make_optimizer,
    sum_integers,
    sum_wide,
    train_plain,
)
from tests.fsdp.test_oracle import FLOOR_ROUNDINGS, SLACK
from tests.support.covering import once
from tests.support.spawn import run_ranks

IN_CI = 56
ASKED = os.environ.get("FSDP_PROPERTIES", str(IN_CI))
INDICES = range(*map(int, ASKED.split(":"))) if ":" in ASKED else range(int(ASKED))
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
SMALLEST = {torch.float64: 0.0, torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


# -- the engine --------------------------------------------------------------------------------------------------------


def mesh_of(program: Program) -> dict[str, Any]:
    if not program.has_outer:
        return {}
    mesh = grid(program.outer, program.world // program.outer)
    return {"device_mesh": mesh, "dp_shard_dim": "dp", "dp_outer_dim": "outer"}


def scaling_of(program: Program) -> dict[str, Any]:
    return {
        "loop": {},
        "engine": {"grad_divisor": program.divisor},
        "tokens": {"calculate_per_token_loss": True},
    }[program.scaling]


def train(rank: int, program: Program) -> Record:
    """A program on one rank; losses are this rank's."""
    module = build(program)
    optimizer = make_optimizer(program.optimizer, dict(module.named_parameters()))
    model, optimizer = fully_shard(
        module,
        optimizer,
        fsdp_unit_modules=[Cell],
        zero_dp_strategy=program.strategy,
        outer_dp_sharding_strategy=program.outer_strategy,
        mixed_precision_policy=POLICIES[program.dtype].policy,
        **mesh_of(program),
        **scaling_of(program),
        **program.options,
    )
    record = Record()
    for step in range(STEPS):
        record.losses.append([])
        for index in range(program.k):
            model.set_model_auto_sync(index == program.k - 1)
            loss = loss_of(model, program, step, rank * program.k + index)
            record.losses[-1].append(loss.item())
            (loss * program.loss_scale).backward()
        record.gradients.append(dict(model.full_gradients()))
        norm = model.grad_norm() if program.clip is None else model.clip_grad_norm_(program.clip)
        record.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        record.weights.append(dict(model.full_weights()))
    with torch.no_grad():
        record.last = loss_of(model, program, STEPS, 0).item()
    assert program.model.tied == (module.exit.weight is module.entry.weight)
    model.close()
    return record


def train_all(rank: int, programs: list[Program]) -> list[Record]:
    return [train(rank, program) for program in programs]


@once
def trained_together(place: int) -> dict[int, list[Record]] | None:
    """Number -> record by rank, of all programs of one mesh in one process group; None where one of them failed."""
    programs = [draw(index) for index in INDICES if index % len(MESHES) == place]
    try:
        per_rank = run_ranks(train_all, programs[0].world, programs)
    except Exception:
        return None  # each alone will tell which
    return {program.index: [ran[i] for ran in per_rank] for i, program in enumerate(programs)}


def trained(program: Program) -> list[Record]:
    together = trained_together(program.index % len(MESHES))
    return run_ranks(train, program.world, program) if together is None else together[program.index]


# -- bounds ------------------------------------------------------------------------------------------------------------


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


def first_gradient(program: Program, ours: Record, peer: Record) -> str:
    """Element by element; nothing where all are within the roundings of their sum."""
    policy = POLICIES[program.dtype]
    for name, right in peer.gradients[0].items():
        dtypes = policy.policy.resolve(named_dtypes(program)[name])
        bound = peer.sizes[name] * sum_roundings(program, dtypes) + 4 * SMALLEST[dtypes.wire] * program.num_microbatches
        beyond = (ours.gradients[0][name].double() - right.double()).abs() > bound
        if beyond.any():
            return f"{int(beyond.sum())} of {beyond.numel()} elements of the first gradient of {name}"
    return ""


def sum_roundings(program: Program, dtypes: Dtypes) -> float:
    """Relative to the sum of absolute values: one rounding an addition and a scaling, three on the wire at most.

    The wire rounds when a gradient is sent along an axis, of which there are two; what arrives is summed as it is.
    """
    additions = program.num_microbatches + 4
    wire = 3 * UNIT[dtypes.wire] if dtypes.wire != dtypes.grads else 0.0
    return additions * max(UNIT[dtypes.accum], UNIT[dtypes.grads]) * 1.01 + wire * 1.01


@cache
def named_dtypes_of(index: int) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in build(draw(index)).named_parameters()}


def named_dtypes(program: Program) -> dict[str, torch.dtype]:
    return named_dtypes_of(program.index)


def against_fp64(program: Program, ours: Record, peer: Record, right: Record) -> str:
    """Gradients, norms and what weights have moved by, at every step; what is beyond its bound first, or nothing."""
    policy = POLICIES[program.dtype]
    unit = max(UNIT[d] for d in (policy.compute, policy.other, policy.wire, policy.grads))
    start = {name: param.detach().double() for name, param in build(program).named_parameters()}
    for step in range(STEPS):
        if ours.weights[step].keys() != start.keys():
            return "names of weights"
        moved = [{n: w.double() - start[n] for n, w in each.weights[step].items()} for each in (ours, peer, right)]
        rounding = {
            n: UNIT[policy.main] * (step + 1) * float(w.double().norm()) for n, w in right.weights[step].items()
        }
        gradients = [each.gradients[step] for each in (ours, peer, right)]
        if name := beyond(*gradients, FLOOR_ROUNDINGS * unit, dict.fromkeys(gradients[2], 0.0)):
            return f"gradient of {name} at step {step + 1}"
        if name := beyond(*moved, FLOOR_ROUNDINGS * unit, rounding):
            return f"update of {name} until step {step + 1}"
        bound = SLACK * max(abs(peer.norms[step] / right.norms[step] - 1), FLOOR_ROUNDINGS * unit * (step + 1))
        if abs(ours.norms[step] / right.norms[step] - 1) > bound:
            return f"norm at step {step + 1}: {ours.norms[step]}, not {right.norms[step]}"
    return ""


def beyond(
    ours: dict[str, Tensor], peer: dict[str, Tensor], right: dict[str, Tensor], floor: float, more: dict[str, float]
) -> str:
    """A tensor that is further from `right` than `SLACK` times as far as the peer's, or nothing.

    Of a tensor of few elements the peer may hit the right value by luck: no tensor has to be closer than the model's
    elements are to theirs on average, nor than a few roundings.
    """
    share = {name: (each.numel() / sum(e.numel() for e in right.values())) ** 0.5 for name, each in right.items()}
    whole = sum(distance(peer[n], right[n]) ** 2 for n in right) ** 0.5
    size = sum(float(each.double().norm()) ** 2 for each in right.values()) ** 0.5
    for name, value in right.items():
        least = floor * max(float(value.double().norm()), size * share[name])
        bound = max(distance(peer[name], value), whole * share[name], least, more[name])
        if distance(ours[name], value) > SLACK * bound:
            return name
    return ""


def to_the_bit(program: Program, ours: list[Record], right: Record) -> str:
    """What differs first from the integer reference, or nothing."""
    first = ours[0]
    for step in range(STEPS):
        if [loss for rank in ours for loss in rank.losses[step]] != right.losses[step]:
            return f"losses at step {step + 1}"
        for what in ("gradients", "weights"):
            for name, value in getattr(right, what)[step].items():
                if not torch.equal(getattr(first, what)[step][name], value):
                    return f"{what} of {name} at step {step + 1}"
        if first.norms[step] != right.norms[step]:
            return f"norm at step {step + 1}: {first.norms[step]!r}, not {right.norms[step]!r}"
    return "" if first.last == right.last else "the loss after the last step"


def alike(ours: list[Record]) -> str:
    """Whether all ranks say the same."""
    first = ours[0]
    for rank, other in enumerate(ours):
        if (other.norms, other.last) != (first.norms, first.last):
            return f"norms or the last loss on rank {rank}"
        if any(not torch.equal(other.weights[-1][name], value) for name, value in first.weights[-1].items()):
            return f"weights on rank {rank}"
    return ""


def peer_of(program: Program, right: Record) -> Record:
    """How far from fp64 a correct engine is: plain torch in the dtypes of the program.

    Where these are fp64 themselves it is a run in fp32, its errors scaled down to the roundings of fp64.
    """
    if program.dtype != "fp64":
        return train_plain(program, sum_wide)
    narrow, scale = train_plain(replace(program, dtype="fp32"), sum_wide), UNIT[torch.float64] / UNIT[torch.float32]

    def closer(steps: list[dict[str, Tensor]], to: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [{n: v + (a[n].double() - v) * scale for n, v in b.items()} for a, b in zip(steps, to, strict=True)]

    return replace(
        right,
        gradients=closer(narrow.gradients, right.gradients),
        weights=closer(narrow.weights, right.weights),
        norms=[b + (a - b) * scale for a, b in zip(narrow.norms, right.norms, strict=True)],
    )


def wrong(program: Program, ours: list[Record]) -> str:
    """What is wrong with a training, or nothing."""
    if different := alike(ours):
        return different
    if program.is_exact:
        return to_the_bit(program, ours, train_plain(program, sum_integers))
    right = train_plain(program, sum_wide, wide=True)
    peer = peer_of(program, right)
    same_dtypes = right if program.dtype == "fp64" else peer
    return first_gradient(program, ours[0], same_dtypes) or against_fp64(program, ours[0], peer, right)


def how_to_repeat(program: Program) -> str:
    numbers = f"{program.index}:{program.index + 1}"
    return f"FSDP_PROPERTIES={numbers} python -m pytest tests/fsdp/test_properties.py -k programs  # {program}"


@pytest.mark.parametrize("index", INDICES)
def test_random_programs_train_as_plain_torch_does(index: int) -> None:
    program = draw(index)
    try:
        found = wrong(program, trained(program))
    except Exception as error:
        found = f"{type(error).__name__}: {str(error)[-1500:]}"
    assert not found, f"{found}\nrepeat: {how_to_repeat(program)}"


# -- numerics=ordered --------------------------------------------------------------------------------------------------

ALIKE = (("no_shard", "optim"), ("optim_grads", "optim_grads_params"))
BASELINE = {one: other for pair in ALIKE for one, other in (pair, pair[::-1])}
"""The strategy that sums microbatches and ranks in the same order."""
ORDERED = [index for index in INDICES if draw(index).options.get("numerics") == "ordered"]


@once
def baselines(place: int) -> dict[int, Record]:
    """Programs of one mesh under the other strategy, by number; of the first rank."""
    programs = [draw(index) for index in ORDERED if index % len(MESHES) == place]
    others = [replace(program, strategy=BASELINE[program.strategy]) for program in programs]
    first = run_ranks(train_all, programs[0].world, others)[0]
    return {program.index: record for program, record in zip(programs, first, strict=True)}


@pytest.mark.parametrize("index", ORDERED)
def test_strategies_that_sum_in_one_order_have_the_same_bits(index: int) -> None:
    one, other = trained(draw(index))[0], baselines(index % len(MESHES))[index]
    assert (one.norms, one.losses, one.last) == (other.norms, other.losses, other.last)
    for step in range(STEPS):
        assert not [n for n, value in one.weights[step].items() if not torch.equal(value, other.weights[step][n])]


# -- the bounds are bounds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(0, IN_CI, 5))
def test_a_small_error_in_one_tensor_shows(index: int) -> None:
    """One process plays the engine; then one gradient is off by a little, or one tensor moves half as far again."""
    program = draw(index)
    peer = train_plain(program, sum_integers if program.is_exact else sum_wide)
    right = train_plain(program, sum_wide, wide=True)
    start = dict(build(program).named_parameters())
    moved = {n: w - start[n].detach().to(w.dtype) for n, w in peer.weights[-1].items()}
    last = max(moved, key=lambda each: float(moved[each].norm()))
    first = max(peer.gradients[0], key=lambda each: float(peer.gradients[0][each].norm()))
    by = 2.0**-4 if POLICIES[program.dtype].wire in (torch.bfloat16, torch.float16) else 2.0**-15
    wrong_scale = replaced(peer, "gradients", 0, first, peer.gradients[0][first] * (1 + by))
    too_far = replaced(peer, "weights", -1, last, peer.weights[-1][last] + moved[last] / 2)
    if program.is_exact:
        assert not to_the_bit(program, [peer], peer)
        assert to_the_bit(program, [wrong_scale], peer)
        assert to_the_bit(program, [too_far], peer)
        return
    assert not first_gradient(program, peer, peer)
    assert not against_fp64(program, peer, peer, right)
    assert first_gradient(program, wrong_scale, peer)
    assert against_fp64(program, too_far, peer, right)


def replaced(record: Record, what: str, step: int, name: str, value: Tensor) -> Record:
    """The same with another tensor at one place."""
    values = [dict(each) for each in getattr(record, what)]
    values[step][name] = value
    return replace(record, **{what: values})
