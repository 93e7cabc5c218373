"""Updates of one run against its optimizer's rule, without another run.

docs/verdicts.md says how ("The update by the rule" and "Did a captured update in 16 bits leave the rule's bits?"). A
user's own optimizer is exempt, as are 16-bit weights of kernels that round after every operation (one process, numerics
exact or ordered).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from harness.config.roundoff import RMS, SIXTEEN_BITS, UNIT
from harness.config.update_rule import KNOWN, Rule, Units, UpdateState
from harness.parity.alone.witness import in_piece, in_run
from harness.parity.outcome import AHEAD, Finding, Stage
from harness.parity.record import Record
from harness.parity.tensors import Float64
from harness.parity.tiers.arithmetic import SAFETY, rounder
from harness.parity.tiers.gradients import HANDFUL, TensorPair, compare_values, length

RULE = "update by the rule"
IN_16_BITS = f"{RULE}, rounded once"

ROUNDINGS = 16
"""Roundings of one element's update: gradient clipped (1), moments (6), corrections (2), root, sum and quotient (3),
step (2), decay (2)."""

CLOSE = 0.05

FUSED = ("native", "ddp", "fsdp1", "fsdp2", "megatron_fsdp")
"""Engines that round a weight once under Adam (`engines.optim.make_optimizer`)."""

ONE_ROUNDING = 2e-4
"""Largest share of weights whose bits fp32 errors explain, beside `FEW` of them; clean runs: 4e-5."""

FEW = 4


def check(run: Record) -> list[Finding]:
    if run.config["optimizer.name"] not in KNOWN:
        return []
    if run.config["dtype.main_params"] in SIXTEEN_BITS:
        engine, mode, name = (run.config[key] for key in ("engine.name", "numerics.mode", "optimizer.name"))
        is_fused = name in ("adam", "adamw") and engine in FUSED and mode in ("fast", "deterministic")
        return _rounded_once(run) if is_fused else []
    found: list[Finding] = []
    held: dict[str, UpdateState] = {}
    for step, norm in _steps(run):
        if step in run.weights:
            held = _states(run, step)
        found += _at_step(run, step, _clipping(run, norm), held)
    return found


def _rounded_once(run: Record) -> list[Finding]:
    """Share of all weights that a captured update left with other bits than the rule."""
    found = []
    main, gradients = (rounder(str(run.config[f"dtype.{kind}"])) for kind in ("main_params", "main_grads"))
    for step in sorted(run.captures.keys() & run.updates.keys() & run.weights.keys()):
        if (step > 1 and step not in run.moments) or not math.isfinite(norm := _norm(run, step)):
            continue
        coefficient, held = _clipping(run, norm), _states(run, step)
        wrong: dict[str, float] = {}
        count = 0
        for name in held.keys() & run.captures[step].tensors.keys() & run.updates[step].tensors.keys():
            state, before = held[name], held[name].weights
            gradient = gradients(run.captures[step].values(name) * coefficient)
            decays, rate = _decays(run, name, state), _rate(run, step)
            update = rule_of(run, name).update(state, gradient, run.updates_until(step), rate, decays=decays)
            wrong[name] = float((main(before + update) != before + run.updates[step].values(name)).sum())
            count += before.size
        if wrong:
            worst, share = max(wrong, key=lambda name: wrong[name]), sum(wrong.values()) / count
            note = "weights that have other bits than the rule leaves"
            allowed = ONE_ROUNDING + FEW / count
            found.append(in_run(run, IN_16_BITS, Stage.optimizer, share, allowed, step, worst, note))
    return found


def rule_of(run: Record, tensor: str) -> Rule:
    return Rule.of(run.config).of_tensor(orthogonalized=tensor in run.summary.get("orthogonalized", ()))


def _states(run: Record, step: int) -> dict[str, UpdateState]:
    weights, moments = run.weights[step], run.moments.get(step)
    found = {name: UpdateState(weights.values(name)) for name in weights.tensors}
    for name in [*found] if moments is not None else ():
        keys = [f"{name}/{entry}" for entry in rule_of(run, name).entries]
        if moments is not None and moments.tensors.keys() >= set(keys):
            found[name].first, found[name].second = (*map(moments.values, keys), 0.0, 0.0)[:2]
        elif name in run.captures[step].tensors:
            del found[name]
    return found


def _at_step(run: Record, step: int, coefficient: float, held: Mapping[str, UpdateState]) -> list[Finding]:
    counted = run.updates_until(step)
    found: list[Finding] = []
    judged: list[tuple[TensorPair, float]] = []
    for name in run.updates[step].tensors:
        update = run.updates[step].values(name)
        if name not in held:
            continue
        if name not in run.captures[step].tensors:
            found += _frozen(run, step, name, update)
            continue
        gradient = run.captures[step].values(name) * coefficient
        rate, decays = _rate(run, step), _decays(run, name, held[name])
        rule = rule_of(run, name)
        free = rule.cancelling(held[name], gradient, counted, rate, _units(run), decays=decays)
        rounding = rule.rounding(held[name], gradient, rate)
        predicted = rule.update(held[name], gradient, counted, rate, decays=decays)
        pair = compare_values(name, _beyond(update, predicted, free), predicted)
        if pair.norm == 0.0:
            found += _frozen(run, step, name, update)
        elif pair.finite:
            allowed = SAFETY * _error(run, pair, held[name]) + rounding / pair.norm
            judged.append((pair, allowed))
            note = explain(pair, counted, allowed, rule)
            found += [
                in_run(run, RULE, Stage.optimizer, pair.distance, allowed, step, name, note),
                in_piece(run, f"{RULE}, worst piece", Stage.optimizer, pair, allowed, step),
            ]
        held[name].weights = held[name].weights + update
    clipped = run.config["optimizer.name"] == "sgd" and coefficient < 1.0 and _common_factor(judged)
    return [replace(f, since=Stage.clipping) if clipped else f for f in found]


def _decays(run: Record, name: str, state: UpdateState) -> bool:
    known = run.summary.get("decayed")
    return state.weights.ndim > 1 if known is None else name in known


def _units(run: Record) -> Units:
    weights, gradients = (UNIT[str(run.config[f"dtype.{kind}"])] for kind in ("main_params", "main_grads"))
    return Units(weights, gradients, weights)


def _beyond(update: Float64, predicted: Float64, free: Float64 | float) -> Float64:
    if np.ndim(free) == 0:
        return update
    off = update - predicted
    found: Float64 = predicted + np.sign(off) * np.maximum(abs(off) - free, 0.0)
    return found


def _common_factor(judged: Sequence[tuple[TensorPair, float]]) -> bool:
    """True if all updates deviate by one factor only, as with another norm or bound of clipping (not under Adam).

    Tensors whose rounding is half of it or more do not count. Args: judged: updates, each with its allowed distance.
    """
    telling = [(pair, allowed) for pair, allowed in judged if pair.numel >= HANDFUL and allowed <= abs(pair.b) / 2]
    if 2 * len(telling) <= sum(pair.numel >= HANDFUL for pair, _ in judged):
        return False
    scales = [pair.b for pair, _ in telling]
    room = CLOSE * max(map(abs, scales)) + max(allowed for _, allowed in telling)
    return max(scales) - min(scales) <= room and all(pair.residual <= room for pair, _ in telling)


def _steps(run: Record) -> Iterator[tuple[int, float]]:
    """Steps whose update can be worked out, each with the norm of its captured gradients."""
    last, rule = 0, Rule.of(run.config)
    for step in sorted(run.captures.keys() & run.updates.keys()):
        begins = step in run.weights and (step == 1 or step in run.moments or not rule.entries)
        if (begins or (last and last == step - 1)) and math.isfinite(norm := _norm(run, step)):
            last = step
            yield step, norm


def _norm(run: Record, step: int) -> float:
    capture = run.captures[step]
    return math.hypot(*(length(capture.values(name)) for name in capture.tensors))


def _clipping(run: Record, norm: float) -> float:
    """min(1, clip_norm / (norm + 1e-6)), as torch defines it."""
    clip = run.config["optimizer.clip_norm"]
    return 1.0 if clip is None else min(1.0, float(clip) / (norm + 1e-6))


def _rate(run: Record, step: int) -> float:
    return run.series("lr")[step - 1] or 0.0


def _error(run: Record, pair: TensorPair, state: UpdateState) -> float:
    """Allowed root-mean-square distance: of the arithmetic, of the stored clipped gradient, and of stored weights.

    Weights are rounded twice (decay, step) and lose changes below half their unit. Gains of one all lose the same, so
    the update's scale is known no better than its elements.
    """
    unit = UNIT[str(run.config["dtype.main_params"])]
    stored = math.sqrt(2) * unit * length(state.weights) / pair.norm
    return RMS * math.hypot(unit * math.sqrt(ROUNDINGS), UNIT[str(run.config["dtype.main_grads"])], stored)


def explain(pair: TensorPair, step: int, allowed: float, rule: Rule) -> str:
    """Known cause of a wrong factor, in a clause; empty without one."""
    ratio = pair.arm_norm / pair.norm
    if pair.distance <= allowed:
        return ""
    if ratio == 0.0:
        return "nothing was changed"
    ahead = rule.corrected(step + 1) / rule.corrected(step)
    if rule.name in ("adam", "adamw") and abs(ratio / ahead - 1.0) < CLOSE and abs(ratio - 1.0) > CLOSE:
        return f"{ratio:.4g} x the rule's: the bias correction of step {step + 1}, {AHEAD}"
    return f"{ratio:.4g} x the rule's" if pair.residual < CLOSE * abs(pair.b) else ""


def _frozen(run: Record, step: int, name: str, update: Float64) -> list[Finding]:
    moved = float(abs(update).max()) if update.size else 0.0
    return [in_run(run, "update without a gradient", Stage.optimizer, moved, 0.0, step, name)]
