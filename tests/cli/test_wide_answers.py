"""What `rehearse`, `bisect` and the power study print fits a terminal of 80 or 60 columns, and is whole in a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.power import first_steps
from benchmarks.power.published import RULES
from benchmarks.power.score import Judged
from harness.cli import bisect, rehearse
from harness.store.screen import UNLIMITED
from harness.study.rehearse import Rehearsal
from tests.faults.corpus import corpus

NAME = max(corpus(), key=len)
JUDGED = [
    Judged(
        kind=kind,
        fault=NAME,
        strength="full",
        against="its baseline in the same mesh",
        held_out=False,
        outcome="DIFFERENT",
        tier="T2",
        step=12,
        named="gradient reduction",
        stage="optimizer",
        sentence="",
        published={rule.name: True for rule in RULES},
    )
    for kind in ("faulty", "clean")
]
MOVED = "step 7: comm.all_gather.bytes is 123456789 in what was stopped and 123456788 in what was not " * 2
REHEARSED = Rehearsal(6, Path("runs/a"), Path("runs/a"), steps=20, numbers=900, differences=(MOVED, MOVED))
TRIED = (
    "\nversion 3 of about 9: 0a1b2c3d Change something of no importance whatsoever to anybody: EQUAL, the same files"
)


def said(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    if verb == "bisect":
        bisect._tell(TRIED)
        return capsys.readouterr().out
    return first_steps.text(JUDGED) if verb == "power" else rehearse.text(REHEARSED)


@pytest.mark.parametrize("verb", ["power", "rehearse", "bisect"])
def test_it_fits_and_loses_nothing(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(UNLIMITED))
    words = sorted(said(verb, capsys).split())
    for columns in (80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        found = said(verb, capsys)
        assert max(len(line) for line in found.splitlines()) <= columns
        assert sorted(word for word in found.split() if set(word) != {"-"}) == [w for w in words if set(w) != {"-"}]
