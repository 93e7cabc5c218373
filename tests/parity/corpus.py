"""Faults and their clean baselines: what the comparator must refuse, and what it must let pass.

Every fault is one mechanism in the simulated engine; its baseline is the same arm without it. Named after the
mechanism, and where there is one, after the public report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.parity.arms import Arm, Array, Params, broken
from tests.parity.network import bf16


@dataclass(frozen=True)
class Case:
    """A pair of runs and the truth about it."""

    name: str
    arm: Arm
    control: Arm
    step: int | None = 1
    """Step at which the fault must be found; None for a clean pair."""
    tensor: str = ""
    """Prefix of the first bad tensor, where one is to be named."""
    says: str = ""
    """Part of the sentence or of a note."""


def scaled(factor: float, prefix: str = "") -> Any:
    """All gradients, or those of one unit, times a factor."""
    return lambda mean, own, arm: {n: g * g.dtype.type(factor) if n.startswith(prefix) else g for n, g in mean.items()}


def duplicated(mean: Params, own: list[Params], arm: Arm) -> Params:
    """Megatron-LM PR 3067: each rank adds the reduced shard to a buffer that still holds its own gradient."""
    result = {}
    for name, value in mean.items():
        flat = value.ravel().copy()
        for rank, part in enumerate(np.array_split(np.arange(flat.size), arm.ranks)):
            flat[part] += own[rank][name].ravel()[part] / arm.ranks
        result[name] = flat.reshape(value.shape)
    return result


def unreduced(prefix: str) -> Any:
    """One bucket is never reduced: rank 0's own gradient stays."""
    return lambda mean, own, arm: {n: own[0][n] if n.startswith(prefix) else g for n, g in mean.items()}


def one_rank_missing(mean: Params, own: list[Params], arm: Arm) -> Params:
    """The last rank contributes zeros."""
    return {name: value - own[-1][name] / arm.ranks for name, value in mean.items()}


def tail_lost(prefix: str) -> Any:
    """The last 1/8 of a tensor, as in a padded shard, is zero."""

    def lose(mean: Params, own: list[Params], arm: Arm) -> Params:
        result = {name: value.copy() for name, value in mean.items()}
        for name in (name for name in result if name.startswith(prefix)):
            flat = result[name].ravel()
            flat[-flat.size // 8 :] = 0
        return result

    return lose


def collapsed(mean: Params, own: list[Params], arm: Arm) -> Params:
    """pytorch PR 140044: a buffer freed early; one layer's gradient is another's."""
    return {n: mean[n.replace("blocks.0", "blocks.1")] for n in mean}


def eleven_bits(values: Array) -> Array:
    """Rounded to TF32's or fp16's 11 significant bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def fifteen_bits(values: Array) -> Array:
    """Rounded to 15 significant bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x100)) & np.uint32(0xFFFFFE00)).view(np.float32)


def stored_as(rounding: Any) -> Any:
    """Reduced gradients pass through a coarser dtype than the policy says."""
    return lambda mean, own, arm: {name: rounding(value) for name, value in mean.items()}


def last_only(grads: list[Params]) -> list[Params]:
    """Megatron-LM PR 7186: only the last microbatch reaches the optimizer."""
    return [{n: np.zeros_like(g) for n, g in one.items()} for one in grads[:-1]] + grads[-1:]


def accumulated_in_bf16(grads: list[Params]) -> list[Params]:
    """ISEEKYAN/Megatron-LM#149: microbatches are added in bf16 before an fp32 reduction."""
    zeros = [{n: np.zeros_like(g) for n, g in one.items()} for one in grads[:-1]]
    total = {name: bf16(bf16(grads[0][name]) + bf16(grads[1][name])) for name in grads[0]}
    return [*zeros, total]


