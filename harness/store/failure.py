"""Failures of a run: one file a rank (of a hang its stacks), and the rule that separates the cause from its echoes.

When a rank dies, the others lose their connection and fail too; the report puts the cause first and each echo on a
line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.store.reading import folder_names, read_text

ECHOES = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|timed out waiting|wait timeout|recvfailed|"
    r"remote process exited|failed to (recv|connect)|read error .*peer|ncclremoteerror|ncclsystemerror|"
    r"communicator (encountered|was aborted)|heartbeat|the server socket has failed",
    re.IGNORECASE,
)
LOSERS = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "CollectiveError"}
)
"""Errors of a rank that lost a peer: torch's, and our engine's around one of them."""
SILENT_PEER = "its peer left no traceback: killed, perhaps for memory, or its node died"
REPORT = "error.txt"
HANG = "hang: "
_RANK_FILE = re.compile(r"(?:error|stacks)-rank([0-9]{1,9})\.txt")
_HANG = re.compile(r"(after step \d+)\nTimeout \(([\d:.]+)\)!\n")
"""Begin of stacks: what the rank wrote at its last step, and `faulthandler` before them."""


@dataclass(frozen=True)
class Failure:
    rank: int
    text: str
    when: float = 0.0
    """Seconds, on one clock for all ranks of a run."""

    @property
    def echo(self) -> bool:
        """True if the traceback is only about a lost peer: one of `LOSERS`, with one of `ECHOES`."""
        message = _message(self.text)
        kind = message.partition(":")[0].rpartition(".")[2]
        return kind in LOSERS and ECHOES.search(message) is not None

    @property
    def is_hang(self) -> bool:
        return self.text.startswith(HANG)

    def summary(self) -> str:
        return f"rank {self.rank}: {last_line(self.text)}"


def last_line(text: str) -> str:
    return (_message(text).splitlines() or ["unknown"])[0].strip()[:300]


def _message(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    headers = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not headers:
        return "\n".join(lines[:1])
    after = lines[headers[-1] + 1 :]
    start = next((index for index, line in enumerate(after) if not line.startswith(" ")), 0)
    return "\n".join(after[start:])


def rank_file(attempt: Path, rank: int) -> Path:
    return attempt / f"error-rank{rank}.txt"


def stacks_file(attempt: Path, rank: int) -> Path:
    return attempt / f"stacks-rank{rank}.txt"


def forget(attempt: Path, rank: int) -> None:
    """Remove what a rank told of its end at an earlier start (a requeue) of this attempt."""
    rank_file(attempt, rank).unlink(missing_ok=True)
    stacks_file(attempt, rank).unlink(missing_ok=True)
    if rank == 0:
        (attempt / REPORT).unlink(missing_ok=True)


def collect(attempt: Path) -> list[Failure]:
    found = []
    for name in folder_names(attempt):
        number = _RANK_FILE.fullmatch(name)
        text = read_text(attempt / name) if number else None
        if text is not None and name.startswith("stacks"):
            text = _HANG.sub(rf"{HANG}no step for \2 \1\n", text) if _HANG.match(text) else None
        if number and text is not None:
            found.append(Failure(int(number[1]), text, (attempt / name).stat().st_mtime))
    return ordered(found)


def ordered(failures: Sequence[Failure]) -> list[Failure]:
    return sorted(failures, key=lambda failure: (failure.echo, failure.when, failure.rank))


def report(failures: Sequence[Failure]) -> str:
    cause, *others = failures
    lines = [f"rank {cause.rank} failed first:", "", cause.text.rstrip(), ""]
    for other in others:
        lines += [f"then rank {other.rank}: {other.text}" if other.is_hang else f"then {other.summary()}"]
    return "\n".join(lines).rstrip() + "\n"
