"""Record of a run: a line a step in `metrics.jsonl`, and `summary.json` at the end, both written by rank 0.

A line holds the metrics that `harness.store.fields` declares.

`summary.json`: status, step, steps, tokens, loss, grad_norm, initial_weights and final_weights (SHA-256 over names,
shapes and bytes; the initial ones as fp32), parameters, accounted_bytes by role, engine (what it chose on this
machine), network (nccl_ub and sharp: requested, effective, reason; nccl: what rank 0's log says), collectives (one row
a kind and bucket of the last step), step_time_s (quartiles, without the first steps of
the first and of the last attempt, or without the warm-up of measure=bench), wall_s of this attempt. measure=bench adds
tensor_bytes (of the last warm-up step, by rank: persistent, peak, and the growth since the step before, which is 0 in a
settled state; null where it could not be followed), planned (kept, peak and sent as `harness.plan` has them; null: no
plan) and load (load average at_start and at_end, others_cores: processor
time of anything but these ranks over the timed_s seconds of timed steps).

Rank 0's copy of its run to wandb, by a thread that can neither fail nor hold up the run.

A copy that ends early is reported once, on the terminal and in `status.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import queue
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.config.derived import tokens_per_step, wandb_mode
from harness.config.schema import Config, WandbMode
from harness.control import StepReport
from harness.data.loader import global_digest
from harness.engines.protocol import Ranks, Scaled
from harness.probe.capture import raw_bytes
from harness.probe.collectives import Row, by_kind
from harness.probe.flops import flops_per_token, peak_flops
from harness.store import commands, status
from harness.store.errors import StoreError
from harness.store.fields import as_line, members
from harness.store.metrics import read_metrics
from harness.store.rundir import RunDir
from harness.store.wandb_run import copying, settle


def global_loss(losses: Sequence[float]) -> float:
    total = 0.0
    for loss in losses:
        total += loss
    return total / len(losses)


def weights_digest(
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None = None,
    alive: Callable[[], None] = lambda: None,
) -> str:
    """SHA-256 over every weight's name, dtype, shape and bytes in model order, each cast to `dtype` first if given.

    `alive` is called after each: 70 billion weights exceed the hang timeout.
    """
    digest = hashlib.sha256()
    for name, weight in weights:
        cast = weight if dtype is None else weight.to(dtype)
        digest.update(f"{name} {cast.dtype} {list(cast.shape)}\n".encode())
        digest.update(raw_bytes(cast))
        alive()
    return digest.hexdigest()


class Measured(NamedTuple):
    lr: float
    grad_norm: float
    step_time_s: float
    spans: Mapping[str, float]
    """Seconds of data, forward_backward, optimizer, and of forward where the engine called a `timed_workload`."""
    exposed_comm_s: float | None
    rows: list[Row]
    scaled: Scaled | None
    counters: Mapping[str, int]


class StepRecords:
    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.tokens = tokens_per_step(config)
        flops = flops_per_token(config)
        self.flops_per_rank = None if flops is None else flops * self.tokens / ranks.world_size
        self.world_size = ranks.world_size
        self.peak = None if config.dtype.fp8 else peak_flops(ranks.device, config.dtype.compute)

    def line(
        self,
        step: int,
        report: StepReport,
        measured: Measured,
        memory: Mapping[str, int | None],
        param_norm: float | None,
        held_out: float | None = None,
    ) -> dict[str, Any]:
        rate = None if self.flops_per_rank is None else self.flops_per_rank / measured.step_time_s
        parts = _parts(measured.spans)
        return as_line(
            {
                "step": step,
                "loss": global_loss(report.losses),
                "grad_norm": measured.grad_norm,
                "param_norm": param_norm,
                "validation/loss": held_out,
                "validation/perplexity": None if held_out is None else perplexity(held_out),
                "lr": measured.lr,
                "tokens": self.tokens,
                "loss_scale": None if measured.scaled is None else measured.scaled.scale,
                "skipped": measured.scaled is not None and measured.scaled.skipped,
                "data_digest": global_digest(report.held),
                "fed_digest": global_digest(report.fed),
                "step_time_s": measured.step_time_s,
                **{f"time/{part}_s": seconds for part, seconds in parts.items()},
                "time/other_s": measured.step_time_s - sum(each or 0.0 for each in parts.values()),
                "time/exposed_comm_s": 0.0 if self.world_size == 1 else measured.exposed_comm_s,
                **{f"memory/{name}": value for name, value in memory.items()},
                **{metric.path: None for metric in members("counters")},
                **{f"counters/{name}": value for name, value in measured.counters.items()},
                "tflops_per_rank": None if rate is None else rate / 1e12,
                "mfu": None if rate is None or self.peak is None else rate / self.peak,
                "comm": by_kind(measured.rows),
                "own": {},
            }
        )


def perplexity(loss: float) -> float:
    """e to a loss in nats a token; infinity beyond what a float holds."""
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan


def _parts(spans: Mapping[str, float]) -> dict[str, float | None]:
    forward = spans.get("forward")
    return {
        "data": spans["data"],
        "forward": forward,
        "backward": None if forward is None else spans["forward_backward"] - forward,
        "optimizer": spans["optimizer"],
    }


def held_out(losses: Mapping[int, float]) -> dict[str, Any]:
    """Last and lowest held-out loss, of those by step; empty without any."""
    if not losses:
        return {}
    best, last = min(losses, key=lambda step: (losses[step], step)), losses[max(losses)]
    validation = {"loss": last, "perplexity": perplexity(last), "best_loss": losses[best], "best_step": best}
    return {"validation": validation}


CLOSE_S, HURRY_S = 30.0, 10.0
"""Seconds to wait for the copy, of a done run, and of one that must make room."""


class WandbSync:
    def __init__(self, run_dir: Path, warn: Callable[[str], None]) -> None:
        """A copy that is not begun. Args: warn: called once with a line on failure."""
        self._run, self._warn = RunDir(run_dir), warn
        self._records: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed = ""

    def begin(self, config: Config) -> None:
        """Start the copy, if requested, with what `metrics.jsonl` holds, truncated to the resumed step."""
        try:
            mode = wandb_mode(config.wandb.mode, os.environ)
            if mode is WandbMode.disabled:
                return
            for record in read_metrics(self._run.metrics):
                self._records.put(record)
        except (StoreError, ValueError) as error:
            self._fail(str(error))
            return
        self._thread = threading.Thread(target=self._copy, args=(mode.value,), daemon=True)
        self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        if self._thread is not None:
            self._records.put(record)
            self._fail(self._failed)

    def close(self, *, hurry: bool = False) -> None:
        """Wait until all lines are sent, for a bounded time; idempotent."""
        if self._thread is None:
            return
        self._records.put(None)
        patience_s = HURRY_S if hurry else CLOSE_S
        self._thread.join(patience_s)
        late = f"not everything was sent within {patience_s:.0f} s" if self._thread.is_alive() else ""
        self._fail(self._failed or late)
        self._thread = None

    def _copy(self, mode: str) -> None:
        try:
            with copying(self._run, mode, live=True, more={}) as log:
                while (record := self._records.get()) is not None:
                    log(record)
            settle()
        except BaseException as error:  # told by the thread that trains
            self._failed = f"{type(error).__name__}: {' '.join(str(error).split())}"

    def _fail(self, why: str) -> None:
        if not why:
            return
        self._thread = None
        again = commands.verb(f"sync {shlex.quote(str(self._run.path))}")
        text = f"wandb copy: {why}; the record is whole without it: {again}"
        self._warn(text)
        with contextlib.suppress(OSError, StoreError):
            status.note(self._run.path, wandb=text)
