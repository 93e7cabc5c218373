"""Train one cell, or a set of them (`python run.py --help`).

Alone it composes, freezes and launches. Started as one rank (torchrun, srun) it is that rank: rank 0 composes, freezes
and publishes the run, the others wait for it. Torch is imported only once a request is valid.
"""

import gc
import os
import signal
import sys

from harness.store import interpreter

if __name__ == "__main__":  # asked to end while we import: nothing has begun that must end
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, lambda number, _: os._exit(130 if number == signal.SIGINT else 75))
    interpreter.require()
    gc.set_threshold(interpreter.RARELY)

os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, to be explained, instead of being printed by Hydra

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from harness.cli.arguments import Arguments, read_arguments
from harness.cli.failure import exit_code, listen_to_interrupts, request_errors, standard_streams, tell
from harness.cli.main import request_help
from harness.config.catalog import ROOT
from harness.config.compose import compose, compose_cell, register
from harness.config.errors import refuse
from harness.config.hydra_settings import check_hydra
from harness.store import commands
from harness.store.rank_place import STOP_SIGNALS, RankPlace, rank_place
from harness.store.screen import unfiltered
from harness.study.cells import register as register_study
from harness.study.rendezvous import LINGER_S, Answer, ask, lead, publish, rendezvous_folder, shared_root
from harness.study.replay import replay_run
from harness.study.request import JobFailed, carry_out, refuse_study, run_job


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="config")
def train(cfg: DictConfig) -> float | None:
    """Freeze one cell and carry it out; a sweeper of Hydra's is given its objective (`study.objective`)."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        return run_job(cfg)
    overrides = list(HydraConfig.get().overrides.task)
    try:
        check_hydra(HydraConfig.get(), multirun=False)
        raise SystemExit(carry_out([compose_cell(cfg, overrides)]))
    except request_errors() as error:  # Hydra would announce it before we can explain it
        raise SystemExit(_told(error)) from None


def main(argv: list[str]) -> int:
    """Exit code of a command line."""
    place: RankPlace | None = None
    try:
        with standard_streams() as output:
            listen_to_interrupts()
            place = _place()
            if place.launcher == "torchrun" or place.world_size > 1:
                output.needed = False
                return as_rank(argv, place)
            arguments = read_arguments(argv)
            output.needed = arguments.starts_nothing
            return request(arguments)
    except JobFailed as error:
        print(error, file=sys.stderr)
        return int(error.args[0])
    except request_errors() as error:
        return _told(error) if place is None or place.rank == 0 else exit_code(error)
    except KeyboardInterrupt:
        return 130


def _told(error: Exception) -> int:
    # `run.py launch.dry_run=true | head`: the reader has seen enough
    return 0 if isinstance(error, BrokenPipeError) else tell(error)


def _place() -> RankPlace:
    """Raises `BadRequest`: a launcher's variable is missing, or is not a number."""
    try:
        return rank_place(os.environ)
    except (KeyError, ValueError) as error:
        fix = "unset RANK WORLD_SIZE, or start by torchrun or srun"
        raise refuse("RANK, WORLD_SIZE, SLURM_*", f"no launcher would set this: {error}", fix=fix) from None


def request(arguments: Arguments) -> int:
    """Compose and carry out a request; what Hydra runs (`train`, the sweeper) ends the process with its exit code."""
    if arguments.help:
        print(request_help())
        return 0
    if arguments.frozen is not None:
        return carry_out([replay_run(arguments.frozen, arguments.overrides)])
    register()
    register_study(arguments.overrides)
    if not arguments.shows and not arguments.multirun:
        refuse_study(arguments.overrides)
    sys.argv[1:] = arguments.for_hydra
    try:
        train()
    except RecursionError:
        problem = "files of your own options name each other without end"
        raise refuse("defaults", problem, fix="leave `defaults` out of them") from None
    return 0


def as_rank(argv: list[str], place: RankPlace) -> int:
    """Run as one rank under a launcher, whose number of ranks is the default."""
    arguments = read_arguments(argv, implied=[f"mesh.world_size={place.world_size}"])
    if arguments.multirun:
        problem = f"makes many cells, and {place.launcher} started the ranks of one"
        raise refuse("-m", problem, fix=commands.request("-m ..."))
    if arguments.starts_nothing:
        return 0 if place.rank else request(arguments)
    folder = rendezvous_folder(shared_root(arguments.overrides), os.environ)
    if place.rank:
        return work(ask(folder, place), place)
    try:
        return open_and_work(arguments, folder, place)
    except Exception as error:
        code = exit_code(error) if isinstance(error, request_errors()) else 1
        publish(folder, place, Answer(exit_code=code)).join(LINGER_S)
        raise


def open_and_work(arguments: Arguments, folder: Path, place: RankPlace) -> int:
    if arguments.frozen is not None:
        cell = replay_run(arguments.frozen, arguments.overrides)
    else:
        register_study(arguments.overrides)
        refuse_study(arguments.overrides)
        cell = compose(arguments.overrides)
    # From here on a status says that the run is running: a request to stop waits for the worker, which listens.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    answer, lock = lead(cell)
    published = publish(folder, place, answer)
    print(answer.message, flush=True)
    if answer.exit_code is not None:
        published.join(LINGER_S)
    if lock is not None and place.launcher == "slurm":
        lock.release()  # a rank of a job takes the run's lock itself
    return work(answer, place)


def work(answer: Answer, place: RankPlace) -> int:
    if answer.exit_code is not None:
        return answer.exit_code
    gc.set_threshold(*interpreter.USUAL)  # as in ranks of a server: what torch leaves in circles holds memory
    from harness.launch.terminal import RunDisplay, Terminal
    from harness.store.rundir import RunDir
    from harness.worker import main as worker

    steps = RunDir(Path(answer.run)).setting("train.steps")
    display = RunDisplay(Terminal(), steps) if place.rank == 0 else None
    place = replace(place, start=place.start or answer.start)
    with unfiltered():
        code = worker(Path(answer.run), answer.attempt, place, display)
    if place.rank == 0:
        print(f"next: {commands.verb(f'show {shlex.quote(str(answer.run))}')}")
    with contextlib.suppress(OSError):  # a log on a full disk must not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # threads of a process group must not keep a finished rank alive


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
