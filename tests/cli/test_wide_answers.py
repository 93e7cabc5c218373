"""What `rehearse` and `bisect` print fits a terminal of 80 or 60 columns, and is whole in a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import bisect, rehearse
from harness.store.screen import UNLIMITED
from harness.study.rehearse import Rehearsal

MOVED = "step 7: comm.all_gather.bytes is 123456789 in what was stopped and 123456788 in what was not " * 2
REHEARSED = Rehearsal(6, Path("runs/a"), Path("runs/a"), steps=20, numbers=900, differences=(MOVED, MOVED))
TRIED = (
    "\nversion 3 of about 9: 0a1b2c3d Change something of no importance whatsoever to anybody: EQUAL, the same files"
)


def said(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    if verb == "bisect":
        bisect._tell(TRIED)
        return capsys.readouterr().out
    return rehearse.text(REHEARSED)


@pytest.mark.parametrize("verb", ["rehearse", "bisect"])
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
