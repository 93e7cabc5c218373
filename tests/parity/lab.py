"""A laboratory in numpy: a small residual network, trained by a simulated sharded engine that can be broken on purpose.

It writes run directories as the harness does, in milliseconds and without torch, so that the comparator can be tried on
hundreds of pairs whose truth is known. The arithmetic is real: dtypes round, sums have an order, Adam hides scales.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from omegaconf import OmegaConf
from safetensors.numpy import save_file

from harness.config.schema import Config
from harness.store.identity import signature
from harness.store.metrics import encode
from harness.store.rundir import RunDir, Store
from harness.store.study import write_study
from tests.parity.streams import Silent, Voucher

Array = NDArray[Any]
Params = dict[str, Array]

DIM, HIDDEN, FEATURES, CLASSES, LAYERS = 32, 64, 24, 12, 2
CLEAN = "sources-of-this-test"


def nothing(*_: Any) -> None:
    """Does nothing."""


def unchanged(step: int, values: Params) -> Params:
    """As they are."""
    return values


@dataclass
class Fault:
    """Hooks into the simulated engine; each default does nothing."""

    reduced: Callable[[Params, list[Params], Arm], Params] | None = None
    """Changes the averaged gradients; is given each rank's own, averaged over its microbatches."""
    reduced_from: int = 1
    """First step at which `reduced` acts."""
    microbatches: Callable[[list[Params]], list[Params]] | None = None
    """Changes one rank's list of microbatch gradients before they are added."""
    adam_steps_ahead: int = 0
    """Steps Adam's bias correction is ahead."""
    no_decay: bool = False
    frozen: str = ""
    """Prefix of parameters whose compute weights are never refreshed after an update."""
    norm_factor: float = 1.0
    """What the norm is multiplied with before it is logged and clipped by."""
    logged_norm_factor: float = 1.0
    """What only the logged norm is multiplied with."""
    same_data: bool = False
    """Every rank is fed rank 0's sequences."""
    nan_at: int | None = None
    """Step at which the loss is not a number."""
    lr_factor: float = 1.0
    """What the optimizer, not the record, multiplies the learning rate with."""
    ahead_from: int = 1
    """First step at which `adam_steps_ahead` acts."""
    skipped: int | None = None
    """Step whose update is left out."""
    between: Callable[[int, Params, Optimizer], None] = nothing
    """Changes weights or moments before a step, by something that is no optimizer; after the last one too."""
    moments: Callable[[int, Optimizer], None] = nothing
    """Changes the moments as an update leaves them."""
    used: Callable[[int, Params], Params] = unchanged
    """Changes the weights that the last rank computes a step with."""
    local: Callable[[int, Params], Params] = unchanged
    """Changes a microbatch's gradients as the backward hands them out."""


@dataclass
class Arm:
    """One run to make."""

    ranks: int = 2
    k: int = 2
    strategy: str = "optim_grads_params"
    compute: str = "fp32"
    wire: str = "fp32"
    main: str = "fp32"
    optimizer: str = "adamw"
    numerics: str = "fast"
    engine: str = "native"
    lr: float = 3e-3
    clip: float | None = 1.0
    steps: int = 12
    seed: int = 0
    replicate: int = 0
    captures: tuple[int, ...] = (1,)
    updates: tuple[int, ...] = (1, 2, 3)
    witnessed: bool = False
    """Whether local gradients are seen beside the engine in captured steps."""
    vouched: bool = False
    """Whether a stream says of every step that it was right (`tests.parity.streams`)."""
    batch: int = 16
    seq_len: int = 16
    fault: Fault = field(default_factory=Fault)

    def config(self) -> dict[str, Any]:
        """The frozen configuration such a run would have."""
        plain: Any = OmegaConf.to_container(OmegaConf.structured(Config), enum_to_str=True)
        accumulate = "fp64" if self.main == "fp64" else "fp32"
        plain["model"].update(
            dim=DIM, ffn_dim=HIDDEN, num_layers=LAYERS, vocab_size=CLASSES, num_heads=2, num_kv_heads=2
        )
        plain["data"].update(kind="synthetic", seq_len=self.seq_len)
        plain["train"].update(
            steps=self.steps,
            seed=self.seed,
            replicate=self.replicate,
            global_batch_size=self.batch,
            microbatch_size=self.batch // (self.ranks * self.k),
            param_norm_every=5,
        )
        plain["dtype"].update(
            name=f"{self.compute}-{self.wire}",
            compute=self.compute,
            main_params=self.main,
            main_grads=self.main,
            grad_comm=self.main if self.main == "fp64" else self.wire,
            grad_accum=accumulate,
        )
        plain["optimizer"].update(name=self.optimizer, lr=self.lr, clip_norm=self.clip)
        if self.optimizer == "sgd":
            plain["optimizer"].update(momentum=0.0, weight_decay=0.0)
        plain["sharding"]["strategy"] = self.strategy
        plain["numerics"]["mode"] = self.numerics
        plain["engine"]["name"] = self.engine
        plain["mesh"]["world_size"] = self.ranks
        plain["measure"]["capture_steps"] = list(self.captures)
        plain["measure"]["update_steps"] = [step for step in self.updates if step <= self.steps]
        plain["study"]["name"] = "lab"
        result: dict[str, Any] = plain
        return result


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


