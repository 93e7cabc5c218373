"""`make gpu` without a GPU: pieces run, are skipped once they are right, go on where they were cut off, and say what is
wrong; the page has a row for everything, measured or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import acceptance, lab
from benchmarks.gpu.acceptance import CUT_OFF, is_current, main
from benchmarks.gpu.lab import Lab, OutOfTime, Setting
from benchmarks.gpu.pieces import PIECES, Piece, files
from benchmarks.gpu.wheels import FOLDER, UNPACKED, bring
from benchmarks.pages import gpu as page
from tests.support.programs import run_command

REHEARSED = ["imports", "hang"]
"""Pieces that `make test` runs: the cheapest ones that start, judge and end ranks."""


def rehearse(folder: Path, *words: str) -> int:
    return main(["--device", "cpu", "--tiny", "--store", str(folder / "runs"), "--out", str(folder / "out"), *words])


def told(folder: Path, piece: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(files(folder / "out")[piece].read_text())
    return found


@pytest.mark.full
def test_pieces_run_as_on_a_gpu_and_are_skipped_once_they_are_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rehearse(tmp_path, "--pieces", ",".join(REHEARSED)) == 0
    result = told(tmp_path, "hang")
    assert result["wrong"] == []
    assert "hang" in str(result["found"])
    machine = result["machine"]
    assert isinstance(machine, dict)
    assert machine["devices"] == []
    assert machine["sources_digest"]
    assert str(tmp_path) not in json.dumps(result), "a machine's own paths stay out of what is committed"
    monkeypatch.setattr(acceptance, "look", lambda setting: machine)
    capsys.readouterr()
    assert rehearse(tmp_path, "--pieces", ",".join(REHEARSED)) == 0
    assert capsys.readouterr().out.count("done for these sources") == len(REHEARSED)


MACHINE = {"devices": ["H"], "versions": {"torch": "2.11.0"}, "nccl": "2.30.4", "driver": "580"}


def carry_out(body: object, folder: Path, limit_s: float = 60.0) -> int:
    setting = Setting("cpu", True, 2, limit_s, folder / "runs")
    piece = Piece("one_rank", "Is it so?", body)
    return acceptance.carry_out(piece, setting, dict(MACHINE), files(folder / "out")["one_rank"])


def test_what_a_timed_piece_knew_when_it_was_cut_off_is_kept_and_not_taken_for_a_result(tmp_path: Path) -> None:
    def body(lab: Lab) -> dict[str, object]:
        lab.so_far = lambda: {"rows": [1, 2]}
        lab.call("-c", "import time; time.sleep(60)")
        return {}

    assert carry_out(body, tmp_path, limit_s=0.5) == CUT_OFF
    path = files(tmp_path / "out")["one_rank"]
    result = json.loads(path.read_text())
    assert result["found"] == {"rows": [1, 2]}
    assert "cut off" in page.summary(result) or "wrong" in page.summary(result)
    assert not is_current(path, dict(MACHINE))


def test_a_call_ends_within_the_time_it_is_given(tmp_path: Path) -> None:
    began = time.monotonic()
    lab = Lab("late", Setting("cpu", True, 2, 60.0, tmp_path, until=began + 0.5))
    with pytest.raises(OutOfTime):
        lab.call("-c", "import time; time.sleep(60)")
    assert time.monotonic() - began < 30
    assert rehearse(tmp_path, "--within", "0") == CUT_OFF


def test_ranks_that_cannot_share_the_device_are_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(lab: Lab) -> dict[str, object]:
        raise AssertionError("it was started")

    setting = Setting("cuda", True, 4, 60.0, tmp_path)
    machine = MACHINE | {"nccl": "2.28.9", "ranks_share": False}
    assert acceptance.carry_out(Piece("shared", "?", body, shares=True), setting, machine, tmp_path / "s.json") == 1
    assert "NCCL 2.28.9" in capsys.readouterr().out
    assert not (tmp_path / "s.json").exists()
    several = {piece.name for piece in PIECES if "_several" in piece.body.__code__.co_names}
    assert several == {piece.name for piece in PIECES if piece.shares}


def wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "VALUE = 1\n")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_only_packages_that_the_image_lacks_are_brought_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "first")
    assert bring(tmp_path) == []
    (tmp_path / FOLDER).mkdir()
    for name in ("brought_along_by_a_test", "hydra_core"):
        wheel(tmp_path / FOLDER, name)
    assert bring(tmp_path) == ["brought_along_by_a_test"]
    unpacked = tmp_path / FOLDER / UNPACKED
    assert not (unpacked / "hydra_core.py").exists()
    lab = Lab("a", Setting("cpu", True, 2, 60.0, tmp_path))
    assert lab.call("-c", "import brought_along_by_a_test as b; print(b.VALUE)").stdout == "1\n"
    assert os.environ["PYTHONPATH"].split(os.pathsep) == ["first", str(unpacked)]
    assert bring(tmp_path) == [], "they are there now"


def test_what_is_wrong_is_kept_and_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(lab: Lab) -> dict[str, object]:
        lab.train("engine=no_such_engine")
        return {}

    assert carry_out(body, tmp_path) == 1
    path = files(tmp_path / "out")["one_rank"]
    assert not is_current(path, dict(MACHINE))
    (wrong,) = json.loads(path.read_text())["wrong"]
    assert "no_such_engine" in wrong["command"]
    assert "WRONG" in capsys.readouterr().out
    assert carry_out(lambda lab: {}, tmp_path) == 0
    assert is_current(path, dict(MACHINE))
    for changed in ({"sources_digest": "other"}, {"nccl": "2.28.9"}, {"devices": []}):
        assert not is_current(path, MACHINE | changed)


def test_the_page_is_made_from_the_data() -> None:
    assert page.PAGE.read_text() == page.page(page.read()), "run: python benchmarks/pages/gpu.py"


def test_what_was_not_measured_says_so_and_what_was_is_shown() -> None:
    empty = page.page({})
    assert empty.count(page.NOT_MEASURED) >= len(PIECES) + len(page.TIMED)
    row = {"engine": "native", "sharding": "optim", "blocks": 5, "step_ms": 12.345, "exposed_comm_ms": None}
    sizes = {"peak_bytes": 3 << 20, "outside_bytes": None}
    result = {"machine": MACHINE, "wall_s": 300.2, "wrong": [], "found": {"rows": [row | sizes]}}
    shown = page.page({"times_1b": result})
    assert "| native | optim | 12.35 | - | 3 | - | 5 |" in shown
    assert "H, torch 2.11.0, NCCL 2.30.4, driver 580 | 300 |" in shown


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_piece_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fifty commands as forks of what has imported torch; the test of two pieces above starts them for real."""
    forked = SimpleNamespace(run=run_command, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(lab, "subprocess", forked)
    assert rehearse(tmp_path, "--limit", "1200") == 0
    assert all(told(tmp_path, piece.name)["wrong"] == [] for piece in PIECES)
