"""A small residual network in numpy: its gradients, their sum over ranks, and its optimizer, as a fault leaves them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.parity.arms import CLASSES, DIM, FEATURES, HIDDEN, LAYERS, Arm, Array, Params


def bf16(values: Array) -> Array:
    """Round fp32 values to bf16, to nearest even, and back."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def rounder(dtype: str) -> Callable[[Array], Array]:
    """What a value becomes when it is stored in a dtype."""
    kinds = {"fp64": np.float64, "fp32": np.float32}
    return bf16 if dtype == "bf16" else lambda values: values.astype(kinds[dtype])


def initial(seed: int) -> Params:
    """Initial weights, fp32."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (DIM, FEATURES)}
    for layer in range(LAYERS):
        shapes |= {
            f"blocks.{layer}.norm.weight": (DIM,),
            f"blocks.{layer}.w_up.weight": (HIDDEN, DIM),
            f"blocks.{layer}.w_down.weight": (DIM, HIDDEN),
        }
    shapes["head.output.weight"] = (CLASSES, DIM)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        for name, shape in shapes.items()
    }


def batch(arm: Arm, step: int) -> tuple[Array, Array]:
    """Features and labels of one step's global batch, a function of the position alone."""
    rng = np.random.default_rng([1234, step])
    x = rng.standard_normal((arm.batch, arm.seq_len, FEATURES))
    teacher = np.random.default_rng(7).standard_normal((FEATURES, CLASSES))
    y = (x @ teacher + rng.standard_normal((arm.batch, arm.seq_len, CLASSES))).argmax(-1)
    return x, y


def forward_backward(w: Params, x: Array, y: Array, dtype: str) -> tuple[float, Params]:
    """Mean loss of one microbatch and its gradients; every result is stored in `dtype`."""
    q = rounder(dtype)
    x, y = q(x.reshape(-1, FEATURES).astype(np.float32)), y.reshape(-1)
    hs, ns, us = [q(x @ w["embedding.weight"].T)], [], []
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        ns.append(q(hs[-1] * w[f"{block}.norm.weight"]))
        us.append(q(np.maximum(q(ns[-1] @ w[f"{block}.w_up.weight"].T), 0)))
        hs.append(q(hs[-1] + q(us[-1] @ w[f"{block}.w_down.weight"].T)))
    logits = q(hs[-1] @ w["head.output.weight"].T)
    logits = logits - logits.max(-1, keepdims=True)
    logits = logits if dtype == "fp64" else logits.astype(np.float32)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    rows = np.arange(len(y))
    loss = float(-np.log(p[rows, y]).mean())
    p[rows, y] -= 1
    d = q(p / len(y))
    grads = {"head.output.weight": d.T @ hs[-1]}
    dh = q(d @ w["head.output.weight"])
    for layer in reversed(range(LAYERS)):
        block = f"blocks.{layer}"
        grads[f"{block}.w_down.weight"] = dh.T @ us[layer]
        du = q(q(dh @ w[f"{block}.w_down.weight"]) * (us[layer] > 0))
        grads[f"{block}.w_up.weight"] = du.T @ ns[layer]
        dn = q(du @ w[f"{block}.w_up.weight"])
        grads[f"{block}.norm.weight"] = (dn * hs[layer]).sum(0)
        dh = q(dh + q(dn * w[f"{block}.norm.weight"]))
    grads["embedding.weight"] = dh.T @ x
    return loss, {name: q(grads[name]) for name in w}


def add(terms: list[Params]) -> Params:
    """Sum in order, in the terms' dtype."""
    total = {name: value.copy() for name, value in terms[0].items()}
    for term in terms[1:]:
        for name in total:
            total[name] = total[name] + term[name]
    return total


def reduce(arm: Arm, grads: list[list[Params]], step: int) -> Params:
    """Averaged gradient from [rank][microbatch]: in the strategy's order, over the arm's wire."""
    main, wire, fault = rounder(arm.main), rounder(arm.wire if arm.main != "fp64" else "fp64"), arm.fault
    if fault.microbatches is not None:
        grads = [fault.microbatches(one) for one in grads]
    each = [[{n: main(g) for n, g in micro.items()} for micro in one] for one in grads]
    count = arm.ranks * arm.k
    send: Callable[[Params], Params] = lambda g: {n: main(wire(v)) if arm.ranks > 1 else v for n, v in g.items()}  # noqa: E731
    if arm.strategy in ("no_shard", "optim"):
        total = add([send(add(one)) for one in each])
    else:
        total = add([add([send(one[j]) for one in each]) for j in range(len(each[0]))])
    mean = {name: main(value / main(np.array(count))) for name, value in total.items()}
    if fault.reduced is not None and step >= fault.reduced_from:
        own = [{name: value / len(one) for name, value in add(one).items()} for one in each]
        mean = fault.reduced(mean, own, arm)
    return {name: main(value) for name, value in mean.items()}


class Optimizer:
    """SGD, AdamW, or Adam with the decay in the gradient, on main weights, in their dtype."""

    def __init__(self, arm: Arm, weights: Params) -> None:
        self.arm = arm
        self.m = {name: np.zeros_like(value) for name, value in weights.items()}
        self.v = {name: np.zeros_like(value) for name, value in weights.items()}

    def step(self, weights: Params, grads: Params, lr: float, step: int) -> None:
        fault = self.arm.fault
        arm, t = self.arm, step + fault.adam_steps_ahead * (step >= fault.ahead_from)
        lr = lr * arm.fault.lr_factor
        for name, w in weights.items():
            g = grads[name]
            if arm.optimizer == "sgd":
                w -= w.dtype.type(lr) * g
                continue
            if w.ndim > 1 and not arm.fault.no_decay and arm.optimizer == "adam":
                g = g + w.dtype.type(0.1) * w
            elif w.ndim > 1 and not arm.fault.no_decay:
                w *= w.dtype.type(1 - lr * 0.1)
            self.m[name] += w.dtype.type(0.1) * (g - self.m[name])
            self.v[name] += w.dtype.type(0.05) * (g * g - self.v[name])
            hat = self.m[name] / w.dtype.type(1 - 0.9**t)
            w -= w.dtype.type(lr) * hat / (np.sqrt(self.v[name] / w.dtype.type(1 - 0.95**t)) + w.dtype.type(1e-8))
            for kept in (w, self.m[name], self.v[name]):  # once, as a fused kernel does
                kept[...] = rounder(arm.main)(kept)
