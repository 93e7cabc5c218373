"""Agreement of the ranks of one `torchrun run.py` or `srun run.py` on a run: rank 0 composes, the others ask it.

Ranks share a file system and the launcher's names for this start only. Each rank leaves a question with a random word;
rank 0 answers every question. So no answer of an earlier start is accepted, and none of another user, because an answer
leads to code that ranks execute.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.config.compose import Cell
from harness.config.overrides import typed_value
from harness.config.schema import LaunchConfig
from harness.launch.opening import Decision, Sources, open_here
from harness.store.files import Lock, private_folder, write_json
from harness.store.rank_place import RankPlace
from harness.store.reading import read_json
from harness.store.rundir import Store
from harness.store.screen import counted

ANSWER_TIMEOUT_S = 600.0
"""Seconds that a rank waits for rank 0: machines load the environment at very different speeds."""
LINGER_S = 10.0
"""Seconds that rank 0 stays after a refusal, so that the others end with its reason."""
_POLL_S = 0.05
_NAMES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")


@dataclass(frozen=True)
class Answer:
    exit_code: int | None = None
    message: str = ""
    """Message of rank 0 to the user."""
    run: str = ""
    attempt: int = 0
    start: str = ""


def rendezvous_folder(root: Path, environment: Mapping[str, str]) -> Path:
    names = "\n".join(f"{name}={environment.get(name, '')}" for name in _NAMES)
    return root / ".rendezvous" / hashlib.sha256(names.encode()).hexdigest()[:16]


def publish(folder: Path, place: RankPlace, answer: Answer) -> threading.Thread:
    """Answer every other rank's question; the thread ends when all have read it."""

    def serve() -> None:
        answered: set[Path] = set()
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline and sum(not each.exists() for each in answered) < place.world_size - 1:
            for question in set(folder.glob("ask-*")) - answered:
                with contextlib.suppress(OSError):
                    write_json(question.with_name(question.name.replace("ask-", "answer-")), asdict(answer))
                    answered.add(question)
            time.sleep(_POLL_S)

    thread = threading.Thread(target=serve, name="rendezvous", daemon=True)
    thread.start()
    return thread


def ask(folder: Path, place: RankPlace, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
    """Ask rank 0, and wait.

    Raises `TimeoutError`: no answer within `timeout_s` seconds. `OSError`: the folder cannot be written. `StoreError`:
    another user has answered.
    """
    private_folder(folder)
    question = folder / f"ask-{place.rank}-{uuid.uuid4().hex}"
    question.touch()
    reply = question.with_name(question.name.replace("ask-", "answer-"))
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            found = read_json(reply, own=True)
            if found is not None:
                return Answer(**found)
            time.sleep(_POLL_S)
        raise TimeoutError(
            f"rank {place.rank} waited {timeout_s:g} s for rank 0 to say which run this is; see rank 0's output"
        )
    finally:
        for path in (question, reply):
            with contextlib.suppress(OSError):
                path.unlink()


def shared_root(overrides: Sequence[str]) -> Path:
    root = str(typed_value(overrides, "launch.root", LaunchConfig.root))
    return Path(os.path.abspath(os.path.expanduser(root)))


def lead(cell: Cell) -> tuple[Answer, Lock | None]:
    """Open the attempt of this start on rank 0, with the run's lock.

    Raises `StoreError`: another process runs this very cell.
    """
    opened = open_here(Store(cell.typed.launch.root), cell, Sources.gather(), None)
    if isinstance(opened, Decision):
        path = Store(cell.typed.launch.root).path_of(cell)
        return Answer(exit_code=0, message=f"nothing to run: {path} is {opened.why}"), None
    attempt, lock = opened
    message = f"{attempt.run.path}: {counted(cell.typed.mesh.world_size, 'rank')}, attempt {attempt.attempt}"
    start = secrets.token_hex(8)
    return Answer(message=message, run=str(attempt.run.path), attempt=attempt.attempt, start=start), lock