def digest(arrays: Params) -> str:
    """Of names, dtypes and bytes."""
    state = hashlib.sha256()
    for name, value in arrays.items():
        state.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
    return state.hexdigest()


@dataclass
class Outcome:
    """What a run recorded, before it is written."""

    lines: list[dict[str, Any]]
    captures: dict[int, Params]
    updates: dict[int, Params]
    summary: dict[str, Any]
    witnesses: dict[int, tuple[Params, dict[str, float]]] = field(default_factory=dict)
    """By step: the mean of all local gradients in fp64, and the norms of their terms."""
    voucher: Silent = field(default_factory=Silent)


def witness(grads: list[list[Params]]) -> tuple[Params, dict[str, float]]:
    """What autograd handed out, before the engine touched it."""
    each = [{name: value.astype(np.float64) for name, value in micro.items()} for one in grads for micro in one]
    mean = {name: value / len(each) for name, value in add(each).items()}
    squares = {name: sum(float(np.vdot(one[name], one[name])) for one in each) for name in mean}
    return mean, {name: float(np.sqrt(square)) / len(each) for name, square in squares.items()}


def train(arm: Arm) -> Outcome:
    """Run an arm."""
    fault, main = arm.fault, rounder(arm.main)
    weights = initial(arm.seed)
    first = digest(weights)
    weights = {name: main(value).copy() for name, value in weights.items()}
    compute = {name: rounder(arm.compute)(value) for name, value in weights.items()}
    optimizer, lines, captures, updates = Optimizer(arm, weights), [], {}, {}
    witnesses: dict[int, tuple[Params, dict[str, float]]] = {}
    voucher = Voucher(arm, weights) if arm.vouched else Silent()
    for step in range(1, arm.steps + 1):
        x, y = batch(arm, step)
        fault.between(step, weights, optimizer)
        used = [*([compute] * (arm.ranks - 1)), fault.used(step, compute)]
        voucher.before(weights, optimizer, used, {n: rounder(arm.compute)(w) for n, w in weights.items()})
        parts = np.split(np.arange(arm.batch), arm.ranks)
        parts = [parts[0]] * arm.ranks if fault.same_data else parts
        losses, grads = [], []
        for part, seen in zip(parts, used, strict=True):
            micro = [forward_backward(seen, x[i], y[i], arm.compute) for i in np.split(part, arm.k)]
            losses += [loss for loss, _ in micro]
            grads.append([fault.local(step, g) for _, g in micro])
        mean = reduce(arm, grads, step)
        if step in arm.captures:
            captures[step] = mean
            if arm.witnessed:
                witnesses[step] = witness(grads)
        norm = float(np.sqrt(sum(float(np.vdot(g.astype(np.float64), g)) for g in mean.values()))) * fault.norm_factor
        scale = 1.0 if arm.clip is None else min(1.0, arm.clip / (norm + 1e-6))
        lr = arm.lr * min(1.0, step / 2)
        before = {name: value.copy() for name, value in weights.items()}
        clipped = {n: g * g.dtype.type(scale) for n, g in mean.items()}
        had = tuple({n: v.copy() for n, v in each.items()} for each in (weights, optimizer.m, optimizer.v))
        voucher.step(step, grads, mean, clipped, norm, lr)
        if step != fault.skipped:
            optimizer.step(weights, clipped, lr, step)
        fault.moments(step, optimizer)
        voucher.after(weights, optimizer, had)
        if step in arm.updates:
            updates[step] = {name: weights[name] - before[name] for name in weights}
        for name in weights:
            if not (fault.frozen and name.startswith(fault.frozen)):
                compute[name] = rounder(arm.compute)(weights[name])
        loss = float("nan") if fault.nan_at is not None and step >= fault.nan_at else float(np.mean(losses))
        param_norm = float(np.sqrt(sum(float(np.vdot(w.astype(np.float64), w)) for w in weights.values())))
        data = hashlib.sha256(b"".join(x[i].tobytes() for i in parts)).hexdigest()[:16]
        lines.append(
            {
                "step": step,
                "loss": loss,
                "grad_norm": norm * fault.logged_norm_factor,
                "param_norm": param_norm if step % 5 == 0 else None,
                "lr": lr,
                "tokens": arm.batch * arm.seq_len,
                "data_digest": data,
                "step_time_s": 0.01 + 0.001 * (step % 3),
                "memory": {"allocated": None, "rss": 2**26},
                "comm": {"reduce_scatter": {"count": 4, "bytes": 1000}},
            }
        )
    fault.between(arm.steps + 1, weights, optimizer)
    voucher.end(weights, optimizer)
    summary = {"initial_weights": first, "final_weights": digest(weights), "step": arm.steps}
    return Outcome(lines, captures, updates, summary, witnesses, voucher)


