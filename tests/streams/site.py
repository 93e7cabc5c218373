"""Which line of the engine, or of the program that uses it, asked for what is being done."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from torch import Tensor

from harness.fsdp.comm import events
from tests.streams.log import Site

ROOT = f"{Path(__file__).resolve().parents[2]}/"
PASSED_ON = ("harness/fsdp/comm/device.py", "harness/fsdp/comm/events.py")
"""Files whose callers are the ones who asked."""
PASSING = (("harness/fsdp/comm/communicator.py", "wait"), ("harness/fsdp/comm/communicator.py", "receive"))
"""Functions of which the same is true."""
OWN = "tests/streams/"
TORCHS = "torch/distributed/fsdp/_fully_shard/"
PROGRAMS = ("tests/streams/programs.py", "tests/streams/steps.py")
NOWHERE = Site("", 0, "")


def site() -> Site:
    """The line that asked for what is being done, and what it is about."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = _file_of(frame.f_code)
        if file and (file, frame.f_code.co_name) not in PASSING:
            label = events.current()
            return Site(file, frame.f_lineno, frame.f_code.co_name, label.bucket if label else _about(frame))
        frame = frame.f_back
    return NOWHERE


@cache
def _file_of(code: CodeType) -> str:
    """Where code lies in this repository; empty where nobody asks from there."""
    name = code.co_filename
    if TORCHS in name:
        return name[name.index(TORCHS) :]
    if not name.startswith(ROOT):
        return ""
    name = name.removeprefix(ROOT)
    if name in PASSED_ON or (name.startswith(OWN) and name not in PROGRAMS) or name.startswith(".venv"):
        return ""
    return name


def _about(frame: FrameType | None) -> str:
    """The bucket that a frame of the engine, or one of those that called it, is busy with."""
    for _ in range(8):
        if frame is None or not (file := frame.f_code.co_filename.removeprefix(ROOT)).startswith(("harness/fsdp", OWN)):
            return ""
        held = frame.f_locals if not file.startswith(OWN) else {}
        for holder in (held.get("bucket"), held.get("self"), held.get("gradients")):
            found = getattr(getattr(holder, "bucket", None), "name", None) or getattr(holder, "name", None)
            if isinstance(found, str) and not isinstance(holder, Tensor):
                return found
        frame = frame.f_back
    return ""