REDUCTIONS: dict[str, dict[str, Any]] = {
    "scale 1.00001": {"reduced": scaled(1.00001)},
    "duplicated": {"reduced": duplicated},
    "one rank missing": {"reduced": one_rank_missing},
    "unreduced": {"reduced": unreduced("blocks.1")},
    "tail lost": {"reduced": tail_lost("blocks.1.w_up")},
    "11 bits": {"reduced": stored_as(eleven_bits)},
    "bf16": {"reduced": stored_as(bf16)},
    "last microbatch only": {"microbatches": last_only},
    "bf16 accumulation": {"microbatches": accumulated_in_bf16},
}
"""Wrong sums, each by a hook."""

FP32 = Arm(engine="ddp", strategy="no_shard")
SGD = replace(FP32, optimizer="sgd", lr=0.1)
BF16 = Arm(engine="ddp", strategy="no_shard", compute="bf16", batch=16, seq_len=32, steps=4)
OURS = replace(FP32, engine="native", strategy="optim")
OURS_SGD = replace(SGD, engine="native", strategy="optim")
DOUBLED = broken(replace(OURS, k=1), reduced=scaled(2.0))
UPDATED = replace(OURS, captures=())
"""Without gradients no update can be worked out; it can still be held against the control's."""
UNSEEN = replace(OURS, updates=())
UNSEEN_SGD = replace(OURS_SGD, updates=())
"""No updates were captured: what is wrong with them shows a step later, in the loss."""
OURS_BF16 = replace(BF16, engine="native", strategy="optim")
WIDE = replace(BF16, compute="fp32")
"""fp32 control of the bf16 arms."""


def _fault(name: str, arm: Arm, control: Arm, step: int = 1, tensor: str = "", says: str = "", **hooks: Any) -> Case:
    return Case(name, broken(arm, **hooks), control, step, tensor, says)


SCALES = [
    ("twice", 2.0, "counted twice"),
    ("half", 0.5, "divided by the ranks twice"),
    ("(N+1)/N", 1.5, "a rank's own gradient counted twice"),
    ("1/(N*k)", 0.25, "N*k = 4"),
    ("2 %", 1.02, "1.02"),
    ("0.001 %", 1.00001, "(1 +1.0e-05) x"),
]

