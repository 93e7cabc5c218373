"""The page of `harness report`, opened in headless Chromium: it asks for nothing, raises nothing, and sorts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli.main import main
from tests.report.stores import EVIL, broken_study
from tests.support.browser import Browser, program

pytestmark = pytest.mark.skipif(program() is None, reason="no Chromium here: apt-get install chromium (.ci/apt.txt)")

COLUMN = "[...document.querySelectorAll('table')[{table}].tBodies[0].rows].map(row => row.cells[{column}].innerText)"
CLICK = "document.querySelectorAll('table')[{table}].tHead.querySelectorAll('button')[{column}].click()"
SPOILT = '<img src="http://127.0.0.1:9/a.png"><script src="b.js"></script><script>nothing.there()</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    broken_study(root)
    assert main(["report", "lab", "--root", str(root)]) == 0
    return root / "lab/report.html"


def test_nothing_is_asked_for_and_nothing_raised(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.requests == [page.as_uri()]
    assert browser.errors == []
    assert browser.evaluate("document.title") == "lab: DIFFERENT"
    assert browser.evaluate("[...document.images].every(one => one.complete && one.naturalWidth > 300)")
    assert browser.evaluate("document.images.length") >= 5
    assert EVIL in browser.evaluate("document.body.innerText")


def test_a_click_on_a_head_sorts(browser: Browser, page: Path) -> None:
    """The norm of a gradient: numbers ascending, then descending; a run that has none stays last."""
    browser.open(page)
    heads = browser.evaluate("[...document.querySelectorAll('table')[1].tHead.rows[0].cells].map(h => h.innerText)")
    column = next(place for place, head in enumerate(heads) if head.startswith("gradient norm"))
    for sign in (1, -1):
        browser.evaluate(CLICK.format(table=1, column=column))
        texts = browser.evaluate(COLUMN.format(table=1, column=column))
        known = [float(text) for text in texts if text]
        assert len(known) == 5
        assert texts[len(known) :] == [""]
        assert known == sorted(known, key=lambda value: sign * value)
    assert len(set(known)) > 1
    before = browser.evaluate(COLUMN.format(table=0, column=2))
    browser.evaluate(CLICK.format(table=0, column=2))
    verdicts = browser.evaluate(COLUMN.format(table=0, column=2))
    assert verdicts == sorted(before) != before
    assert browser.errors == []


def test_a_page_that_asks_or_raises_is_noticed(browser: Browser, page: Path, tmp_path: Path) -> None:
    """With the policy even that page asks nobody; without it the request is seen, and so is the error."""
    text = page.read_text().replace("</body>", f"{SPOILT}</body>")
    (tmp_path / "kept.html").write_text(text)
    browser.open(tmp_path / "kept.html")
    assert browser.requests == [(tmp_path / "kept.html").as_uri()]
    assert any("Content Security Policy" in error for error in browser.errors)
    (tmp_path / "open.html").write_text(text.replace("Content-Security-Policy", "Nothing"))
    browser.open(tmp_path / "open.html")
    assert {"http://127.0.0.1:9/a.png", (tmp_path / "b.js").as_uri()} <= set(browser.requests)
    assert any("nothing is not defined" in error for error in browser.errors)
