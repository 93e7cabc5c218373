"""Another user of this machine, who tries to be a rank of somebody's run.

Victims are real runs of `run.py`, started as a launcher starts ranks; the stranger is a process that has given up root.
What an attacker would look for in /proc is told to it, so that it meets no other process of this machine: the ports
that the victim's processes listen on.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 # what a stranger may not import any more
import os
import runpy
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from harness.worker import rendezvous
from tests.support import programs
from tests.support.forking import fork_ranks
from tests.support.mutants import Slip

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SMALL = ("train.warmup_steps=0", "data.seq_len=32", "model.num_layers=1", "model.dim=32")
PATIENCE_S = 120.0
SECONDS = 200.0
"""For a whole trial."""
SLIPS = {
    "a port on one host": Slip(rendezvous, "is_one_host", 'environment.get("LOCAL_WORLD_SIZE") == ', '"" == '),
}


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    codes: exit codes of the genuine ranks, 0 for one that was not started. said: what they printed.
    """

    codes: list[int]
    said: str
    loot: dict[str, str]
    """What the stranger left, by file."""
    left: list[str]
    """Folders of meetings that are still there."""


def attacked(launcher: dict[str, str], slip: str = "") -> Outcome:
    """A run of two ranks and a stranger, the ranks started with these variables; none: `run.py` starts them itself."""
    with _shared_folder() as folder:
        codes = fork_ranks(_be, 3, folder, launcher, slip, seconds=SECONDS, first_failure_ends_all=True)
        said = "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))
        loot = {path.name: path.read_text() for path in (folder / "loot").iterdir()}
        left = [path.name for path in folder.glob("runs/*/*/attempts/*/rendezvous-*")]
        return Outcome([codes[0], codes[2]], said, loot, left)


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    """A folder that others may look into, as many a home; in it, one they may write to."""
    with tempfile.TemporaryDirectory(prefix="attacked-") as name:
        folder, loot = Path(name), Path(name, "loot")
        folder.chmod(0o755)
        loot.mkdir()
        loot.chmod(0o777)
        yield folder


# -- in the forks ------------------------------------------------------------------------------------------------------


def _be(number: int, folder: Path, launcher: dict[str, str], slip: str) -> None:
    """Rank 0; the stranger; rank 1, which comes late."""
    if number == 1:
        _stranger(folder)
    elif not launcher:
        if number == 0:
            words, out = [str(ROOT / "run.py"), *SMALL, "train.steps=20"], str(folder / "0.txt")
            programs._be(0, words, str(folder), dict(os.environ), out, out, folder / "pid")
    else:
        rank = number // 2
        if rank:
            _await(lambda: (folder / "loot" / "done").exists())
        _run(folder, {**launcher, "RANK": str(rank), "LOCAL_RANK": "0"}, slip, f"{rank}.txt")


def _run(folder: Path, variables: dict[str, str], slip: str, output: str) -> None:
    """Never returns."""
    if slip:
        SLIPS[slip].put(pytest.MonkeyPatch())
    os.environ.update(variables, OMP_NUM_THREADS="1")
    os.chdir(folder)
    written = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(written, 1)
    os.dup2(written, 2)
    if output == "0.txt":
        (folder / "pid").write_text(str(os.getpid()))
    sys.argv = ["run.py", *SMALL, "train.steps=2"]
    runpy.run_path(str(ROOT / "run.py"), run_name="__main__")


def _stranger(folder: Path) -> None:
    loot = folder / "loot"
    try:
        _await(lambda: bool(_listening(folder)))
        attempt = next(folder.glob("runs/*/*/attempts/0"))
        time.sleep(0.2)  # gloo's port comes after the store's
        ports = _listening(folder)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        (loot / "heard").write_text(" ".join(sorted({host for host, _ in ports})))
        for path in (attempt, next(iter(attempt.parent.glob("0/rendezvous-*")), attempt)):
            with contextlib.suppress(PermissionError):
                os.listdir(path)
                (loot / "looked").write_text(str(path))
        found = next((port for _, port in ports if _is_store(port)), None)
        if found is not None:
            (loot / "store").write_text("answers")
    except BaseException:
        (loot / "error").write_text(traceback.format_exc())
    (loot / "done").write_text("")
    os._exit(0)


def _listening(folder: Path) -> list[tuple[str, int]]:
    """Addresses that the victim's processes listen on, in the order of their descriptors."""
    try:
        victim = psutil.Process(int((folder / "pid").read_text()))
        found = [each for one in [victim, *victim.children(recursive=True)] for each in one.net_connections("tcp")]
    except (FileNotFoundError, ValueError, psutil.Error):
        return []
    listening = sorted((each for each in found if each.status == psutil.CONN_LISTEN), key=lambda each: each.fd)
    return [(each.laddr.ip, each.laddr.port) for each in listening]


def _is_store(port: int) -> bool:
    """Whether a TCPStore answers there."""
    magic, ping, nonce = struct.pack("<BI", 0, 0x3C85F7CE), bytes([13]), struct.pack("<I", 7)
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as probe:
        probe.sendall(magic + ping + nonce)
        return probe.recv(4) == nonce
    return False


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.1)
