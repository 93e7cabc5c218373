"""Standard streams of a command: closed ones, old encodings, `| head`."""

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
    """True if the printed text is the purpose of the command; a done run stays done without its log."""


@contextmanager
def standard_streams() -> Iterator[Output]:
    """Guard the standard streams of a command.

    A closed stream becomes /dev/null before another file can take its number, which children would inherit. Unencodable
    characters and terminal controls (`Visible`) are escaped. Output is flushed here: at the interpreter's exit, a
    closed reader would be an error.

    Raises `OSError`: needed output cannot be written, as to a full disk.
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
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        if not isinstance(error, BrokenPipeError):
            return OSError(error.errno, error.strerror, "standard output")
    return None
