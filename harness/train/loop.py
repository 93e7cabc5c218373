"""Training loop of one rank, from its first step, or its last checkpoint, to its end.

After a step the ranks exchange a few numbers, and meanwhile each loads its next batch. Loading counts for the step that
uses the batch; exchange and recording count for none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from harness.checkpoint.policy import Checkpoints
from harness.config.derived import lr_at, parameter_count
from harness.config.schema import CkptPolicy, MeasureMode
from harness.control import Control, StepReport
from harness.engines.protocol import Microbatch
from harness.probe import network
from harness.probe.collectives import Row
from harness.probe.meters import ASIDE
from harness.store.metrics import MetricsWriter, cut_back, read_metrics, write_summary
from harness.train.bench import Bench
from harness.train.callbacks import Callbacks, made
from harness.train.captures import Captures
from harness.train.evaluation import Evaluation
from harness.train.feed import Feed, joined
from harness.train.record import Measured, StepRecords, WandbSync, held_out, weights_digest
from harness.train.session import Outcome, Session
from harness.train.step_checks import StepChecks
from harness.train.trace import Trace, untimed


def run(session: Session) -> Outcome:
    """Train until `train.steps` are done or any rank is asked to stop. Collective over all ranks.

    Resumes from the newest checkpoint if the policy keeps any, and truncates the record to it. Closes the meters.

    Raises `ValueError`: data or checkpoint do not fit. `RuntimeError`: a checkpoint could not be written.
    """
    with session.meters:
        return Loop(session).run()


class Loop:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.config = session.config
        self.is_first_rank = session.ranks.rank == 0
        self.control = Control(session.ranks, session.control, session.meters.collectives)
        folder = session.run_dir / "ckpt"
        self.checkpoints = Checkpoints(folder, session.config, session.ranks, self.control, session.warn)
        self.keeps_checkpoints = session.config.ckpt.policy is not CkptPolicy.none
        self.records = StepRecords(session.config, session.ranks)
        self.captures = Captures(session, self.control)
        self.step_checks: StepChecks | None = None
        self.callbacks = Callbacks(session, ())
        self.evaluation: Evaluation
        self.feed = Feed(self.config, session.ranks.data_rank)
        self.bench = Bench(session, self.control) if self.config.measure.mode is MeasureMode.bench else None
        self.ahead: tuple[Future[list[Microbatch]], float] | None = None
        """The next batch, and seconds of loading it on this rank."""
        self.given: Microbatch
        self.initial_weights = ""
        self.restored: dict[str, Any] | None = None
        self.saved_step = -1
        self.saved_at = time.monotonic()
        self.begins_after = 0
        self.last_rows: list[Row] = []
        self.accounted_bytes = session.engine.accounted_bytes()

    def run(self) -> Outcome:
        began = time.perf_counter()
        start = self._begin()
        writer, wandb_sync = self._open_record(start)
        self.evaluation = Evaluation(self.session, start)
        trace = Trace(self.session, start)
        step, stop, ended = start, False, False
        try:
            self._open_callbacks(start)
            while step < self.config.train.steps and not (stop or ended):
                step += 1
                record, report = self._step(step)
                stop = report.stop
                if writer is not None:
                    writer.write(record)
                wandb_sync.log(record)
                self.session.progress(record)
                ended = self._stops_early(step)
                self._save_if_due(step, writer, report, ends=ended)
                trace.after(step)
            status: Literal["done", "preempted"] = "done" if ended or step == self.config.train.steps else "preempted"
            self.callbacks.call("end", status)
            self._finish(status, start, time.perf_counter() - began)
        finally:
            trace.close()
            if writer is not None:
                writer.close()
            self.callbacks.close()
            wandb_sync.close(hurry=step < self.config.train.steps and not ended)
        return Outcome(status, step, self.saved_step == step)

    def _open_callbacks(self, start: int) -> None:
        with self.session.meters.paused():
            self.step_checks = checks = StepChecks.open(self.session, self.control, start)
        captures = self.captures if self.captures.steps or self.captures.update_steps else None
        own = [each for each in (captures, checks) if each is not None]
        self.callbacks = Callbacks(self.session, [*own, *made(self.config)])
        self.callbacks.call("begin", start)

    def _begin(self) -> int:
        session, loaded = self.session, None
        if self.keeps_checkpoints or self.config.ckpt.load is not None:
            loaded = self.checkpoints.load_newest(session.engine)
        if loaded is not None:
            self.initial_weights, self.saved_step = loaded.initial_weights, loaded.step
            self.begins_after = loaded.begins_after
            self.restored = {"step": loaded.step, "wrong": loaded.wrong, "layout": dict(loaded.layout or {})}
        if not self.initial_weights:  # another tool's files do not tell
            with session.meters.paused():
                weights = session.engine.named_weights()
                self.initial_weights = weights_digest(weights, torch.float32, alive=session.alive)
        return 0 if loaded is None else loaded.step

    def _open_record(self, start: int) -> tuple[MetricsWriter | None, WandbSync]:
        wandb_sync = WandbSync(self.session.run_dir, self.session.warn)
        if not self.is_first_rank:
            return None, wandb_sync
        path = self.session.run_dir / "metrics.jsonl"
        cut_back(path, start, self.begins_after)
        wandb_sync.begin(self.config)
        return MetricsWriter(path), wandb_sync

    def _step(self, step: int) -> tuple[dict[str, Any], StepReport]:
        session = self.session
        session.begins(step)
        with nullcontext() if self.bench is None else self.bench.step(step):
            losses, measured = self._update(step)
        self.last_rows = measured.rows
        self.callbacks.call("after", step, measured.lr, measured.grad_norm)
        held_out = self.evaluation.after(step)
        digests = self.feed.digests(step, self.given)
        del self.given
        exchange = self.control.begin_report(
            [loss.item() for loss in losses], *digests, session.should_stop(), self._is_save_due()
        )
        if step < self.config.train.steps:
            self.ahead = self._fetch(step + 1)  # while the exchange is under way
        report = exchange()
        followed = None if self.bench is None else self.bench.after(step)
        memory = session.meters.memory.take(sum(self.accounted_bytes.values()), followed)
        record = self.records.line(step, report, measured, memory, self._param_norm(step), held_out)
        record["own"] = self.callbacks.step(step, record)
        return record, report

    def _update(self, step: int) -> tuple[list[Tensor], Measured]:
        session, meters = self.session, self.session.meters
        lr = lr_at(self.config, step)
        meters.collectives.take()  # what was issued, or waited for, between steps is no step's
        meters.collectives.take_waited_s()
        session.engine.counters()
        (data, loading_s), self.ahead = self.ahead or self._fetch(step), None
        microbatches = data.result()
        began = time.perf_counter()
        with ExitStack() as watches:
            self._outside(lambda: self._watch(step, microbatches, watches))
            with meters.timers.span("forward_backward"):
                losses = [
                    session.engine.forward_backward(microbatch, last=number == len(microbatches))
                    for number, microbatch in enumerate(microbatches, start=1)
                ]
            self._outside(watches.close)
        with meters.timers.span("optimizer"):
            session.engine.finish_gradients()
            self.callbacks.reduced(step)
            grad_norm = session.engine.step(lr)
        spans = meters.timers.take()  # waits for the device, so that the step's time is all of it
        step_time_s = loading_s + time.perf_counter() - began - spans[ASIDE]
        rows, waited_s = meters.collectives.take(), meters.collectives.take_waited_s()
        exposed_comm_s = None if meters.timers.on_device else waited_s
        counters, scaled = session.engine.counters(), session.engine.scaled()
        return losses, Measured(lr, grad_norm, step_time_s, spans, exposed_comm_s, rows, scaled, counters)

    def _watch(self, step: int, microbatches: Sequence[Microbatch], watches: ExitStack) -> None:
        self.callbacks.call("before", step, microbatches)
        self.callbacks.watch(step, watches)
        self.given = joined(microbatches)

    def _fetch(self, step: int) -> tuple[Future[list[Microbatch]], float]:
        """A batch, or the error that whoever takes it is to raise."""
        began, data = time.perf_counter(), Future[list[Microbatch]]()
        with self.session.meters.timers.span("data"):
            try:
                device, batch = self.session.ranks.device, self.session.loader.batch(step)
                given = [[torch.from_numpy(rows).to(device, non_blocking=True) for rows in each] for each in batch]
                data.set_result([Microbatch(*each) for each in given])
            except Exception as caught:
                data.set_exception(caught)
        return data, time.perf_counter() - began

    def _outside(self, work: Callable[[], None]) -> None:
        with self.session.meters.paused(), self.session.meters.timers.aside():
            work()

    def _looked(self) -> dict[str, Any]:
        """Cost of the steps that this attempt has looked at and recomputed, which no step's time contains."""
        if self.step_checks is None:
            return {}
        cadence, seconds = self.step_checks.cadence, self.step_checks.again_s
        found = {"step_checks": {"steps": cadence.steps, "every": cadence.every, "seconds": cadence.looking_s}}
        again = {"worked_out_again": {"steps": len(seconds), "seconds": sum(seconds.values())}}
        return found | again if seconds else found

    def _param_norm(self, step: int) -> float | None:
        every = self.config.train.param_norm_every
        if not every or step % every or self.bench is not None:
            return None
        with self.session.meters.paused():
            return self.session.engine.weight_norm()

    def _is_save_due(self) -> bool:
        pause_s = 60 * self.config.ckpt.minutes
        return self.is_first_rank and 0 < pause_s <= time.monotonic() - self.saved_at

    def _stops_early(self, step: int) -> bool:
        """True if a callback of any rank ends the run after an evaluation. Collective over all ranks."""
        if step not in self.evaluation.losses:
            return False
        asked = any(self.callbacks.call("evaluation", step, self.evaluation.losses))
        return any(each for (each,) in self.control.gather([int(asked)]))

    def _save_if_due(self, step: int, writer: MetricsWriter | None, report: StepReport, *, ends: bool) -> None:
        every, best = self.config.ckpt.every, self.evaluation.best(self.config.ckpt.keep_best)
        due = report.stop or report.save or ends or step == self.config.train.steps or (every and step % every == 0)
        if not (due or step in best) or not self.keeps_checkpoints:
            return
        self.callbacks.call("checkpoint", step)
        if writer is not None:
            writer.sync()  # a checkpoint stands on the lines up to its step
        with self.session.meters.paused():
            self.checkpoints.save(self.session.engine, step, self.initial_weights, self.begins_after, best)
        self.saved_step, self.saved_at = step, time.monotonic()

    def _network(self) -> dict[str, Any]:
        """Requested and effective settings of NCCL; from rank 0's log."""
        path = network.log_of_process(os.environ, os.getpid())
        log = None if path is None else network.read(path)
        backend = dist.get_backend() if dist.is_initialized() else "one process"
        return network.record(self.config, backend, self.session.engine.user_buffers(), log)

    def _finish(self, status: str, start: int, wall_s: float) -> None:
        benched = {} if self.bench is None or status != "done" else self.bench.facts()
        with self.session.meters.paused():
            final_weights = weights_digest(self.session.engine.named_weights(), alive=self.session.alive)
            own = self.control.gather([int(final_weights[:15], 16)])
        if not self.is_first_rank:
            return
        path = self.session.run_dir
        records = read_metrics(path / "metrics.jsonl")
        facts = {
            "parameters": parameter_count(self.config),
            **held_out(self.evaluation.losses),
            "initial_weights": self.initial_weights,
            "final_weights": final_weights,
            "accounted_bytes": self.session.engine.accounted_bytes(),  # some of it is made in the first step
            "engine": self.session.engine.facts(),
            "network": self._network(),
            "other_replicas": [rank for rank, row in enumerate(own) if row != own[0]],
            **self.captures.stepped(),
            **({} if self.restored is None else {"restored": self.restored}),
            **self._looked(),
            "wall_s": wall_s,
            **benched,
            "collectives": [asdict(row) for row in self.last_rows],
        }
        warm_up = {1, start + 1, *untimed(self.config.measure.trace_steps)}
        if self.bench is not None:
            warm_up = {*range(1, self.config.measure.warmup_steps + 1)}
        write_summary(path / "summary.json", status, self.config.train.steps, records, warm_up, facts)
