"""Standard streams of a command (old encodings, full disks, `| head`); errors of the request: a message and a code.

Anything else is a bug, with its traceback.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from harness.config.errors import EXIT_BAD_REQUEST, BadRequest
from harness.config.hints import explain
from harness.store import screen
from harness.store.errors import Busy, StoreError
from harness.store.redaction import redacted


def request_errors() -> tuple[type[Exception], ...]:
    """Errors whose message is all that is shown. Hydra, slow to import, is known once something was raised."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    return BadRequest, StoreError, HydraException, OmegaConfBaseException, YAMLError, OSError


def explained(error: Exception) -> str:
    if isinstance(error, BadRequest):
        return str(error)
    if isinstance(error, StoreError):
        return f"{'busy' if isinstance(error, Busy) else 'refused'}:\n  {error}"
    if isinstance(error, OSError) and not type(error).__module__.startswith("hydra"):  # its missing options are both
        told = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        return f"bad request:\n  {told}"
    return str(explain(error))


def tell(error: Exception) -> int:
    """Print the message of one of `request_errors`; returns the exit code.

    Lines stay whole: a command can be copied, and grep finds all of one. Secrets are masked as in files.
    """
    message = screen.visible(redacted(explained(error)))
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:  # a log on a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what is left would be tried again at the end
    return exit_code(error)


def exit_code(error: Exception) -> int:
    return error.exit_code if isinstance(error, StoreError) else EXIT_BAD_REQUEST


def listen_to_interrupts() -> None:
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Output:
    needed: bool = True
    """True if the printed text is the purpose of the command; a done run stays done without its log."""


@contextmanager
def standard_streams() -> Iterator[Output]:
    """Guard the standard streams of a command.

    Unencodable characters and terminal controls (`Visible`) are escaped. Output is flushed here: at the interpreter's
    exit, a closed reader would be an error.

    Raises `OSError`: needed output cannot be written, as to a full disk.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.raiseExceptions = False  # Hydra's --info prints by it, with a traceback a line that cannot be written
    output = Output()
    try:
        with screen.filtered():
            yield output
    except BaseException as end:
        lost = _write_out()
        if lost and output.needed and isinstance(end, SystemExit) and not end.code:  # as `--help` ends
            raise lost from None
        raise
    if lost := _write_out():
        if output.needed:
            raise lost
        print(f"{lost.filename}: {lost.strerror}", file=sys.stderr)


def _write_out() -> OSError | None:
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        if not isinstance(error, BrokenPipeError):
            return OSError(error.errno, error.strerror, "standard output")
    return None
