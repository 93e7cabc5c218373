"""What `benchmarks/costs/peers_step.py` writes, on a model so small that its times mean nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.costs import peers_step
from benchmarks.costs.peers_step import ARMS, DDP, DEFAULTS, FSDP2, STEPS

TURNS = 3


@pytest.mark.full
@pytest.mark.parametrize("apart", [False, True])
def test_what_is_written_is_what_is_printed(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "peers_step.json"
    monkeypatch.setattr(peers_step, "SHAPES", {"tiny": (64, 64, 8)})
    monkeypatch.setattr(sys, "argv", ["", "tiny", f"--turns={TURNS}", f"--out={path}", *["--apart"] * apart])
    peers_step.main()
    told = json.loads(path.read_text(encoding="utf-8"))
    assert (told["apart"], told["turns"], told["steps"]) == (apart, TURNS, STEPS)
    rows = told["rows"]["tiny"]
    assert [*rows] == [arm for arm in ARMS if not (apart and arm.endswith(DEFAULTS))]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny")]
    for line, (arm, row) in zip(printed, rows.items(), strict=True):
        wall, cpu = (float(figure) for figure in line.removeprefix("tiny").replace(arm, "", 1).split()[:2])
        assert (wall, cpu) == (row["wall_ms"], row["cpu_ms"])
        assert cpu > 0
        for other, key in ((DDP, "to_ddp"), (FSDP2, "to_fsdp2")):
            assert row[key]["value"] == pytest.approx(wall / rows[other]["wall_ms"], rel=0.02)
            assert row[key]["low"] <= row[key]["value"] <= row[key]["high"]


@pytest.mark.parametrize("words", [["no such shape"], ["compute", "--turns=2"]])
def test_what_cannot_be_measured_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["", *words])
    with pytest.raises(SystemExit):
        peers_step.main()
