"""From a frozen cell to an exit code: the composition root of a rank.

Torch is imported late, after the rank is tied to its launcher and handles signals: an impatient user interrupts during
that import.
"""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.derived import library_environment
from harness.config.schema import Config, MeasureMode
from harness.config.typed import load_config
from harness.store.rank_place import RankPlace, rank_place, rendezvous_file
from harness.store.rundir import RunDir
from harness.store.screen import counted
from harness.store.status import State
from harness.worker.report import Listener, Reporter
from harness.worker.stop import Fate, StopFlag, fate_of, hold_on, requeue

if TYPE_CHECKING:
    from harness.engines.protocol import Ranks
    from harness.train import Outcome

DONE, FAILED, PREEMPTED, INTERRUPTED = 0, 1, 75, 130


def main(run_dir: Path, attempt: int, place: RankPlace | None = None, listener: Listener | None = None) -> int:
    """Be one rank of an attempt whose folder exists; returns the exit code.

    0 done, 1 failed, 75 preempted, 130 cancelled or interrupted. A KeyboardInterrupt, of a second Ctrl-C, is passed on.
    Args: place: from the environment by default. listener: of a `Reporter`, for a rank that is its own front end.
    """
    place = place or rank_place(os.environ)
    hold_on(os.environ)
    reporter = Reporter(run_dir, attempt, place, listener)
    later = signal.default_int_handler if place.world_size == 1 else signal.SIG_DFL
    stop = StopFlag(None if place.watched else later)
    try:
        stop.listen()
        if not place.watched:
            stop.watch_cancel(run_dir, attempt)
        # one believed lost and its successor must not write side by side
        alone = place.launcher == "slurm" and place.job and place.rank == 0
        owned: AbstractContextManager[object] = RunDir(run_dir).lock(timeout_s=10) if alone else nullcontext()
        with owned, reporter.relaying("harness"):
            return _run(RunDir(run_dir), place, reporter, stop)
    except Exception as error:
        reporter.failed(error)
        return FAILED
    finally:
        stop.restore()


def _run(run: RunDir, place: RankPlace, reporter: Reporter, stop: StopFlag) -> int:
    config = load_config(run.config())
    asked, started = config.mesh.world_size, place.world_size
    if asked != started:
        found = f"{place.launcher} started {counted(started, 'rank')}"
        raise ValueError(f"mesh.world_size={asked}, but {found}; start {asked}, or ask for mesh.world_size={started}")
    if reporter.is_superseded():
        return INTERRUPTED
    reporter.started()
    with reporter.watching(config.launch.hang_timeout_s):
        if place.launcher in ("torchrun", "slurm"):  # nobody who knows this cell may have set it; torch reads it now
            os.environ.update(library_environment(config, reporter.folder))
        from harness.worker import connect

        device = connect.set_up_torch(config, place)
        reporter.alive()
        planned = _planned(config, reporter) if place.rank == 0 else None
        ranks = connect.join(config, place, reporter.folder, device)
        reporter.alive()
        try:
            outcome = _train(run, config, ranks, stop, reporter, planned)
            # Before the last meeting: a rank that exits 75 early would have srun kill rank 0 while it requeues.
            code = _finish(run, place, reporter, stop, outcome)
            connect.leave(ranks, rendezvous_file(reporter.folder, place.start))
        finally:
            if place.launcher == "inline":
                connect.abandon()
    return code


def _planned(config: Config, reporter: Reporter) -> dict[str, int | None] | None:
    """Bytes that a timed run should keep, hold at most and send; None for others. Before ranks meet: a plan has process
    groups of its own."""
    if config.measure.mode is not MeasureMode.bench:
        return None
    from harness.plan.planned import totals

    try:
        return totals(config)
    except Exception as error:  # whatever a model of the user's does on the meta device
        reporter.warn(f"no plan to hold this run's memory against: {error!r}")
        return None


def _train(
    run: RunDir,
    config: Config,
    ranks: Ranks,
    stop: StopFlag,
    reporter: Reporter,
    planned: dict[str, int | None] | None,
) -> Outcome:
    import torch.distributed as dist

    from harness.data.loader import Loader
    from harness.engines.protocol import engine_class
    from harness.models.workload import workload_for
    from harness.probe.meters import Meters
    from harness.probe.network import without_effect
    from harness.train import Session, run as train, timed_workload
    from harness.train.faults import build_session
    from harness.worker import origin

    if ranks.rank == 0 and (warning := without_effect(config, dist.get_backend())) is not None:
        reporter.warn(warning)
    control = dist.new_group(backend="gloo") if ranks.world_size > 1 else None
    resuming = any(run.ckpt.glob("*"))
    origin.record(run.path, ranks, control, resuming=resuming)
    if config.launch.preempt_at and not resuming:
        stop.rehearse(config.launch.preempt_at)
    origin.find_own(run.path)
    begun = origin.kernels()
    timed = config.measure.mode is MeasureMode.bench
    with Meters(ranks.device, follow_storage=timed) as meters:  # before the engine: it counts what the engine issues

        def build() -> Session:
            workload = timed_workload(workload_for(config), meters.timers, reporter.alive)
            engine = engine_class(config.engine.name, config.engine.adapter)(workload, config, ranks)
            loader = Loader(config, ranks.data_rank)
            signs = reporter.step, reporter.warn, reporter.alive
            return Session(config, ranks, engine, loader, meters, control, run.path, stop, *signs, planned)

        session = build_session(config, build)
        try:
            outcome = train(session)
        finally:
            session.engine.close()
    origin.record_kernels(run.path, ranks.rank, control, begun)
    return outcome


def _finish(run: RunDir, place: RankPlace, reporter: Reporter, stop: StopFlag, outcome: Outcome) -> int:
    if outcome.status == "done":
        loss = f"; loss not finite at step {reporter.diverged[0]}" if reporter.diverged else ""
        reporter.ended(State.done, f"{counted(outcome.step, 'step')}{loss}")
        return DONE
    saved = f"saved at step {outcome.step}" if outcome.saved else f"not saved, stopped after step {outcome.step}"
    reason = f"{stop.reason or 'another rank was asked to stop'}; {saved}"
    # The warning before the time limit is no cancellation, even where saving took until the limit itself.
    warned = stop.first is signal.SIGUSR2
    fate = fate_of(place) if place.rank == 0 else Fate()
    if stop.cancelled or stop.first is signal.SIGINT or (fate.cancelled and not warned):
        reporter.ended(State.cancelled, reason)
        return INTERRUPTED
    reporter.ended(State.preempted, reason)
    if place.rank == 0 and place.job and not fate.requeued:
        requeue(place, run.path)
    return PREEMPTED
