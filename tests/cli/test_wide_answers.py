"""What `bisect` prints fits a terminal of 80 or 60 columns, and is whole in a pipe."""

from __future__ import annotations

import pytest

from harness.cli import judge
from harness.store.screen import UNLIMITED

TRIED = (
    "\nversion 3 of about 9: 0a1b2c3d Change something of no importance whatsoever to anybody: EQUAL, the same files"
)


def test_it_fits_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(UNLIMITED))
    judge._tell(TRIED)
    words = sorted(capsys.readouterr().out.split())
    for columns in (80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        judge._tell(TRIED)
        found = capsys.readouterr().out
        assert max(len(line) for line in found.splitlines()) <= columns
        assert sorted(found.split()) == words
