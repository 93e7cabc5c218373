"""The page of `harness report` in headless Chromium: it asks for nothing, raises nothing, and sorts."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.pages.pictures import BROWSER
from harness.cli.main import main
from tests.report.stores import EVIL, broken_study

pytestmark = pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium: apt-get install chromium")

POLICY = "Content-Security-Policy"
SORT = """<script>
  const heads = [...document.querySelectorAll('table')[1].tHead.rows[0].cells];
  const column = heads.findIndex(head => head.innerText.startsWith('gradient norm'));
  const shown = [];
  for (const click of [1, 2]) {
    heads[column].querySelector('button').click();
    shown.push([...document.querySelectorAll('table')[1].tBodies[0].rows].map(row => row.cells[column].innerText));
  }
  document.title = JSON.stringify(shown);
</script>"""
STRANGER = "http://127.0.0.1:9/a.png"
SPOILT = f'<img src="{STRANGER}"><script>nothing.there()</script>'


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    broken_study(root)
    assert main(["report", "lab", "--root", str(root)]) == 0
    return root / "lab/report.html"


def opened(page: Path, text: str) -> tuple[str, str, bool]:
    """Title after the scripts ran, messages of the console, and whether the stranger's address was asked for."""
    page.write_text(text)
    log = page.with_suffix(".net.json")
    words = [*BROWSER, "--enable-logging=stderr", f"--log-net-log={log}", "--dump-dom", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None
    assert EVIL in html.unescape(done.stdout)
    return html.unescape(title[1]), "\n".join(re.findall("CONSOLE.*", done.stderr)), STRANGER in log.read_text()


def test_nothing_is_asked_for_and_nothing_raised(page: Path, tmp_path: Path) -> None:
    assert opened(tmp_path / "report.html", page.read_text()) == ("lab: DIFFERENT", "", False)


def test_a_page_that_asks_or_raises_is_noticed(page: Path, tmp_path: Path) -> None:
    """With its policy even that page asks nobody; without it the request is seen, and so is the error."""
    text = page.read_text().replace("</body>", f"{SPOILT}</body>")
    _, said, is_asked = opened(tmp_path / "kept.html", text)
    assert POLICY in said.replace(" ", "-")
    assert not is_asked
    _, said, is_asked = opened(tmp_path / "open.html", text.replace(POLICY, "Nothing"))
    assert "nothing is not defined" in said
    assert is_asked


def test_a_click_on_a_head_sorts(page: Path, tmp_path: Path) -> None:
    """The norm of a gradient: numbers ascending, then descending; a run that has none stays last."""
    text = page.read_text().replace(POLICY, "Nothing").replace("</body>", f"{SORT}</body>")
    title, said, _ = opened(tmp_path / "sorted.html", text)
    assert said == ""
    for sign, texts in zip((1, -1), json.loads(title), strict=True):
        known = [float(text) for text in texts if text]
        assert len(known) == 5
        assert len(set(known)) > 1
        assert texts[len(known) :] == [""]
        assert known == sorted(known, key=lambda value: sign * value)
