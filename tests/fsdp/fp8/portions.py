"""FP8 layers that a plan of tensor parallelism has cut: their bytes, and their state in other layouts; run on ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy as fsdp2_policy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from harness.fsdp import Fp8Linear, MixedPrecisionPolicy, ShardedModel, create_state
from harness.fsdp.storage.codec import BACKWARD_COPY, PURPOSE
from harness.fsdp.storage.dtensors import fill
from harness.probe.collectives import CollectiveMeter
from tests.fsdp.fp8.sharded import HIDDEN, WIDTH, Case, converted, cut, data, loss_of, shard, unlike, whole_copy

# -- state -------------------------------------------------------------------------------------------------------------


def steps(model: ShardedModel, optimizer: torch.optim.Optimizer, case: Case, count: int) -> None:
    for step in range(count):
        loss_of(model, data(step, 0, case.place)).backward()
        optimizer.step()
        optimizer.zero_grad()


def across(rank: int, one: Case, two: Case) -> list[str]:
    """State of one layout in another and back: weights, moments, amaxes and scales to the bit, payloads of them."""
    width = max(one.tp, two.tp)
    saved, optimizer = shard(one, converted(one.recipe, tp=width))
    steps(saved, optimizer, one, 2)
    told = [f"{name} before saving" for name in unlike(saved, dict(saved.full_weights()))]
    loaded, other = shard(two, converted(two.recipe, seed=9, tp=width))
    steps(loaded, other, two, 1)
    weights, known = dict(saved.full_weights()), _known(saved)
    told += _move(saved, loaded) + [f"{name} when loaded" for name in unlike(loaded, weights)]
    told += [f"{name} when loaded" for name, value in _known(loaded).items() if not torch.equal(value, known[name])]
    steps(saved, optimizer, one, 1)
    told += _move(loaded, saved) + [f"{name} when back" for name in unlike(saved, weights)]
    told += [f"{name} when back" for name, value in _known(saved).items() if not torch.equal(value, known[name])]
    saved.close()
    loaded.close()
    return told


def _known(model: ShardedModel) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in Fp8Linear.delayed_state(model.module).items()}


def _move(source: ShardedModel, target: ShardedModel) -> list[str]:
    """Bring every tensor of a state into another model; what is other bits there afterwards."""
    given = {name: whole_copy(value) for name, value in source.sharded_state().tensors.items() if value.dim()}
    state = target.sharded_state()
    for name, value in state.tensors.items():
        if value.dim():
            fill(value, given[name])
    target.adopt_state(state)
    found = {name: whole_copy(value) for name, value in target.sharded_state().tensors.items() if value.dim()}
    return [name for name, value in found.items() if not torch.equal(value, given[name])]


# -- bytes, and models without memory ----------------------------------------------------------------------------------


def traffic(rank: int, case: Case) -> dict[str, tuple[int, int]]:
    """Count and bytes of what makes scales, and of gathers of an FP8 bucket over its elements, in a second step."""
    model, optimizer = shard(case, converted(case.recipe, tp=case.tp).bfloat16())
    create_state(optimizer)
    steps(model, optimizer, case, 1)
    meter = CollectiveMeter()
    steps(model, optimizer, case, 1)
    rows = meter.take()
    meter.close()
    label = "blocks.0/bfloat16/fp8" + "x2" * (case.recipe.payloads - 1)
    moved = next(bucket.layout.comm_numel for bucket in model.buckets if bucket.name == label)
    model.close()
    scales = [row for row in rows if row.bucket == PURPOSE]
    gathers = [row for row in rows if row.kind == "all_gather" and row.bucket in (label, label + BACKWARD_COPY)]
    return {
        "scales": (sum(row.count for row in scales), sum(row.bytes for row in scales)),
        "gathers": (sum(row.count for row in gathers), sum(row.bytes for row in gathers)),
        "elements": (moved, 0),
    }


def meta(rank: int, case: Case) -> list[str]:
    """Cut on the meta device, built without memory and reset module by module."""
    with torch.device("meta"):
        hollow = converted(case.recipe, tp=case.tp)
    torch.manual_seed(11)
    model, optimizer = shard(case, hollow, device=torch.device("cpu"), init_model_with_meta_device=True)
    weights = dict(model.full_weights())
    told = unlike(model, weights)
    steps(model, optimizer, case, 1)
    told += unlike(model, dict(model.full_weights()))
    model.close()
    return told


# -- beside FSDP2 ------------------------------------------------------------------------------------------------------


def beside_fsdp2(rank: int, case: Case) -> tuple[list[str], int, int]:
    """A training under FSDP2, which gathers weights in bf16 for layers that quantize them at each use, beside ours,
    which gathers 8 bits: what differs in any bit; and bytes of the last step, of all gathers of theirs and of ours of
    such weights.

    Main weights are bf16, so that both quantize the same numbers; two data-parallel ranks, so that means are exact.
    """
    policy = MixedPrecisionPolicy(main_params_dtype=None, grad_comm_dtype=torch.float32, allow_low_precision_grads=True)
    ours, optimizer = shard(case, converted(case.recipe, tp=case.tp).bfloat16(), mixed_precision_policy=policy)
    mesh = case.mesh()
    peer = cut(converted(case.recipe, tp=case.tp).bfloat16(), case, mesh)
    summed = fsdp2_policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in peer.blocks:
        fsdp2(block, mesh=mesh["inner"], mp_policy=summed)
    fsdp2(peer, mesh=mesh["inner"], mp_policy=summed)
    theirs = torch.optim.AdamW(peer.parameters(), lr=0.02, fused=True)  # as ours is where nobody says how
    told: list[str] = []
    moved = []
    for step in range(3):
        losses = []
        for model, stepped in ((peer, theirs), (ours, optimizer)):
            meter = CollectiveMeter()
            losses.append(loss_of(model, data(step, 0, case.place)))
            losses[-1].backward()
            rows = [row for row in meter.take() if row.kind == "all_gather"]
            moved.append(sum(row.bytes for row in rows if model is peer or row.bucket.endswith("/fp8")))
            meter.close()
            stepped.step()
            stepped.zero_grad()
        told += [] if torch.equal(*losses) else [f"step {step}: loss {losses[1]} is not FSDP2's {losses[0]}"]
    whole = {name: param.full_tensor() for name, param in peer.named_parameters() if isinstance(param, DTensor)}
    told += [name for name, value in ours.full_weights() if not torch.equal(value, whole[name])]
    ours.close()
    return told, moved[-2], moved[-1]


def halves_the_bytes(wrong: list[str], theirs: int, ours: int) -> None:
    """Assert what `beside_fsdp2` should find. FSDP2 gathers each of two blocks twice a step, ours the last one once; a
    block's FP8 weights are P elements, of which a rank sends half."""
    elements = 2 * WIDTH * HIDDEN
    assert wrong == []
    assert 4 * elements <= theirs < 4 * elements * 1.05, "two bytes each, vectors and ends beside"
    assert ours == 3 * elements // 2, "a byte each"