@dataclass(frozen=True)
class Cell:
    """A cell as the store sees it."""

    config: dict[str, Any]
    overrides: tuple[str, ...] = ()


PROVENANCE = {
    "sources_digest": CLEAN,
    "versions": {"torch": "2.13.0", "numpy": "2.0"},
    "cpu_model": "a processor",
    "device": "cpu",
    "threads_per_rank": 1,
    "environment": {},
}


def write(root: Path, arm: Arm, overrides: tuple[str, ...] = ()) -> Path:
    """Train an arm and write its run directory; returns its path."""
    outcome = train(arm)
    run = Store(root).create(Cell(arm.config(), overrides))
    (run.path / "metrics.jsonl").write_text("".join(encode(line) + "\n" for line in outcome.lines))
    for name, value in (("provenance", PROVENANCE), ("summary", outcome.summary)):
        (run.path / f"{name}.json").write_text(json.dumps(value))
    (run.path / "status.json").write_text(
        json.dumps({"state": "done", "reason": "", "attempt": 0, "keeper": "process"})
    )
    (run.path / "attempts/0").mkdir(parents=True, exist_ok=True)
    for step, grads in outcome.captures.items():
        write_capture(run.path, step, grads)
    for step, changes in outcome.updates.items():
        write_capture(run.path, step, changes, "update")
    if 1 in outcome.updates:
        write_capture(run.path, 1, initial(arm.seed), "weights")
    outcome.voucher.write(run.path)
    for step, (mean, terms) in outcome.witnesses.items():
        write_capture(run.path, step, mean, "witness", terms=terms, kept={}, wrong_weights=[])
    return run.path


def write_capture(run: Path, step: int, grads: Params, kind: str = "step", **facts: Any) -> None:
    """Gradients or updates of a step, as the harness stores them."""
    (run / "capture").mkdir(exist_ok=True)
    path = run / f"capture/{kind}-{step:06d}.safetensors"
    save_file({name: np.ascontiguousarray(g) for name, g in grads.items()}, path)
    path.with_suffix(".json").write_text(json.dumps({"step": step, "tensors": {}, **facts}))


def edit_json(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_lines(run: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the lines of `metrics.jsonl` in place."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_config(run: Path, group: str, **changes: Any) -> None:
    """Change settings of a frozen configuration."""
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config[group].update(changes)
    path.write_text(yaml.safe_dump(config))


def next_float(value: float) -> float:
    """The neighbouring float64: one bit more."""
    return float(struct.unpack("<d", struct.pack("<q", struct.unpack("<q", struct.pack("<d", value))[0] + 1))[0])


def broken(arm: Arm, **changes: Any) -> Arm:
    """The same arm with a fault."""
    twin = copy.copy(arm)
    twin.fault = Fault(**changes)
    return twin


@dataclass(frozen=True)
class _Cell:
    """A written run as the cell it was made from."""

    config: dict[str, Any]
    overrides: tuple[str, ...] = ()


def as_study(root: Path, controls: Mapping[Path, Path | None], question: str) -> None:
    """Record written runs as a study: each with the run it is held against, None for a control."""
    cells = {run: _Cell(RunDir(run).config()) for run in controls}
    for cell in cells.values():
        cell.config["study"]["question"] = question
    pairs = {run: control for run, control in controls.items() if control is not None}
    of = {signature(cells[run].config): signature(cells[control].config) for run, control in pairs.items()}
    write_study(root, list(cells.values()), of)