FAULTS = [
    *(_fault(f"scale {name}, Adam", OURS, FP32, says=says, reduced=scaled(f)) for name, f, says in SCALES),
    *(_fault(f"scale {name}, SGD", OURS_SGD, SGD, reduced=scaled(f)) for name, f, _ in SCALES[:2]),
    *(_fault(f"scale {name}, bf16 under fp32", OURS_BF16, WIDE, reduced=scaled(f)) for name, f, _ in SCALES[:5]),
    *(_fault(f"scale {name}, bf16 under bf16", OURS_BF16, BF16, reduced=scaled(f)) for name, f, _ in SCALES),
    *(
        _fault(f"duplicated gradient, {name}", arm, control, says="own gradient counted twice", reduced=duplicated)
        for name, arm, control in (("Adam", OURS, FP32), ("SGD", OURS_SGD, SGD), ("bf16", OURS_BF16, WIDE))
    ),
    _fault(
        "duplicated gradient, 4 ranks, bf16",
        replace(OURS_BF16, ranks=4, k=1),
        WIDE,
        reduced=duplicated,
    ),
    _fault("bucket unreduced", OURS, FP32, tensor="blocks.1", reduced=unreduced("blocks.1")),
    _fault("bucket unreduced, bf16", OURS_BF16, WIDE, tensor="blocks.1", reduced=unreduced("blocks.1")),
    _fault("bucket dropped", OURS, FP32, tensor="blocks.0", says="dropped", reduced=scaled(0.0, "blocks.0")),
    _fault("bucket dropped, bf16", OURS_BF16, WIDE, tensor="blocks.0", says="dropped", reduced=scaled(0.0, "blocks.0")),
    _fault("one unit doubled", OURS, FP32, tensor="head", says="counted twice", reduced=scaled(2.0, "head")),
    _fault("one unit doubled, bf16", OURS_BF16, WIDE, tensor="head", reduced=scaled(2.0, "head")),
    _fault("one unit 0.0005 %", OURS, FP32, tensor="head", reduced=scaled(1.000005, "head")),
    _fault("1.8 %, bf16 under fp32", OURS_BF16, WIDE, reduced=scaled(1.018)),
    _fault(
        "wrong sign from step 2",
        replace(UNSEEN, captures=(1, 2)),
        replace(FP32, captures=(1, 2)),
        step=2,
        tensor="head",
        reduced=scaled(-1.0, "head"),
        reduced_from=2,
    ),
    _fault("one rank missing", OURS, FP32, reduced=one_rank_missing),
    _fault("one rank missing, bf16", OURS_BF16, WIDE, reduced=one_rank_missing),
    _fault("tail of a shard lost", OURS, FP32, tensor="blocks.1.w_up", reduced=tail_lost("blocks.1.w_up")),
    _fault("tail of a shard lost, bf16", OURS_BF16, WIDE, tensor="blocks.1.w_up", reduced=tail_lost("blocks.1.w_up")),
    _fault("layers alias", OURS, FP32, tensor="blocks.0", reduced=collapsed),
    _fault("last microbatch only", OURS, FP32, microbatches=last_only),
    _fault("bf16 accumulation", OURS, FP32, microbatches=accumulated_in_bf16),
    _fault("bf16 gradients", OURS, FP32, reduced=stored_as(bf16)),
    _fault("11-bit gradients", OURS, FP32, reduced=stored_as(eleven_bits)),
    _fault("logged norm of one shard", OURS, FP32, logged_norm_factor=0.7),
    _fault("norm counted twice", OURS, FP32, norm_factor=1.41),
    _fault("optimizer one step ahead", OURS, FP32, adam_steps_ahead=1, says="bias correction of step 2"),
    _fault("no weight decay", OURS, FP32, no_decay=True, says="update by the rule"),
    _fault("wrong learning rate", OURS_SGD, SGD, lr_factor=1.1, says="1.1 x the control's"),
    _fault("optimizer one step ahead, unseen", UNSEEN, FP32, step=2, adam_steps_ahead=1),
    _fault("optimizer one step ahead, bf16", OURS_BF16, WIDE, adam_steps_ahead=1),
    _fault("weights of a unit never refreshed", OURS, FP32, step=2, frozen="blocks.0"),
    _fault("optimizer one step ahead, no gradients", UPDATED, FP32, adam_steps_ahead=1, says="update size"),
    _fault("no weight decay, unseen", UNSEEN, FP32, step=2, no_decay=True),
    _fault("wrong learning rate, unseen", UNSEEN_SGD, SGD, step=2, lr_factor=1.1),
    _fault("unreduced from step 2", OURS_SGD, SGD, step=2, reduced=unreduced(""), reduced_from=2),
    _fault("not a number in one run", OURS, FP32, step=4, nan_at=4, says="finite"),
]

ROUNDINGS: list[dict[str, Any]] = [
    {"strategy": "no_shard"},
    {"strategy": "optim_grads"},
    {"strategy": "optim_grads_params"},
    {"ranks": 4, "k": 1},
    {"ranks": 1, "k": 4},
    {"ranks": 4, "k": 2},
    {"wire": "bf16"},
    {"compute": "bf16"},
    {"compute": "bf16", "wire": "bf16"},
    {"compute": "fp64", "main": "fp64", "ranks": 1, "k": 4},
]

TWINS = [
    Case(f"{'-'.join(f'{k}={v}' for k, v in change.items())}, {opt.optimizer}, seed {seed}", arm, control, None)
    for seed in range(3)
    for change in ROUNDINGS
    for opt in (OURS, OURS_SGD)
    for control in [replace(opt, engine="ddp", strategy="no_shard", seed=seed)]
    for arm in [replace(opt, seed=seed, **change)]
] + [
    Case(f"bf16 under {control.compute}, {strategy}", replace(OURS_BF16, strategy=strategy), control, None)
    for control in (WIDE, BF16)
    for strategy in ("optim", "optim_grads_params")
]
