"""`harness report STUDY`: one page, of studies that are whole, unfinished, failed or hostile."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.store import status
from harness.store.rundir import RunDir
from harness.store.status import State
from tests.parity.edits import edit_config
from tests.report.stores import EVIL, broken_study, whole
from tests.support.mutants import finds

OUTSIDE = re.compile(r"^(?!data:|#)")
"""An address that a browser would ask for."""


class Found(HTMLParser):
    """Elements, addresses and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "srcset", "action", "data", "poster")
        self.addresses += [value or "" for name, value in attrs if name in names]
        assert not [name for name, _ in attrs if name.startswith("on")], attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    broken_study(root)
    return root


@pytest.fixture(scope="module")
def page(store: Path) -> str:
    assert main(["report", "lab", "--root", str(store)]) == 0
    return (store / "lab/report.html").read_text()


def test_the_page_needs_nothing_else_and_nothing_in_it_is_markup_of_a_run(page: str) -> None:
    found = Found(page)
    assert [address for address in found.addresses if OUTSIDE.match(address)] == []
    assert found.tags.count("script") == 1
    assert unescape(page).count("default-src 'none'") == 1
    text = "".join(found.texts)
    assert EVIL in text
    assert "<script>alert(1)</script> the same" in text
    assert '<script src="http://evil.example/x.js"></script>' in text
    assert page.isascii() or 'charset="utf-8"' in page


def test_the_page_tells_the_answer_and_what_is_missing(page: str) -> None:
    text = " ".join("".join(Found(page).texts).split())
    assert "DIFFERENT Rounding cannot explain" in text
    assert "1 damaged" in text
    assert "1 failed" in text
    assert "1 lost" in text
    assert "1 of 7 cells was never started" in text
    assert "its process on a-host is gone" in text
    assert "off by" in text, "the sentence on the arm that is wrong"
    assert "python run.py --from" in text
    assert "summary.json is not valid JSON" in text


def test_names_in_any_script_are_shown_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    edit_config(whole(tmp_path), "dtype", name="日本語の名前")
    assert main(["report", "lab", "--root", str(tmp_path)]) == 0
    assert "日本語の名前" in (tmp_path / "lab/report.html").read_text()
    assert [str(each.message) for each in recwarn if "Glyph" in str(each.message)] == []


test_warnings_of_missing_letters_are_found = finds(
    "Pictures",
    test_names_in_any_script_are_shown_without_a_warning="""
        a warning a letter: A name in a script that the font lacks prints a warning for each letter
            analysis.plot.LETTERS: chr(0x10FFFF)
            ()
            Glyph
    """,
)


@pytest.mark.parametrize("how", ["relative root", "folder", "run", "other folder"])
def test_stores_are_found_wherever_one_stands(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = whole(tmp_path / "my runs")
    monkeypatch.chdir(tmp_path)
    words = {
        "relative root": ["lab", "--root", "my runs"],
        "folder": ["my runs/lab/"],
        "run": [str(arm)],
        "other folder": [str(tmp_path / "my runs/lab"), "--out", "new/page.html"],
    }
    assert main(["report", *words[how]]) == 0
    assert capsys.readouterr().out.startswith("EQUAL: ")
    assert (tmp_path / ("new/page.html" if how == "other folder" else "my runs/lab/report.html")).exists()


def test_nothing_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("nothing", "../x", "."):
        assert main(["report", name, "--root", str(tmp_path)]) == 2
        assert "no study of this name was run" in capsys.readouterr().err


def reported(root: Path) -> str:
    """Text of the page, by words."""
    assert main(["report", "lab", "--root", str(root)]) == 0
    return " ".join("".join(Found((root / "lab/report.html").read_text()).texts).split())


@pytest.mark.parametrize("left", ["frozen", "running", "no control", "no study", "no metrics"])
def test_a_study_at_any_stage(left: str, tmp_path: Path) -> None:
    arm = whole(tmp_path)
    if left == "frozen":
        for run in tmp_path.glob("lab/*/"):
            for name in ("status.json", "metrics.jsonl", "summary.json", "provenance.json"):
                (run / name).unlink()
    if left == "running":
        status.note(arm, state=State.running)
        with RunDir(arm).lock():
            assert "1 running" in reported(tmp_path)
        return
    if left == "no control":
        record = tmp_path / "lab/study.json"
        record.write_text(re.sub(r'"control": "\w+"', '"control": null', record.read_text()))
    if left == "no study":
        (tmp_path / "lab/study.json").unlink()
    if left == "no metrics":
        (arm / "metrics.jsonl").unlink()
    told = {
        "frozen": "2 not started",
        "no control": "The setting study.control of lab is empty: an arm needs something",
        "no study": "These runs were not asked for as a study",
        "no metrics": "cannot be compared",
    }
    assert told[left] in reported(tmp_path)


def test_where_it_cannot_be_written_another_place_is_named(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = ["report", "lab", "--root", str(store), "--out", str(tmp_path / "file" / "page.html")]
    assert main(words) == 2
    assert "report STUDY --out" in capsys.readouterr().err
