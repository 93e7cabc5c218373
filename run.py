"""Train one cell, or a set of them (`python run.py --help`).

Alone it composes, freezes and launches. Started as one rank (torchrun, srun) it is that rank: rank 0 composes, freezes
and publishes the run, the others wait for it. Torch is imported only once a request is valid.
"""

import os
import signal
import sys

from harness.store import interpreter

if __name__ == "__main__":  # asked to end while we import: nothing has begun that must end
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, lambda number, _: os._exit(130 if number == signal.SIGINT else 75))

if __name__ == "__main__":
    interpreter.require()

os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, to be explained, instead of being printed by Hydra

import contextlib
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hydra
from omegaconf import DictConfig

from harness.cli.arguments import Arguments, read_arguments
from harness.cli.failure import REQUEST_ERRORS, exit_code, listen_to_interrupts, tell
from harness.cli.help import request_help
from harness.cli.streams import standard_streams
from harness.config.catalog import ROOT
from harness.config.compose import Cell, compose_cell, register
from harness.config.errors import refuse
from harness.store import commands
from harness.store.rank_place import STOP_SIGNALS, RankPlace, rank_place
from harness.store.screen import unfiltered
from harness.study.file import register as register_study
from harness.study.meeting import Answer, Host, ask, lead, meeting_folder, shared_root
from harness.study.replay import replay_run
from harness.study.request import carry_out, refuse_study


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
            return request(arguments, lambda cell: carry_out([cell]))
    except BrokenPipeError:  # `run.py launch.dry_run=true | head`: the reader has seen enough
        return 0
    except REQUEST_ERRORS as error:
        return tell(error, argv) if place is None or place.rank == 0 else exit_code(error)
    except KeyboardInterrupt:
        return 130


def _place() -> RankPlace:
    """Raises `BadRequest`: a launcher's variable is missing, or is not a number."""
    try:
        return rank_place(os.environ)
    except (KeyError, ValueError) as error:
        told = f"no launcher would set this: {error}"
        raise refuse(
            "RANK, WORLD_SIZE, SLURM_*", told, fix="unset RANK WORLD_SIZE, or start by torchrun or srun"
        ) from None


def request(arguments: Arguments, run: Callable[[Cell], int]) -> int:
    """Compose and carry out a request; a set of cells (-m) goes through the sweeper, which ends the process."""
    if arguments.help:
        print(request_help())
        return 0
    if arguments.frozen is not None:
        return run(replay_run(arguments.frozen, arguments.overrides))

    composed: list[DictConfig] = []

    def keep(cfg: DictConfig) -> None:
        composed.append(cfg)  # and leave Hydra: it would announce an error before we can explain it

    register()
    register_study(arguments.overrides)
    sys.argv[1:] = arguments.for_hydra
    try:
        hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="config")(keep)()
    except RecursionError:
        told = "files of your own options name each other without end"
        raise refuse("defaults", told, fix="leave `defaults` out of them") from None
    if not composed:  # Hydra was asked to show something
        return 0
    refuse_study(arguments.overrides)
    return run(compose_cell(composed[0], arguments.overrides))


def as_rank(argv: list[str], place: RankPlace) -> int:
    """Run as one rank under a launcher, whose number of ranks is the default."""
    arguments = read_arguments(argv, implied=[f"mesh.world_size={place.world_size}"])
    if arguments.multirun:
        raise refuse(
            "-m", f"makes many cells, and {place.launcher} started the ranks of one", fix=commands.request("-m ...")
        )
    if arguments.starts_nothing:
        return 0 if place.rank else request(arguments, lambda cell: carry_out([cell]))
    folder = meeting_folder(shared_root(arguments.overrides), os.environ)
    if place.rank:
        return work(ask(folder, place), place)
    host = Host(folder, place)
    try:
        return request(arguments, lambda cell: open_and_work(cell, host, place))
    except Exception as error:
        host.publish(Answer(exit_code=exit_code(error) if isinstance(error, REQUEST_ERRORS) else 1))
        host.linger()
        raise


def open_and_work(cell: Cell, host: Host, place: RankPlace) -> int:
    # From here on a status says that the run is running: a request to stop waits for the worker, which listens.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    answer, lock = lead(cell)
    host.publish(answer)
    print(answer.message, flush=True)
    if answer.exit_code is not None:
        host.linger()
    if lock is not None and place.launcher == "slurm":
        lock.release()  # a rank of a job takes the run's lock itself
    return work(answer, place)


def work(answer: Answer, place: RankPlace) -> int:
    if answer.exit_code is not None:
        return answer.exit_code
    from harness.launch.terminal import RunDisplay, Terminal
    from harness.worker import main as worker

    display = RunDisplay(Terminal(), "") if place.rank == 0 else None
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
