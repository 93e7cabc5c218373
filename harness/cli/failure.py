"""Errors of the request -> one message and an exit code. Anything else is a bug, with its traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.config.doc import settings
from harness.config.errors import EXIT_BAD_REQUEST, BadRequest
from harness.config.hints import explain
from harness.store import screen
from harness.store.errors import Busy, StoreError
from harness.store.redaction import without_secrets

REQUEST_ERRORS = (BadRequest, StoreError, HydraException, OmegaConfBaseException, YAMLError, OSError)


def explained(error: Exception) -> str:
    if isinstance(error, BadRequest):
        return str(error)
    if isinstance(error, StoreError):
        return f"{'busy' if isinstance(error, Busy) else 'refused'}:\n  {error}"
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # a missing option of Hydra's is both
        return f"bad request:\n  {_of_the_machine(error)}"
    return str(explain(error))


def tell(error: Exception, words: Sequence[str] = ()) -> int:
    """Print the message of one of REQUEST_ERRORS; returns the exit code.

    Lines stay whole: a command can be copied, and grep finds all of one. Secrets, typed or in the environment, are
    masked.
    """
    message = screen.visible(without_secrets(explained(error), words, settings()))
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


def _of_the_machine(error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is None:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory is gone; change to another one (cd)"
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
