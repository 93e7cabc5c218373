"""Machines that broke runs: a line each time in `<root>/.nodes.jsonl`, and which of them no job is sent to any more.

A machine is blamed when SLURM calls it down after a job died on it, or when what a rank died of is a machine's fault: a
device that is gone, memory errors, a bus error. An exception of the run's own blames nobody.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.store.errors import StoreError
from harness.store.reading import read_text

FILE = ".nodes.jsonl"
TIMEOUT_S = 60.0
STRIKES = 2
"""After how many broken starts a node is left out."""
WHY = f"each broke {STRIKES} starts; {FILE} under the root says which: take its lines out to use it again"

OF_THE_MACHINE = re.compile(
    r"uncorrectable (ecc )?error|ecc error|no cuda-capable device|cuda driver initialization failed|"
    r"device.* (is lost|fell off the bus)|fallen off the bus|nvlink error|xid|unspecified launch failure|"
    r"system (not yet|driver) initialized|input/output error|remote i/o error|stale file handle|bus error",
    re.IGNORECASE,
)
"""What drivers and kernels say of broken hardware, whatever the program does."""


def blame(root: Path, node: str, run: str, start: str, why: str) -> None:
    """Note that a node broke one start of a run; the same start is counted once however often it is told.

    Args:
        root: the store's root.
        node: its name in SLURM.
        run: the run's `study/name`.
        start: tells this start from other starts of the run: a job's number and how often it was requeued.
        why: one line.
    """
    when = datetime.now(UTC).isoformat(timespec="seconds")
    told = {"node": node, "run": run, "start": start, "why": why, "when": when}
    with (root / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")


def broken(nodelist: str, *, alone: bool = True) -> list[str]:
    """Nodes of a job that a failing node ended which SLURM calls down, drained or silent.

    Args:
        nodelist: the job's nodes as SLURM writes them, `n[1-3]`.
        alone: whether a job's only node is to blame even where it is up again.
    """
    if alone and _NODE.fullmatch(nodelist):
        return [nodelist]
    command = ["sinfo", "--noheader", "--Node", f"--nodes={nodelist}", "--format=%N|%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    pairs = (line.partition("|")[::2] for line in done.stdout.splitlines()) if nodelist else ()
    return sorted({node for node, state in pairs if _DOWN.search(state)})


_DOWN = re.compile(r"down|drain|fail|error|\*")
"""SLURM's words for nodes that cannot be used; a star means that it does not answer."""


def is_of_the_machine(message: str) -> bool:
    """Whether the last line of a traceback blames the machine rather than the program."""
    return OF_THE_MACHINE.search(message) is not None


def excluded(root: Path) -> tuple[str, ...]:
    """Nodes that broke `STRIKES` starts or more, sorted; none where the record cannot be read."""
    starts: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for told in _records(root):
        starts[told["node"]].add((told["run"], told["start"]))
    return tuple(sorted(node for node, broken in starts.items() if len(broken) >= STRIKES))


_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def _records(root: Path) -> Iterable[dict[str, Any]]:
    """Whole records; a line that is none (a crash, an editor) hides no other."""
    try:
        lines = (read_text(root / FILE) or "").splitlines()
    except StoreError:
        return
    for line in lines:
        try:
            told = json.loads(line)
        except (ValueError, RecursionError):
            continue
        whole = isinstance(told, dict) and all(isinstance(told.get(key), str) for key in ("node", "run", "start"))
        if whole and _NODE.fullmatch(told["node"]):
            yield told
