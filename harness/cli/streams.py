"""Standard streams of a command, whoever started it and whoever reads: closed ones, an old encoding, `| head`."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from harness.store.screen import filtered

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Output:
    needed: bool = True
    """True if the printed text is what the command is for: a run that is done is done, whatever became of its log."""


@contextmanager
def standard_streams() -> Iterator[Output]:
    """Around all of a command.

    A closed stream becomes /dev/null before a file of ours can take its number, which children would be given as their
    input or output. A character that the output's encoding lacks is written as an escape. What was printed is written
    out here: left to the interpreter's end, a reader that has seen enough would be an error. What a terminal would obey
    is written as an escape, too (`Visible`).

    Raises:
        OSError: what was printed is needed and cannot be written, as to a full disk.
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _writes_anything(stream):
            stream.reconfigure(errors="backslashreplace")
    logging.raiseExceptions = False  # Hydra's --info prints by it, with a traceback a line that cannot be written
    output = Output()
    try:
        with filtered():
            yield output
    except OSError as error:
        # One without a file may come of an output that keeps nothing back (python -u): another line tells.
        lost = _write_out("\n" if error.errno in NO_ROOM and error.filename is None else "")
        if lost and output.needed:
            raise lost from error
        raise
    except BaseException as end:
        lost = _write_out()
        if lost and output.needed and isinstance(end, SystemExit) and not end.code:  # as `--help` ends
            raise lost from None
        raise
    if lost := _write_out():
        if output.needed:
            raise lost
        print(f"{lost.filename}: {lost.strerror}", file=sys.stderr)


def _open_closed() -> None:
    """In ascending order: a file gets the lowest number that is free."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open as long as we run
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _writes_anything(stream: io.TextIOWrapper) -> bool:
    if stream.encoding.lower() in ("utf-8", "utf8"):
        return stream.errors != "strict"  # bytes of a path that are no text are no UTF-8 either
    return stream.errors in ("backslashreplace", "replace", "ignore", "namereplace", "xmlcharrefreplace")


def _write_out(more: str = "") -> OSError | None:
    """Error that keeps the output, and `more`, from being written; None also where its reader has left."""
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        if not isinstance(error, BrokenPipeError):
            return OSError(error.errno, error.strerror, "standard output")
    return None
