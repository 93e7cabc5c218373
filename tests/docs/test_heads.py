"""Each page of docs/ says whether it is a guide, a reference or a record; records lie apart; links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.name != "README.md")
HEAD = re.compile(r"# [^\n]+\n\n\*(?P<kind>Guide|Reference|Record)\. (?P<sentence>[^*]+?[.?])(?: [^*]+)?\*\n\n")
"""A title, then one paragraph in italics: the kind, a sentence that says what the page answers, and how it is made."""


def head_of(text: str) -> tuple[str, str]:
    """Kind and first sentence of a page."""
    found = HEAD.match(re.sub(r"(?<=\S)\n(?=\S)", " ", text))
    assert found is not None, f"no head: {text[:200]!r}"
    return found["kind"], found["sentence"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_it_is(page: str) -> None:
    kind, _ = head_of((DOCS / page).read_text(encoding="utf-8"))
    assert (kind == "Record") == page.startswith("records/"), "records lie in docs/records, and nothing else does"


@pytest.mark.parametrize("page", PAGES)
def test_the_command_that_makes_a_page_exists(page: str) -> None:
    head = (DOCS / page).read_text(encoding="utf-8").split("\n\n")[1]
    for script in re.findall(r"python ([\w/]+\.py)", head):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"python -m\s+(harness[\w.]*)", head):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pytest.mark.parametrize("study", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_a_study_names_exists(study: Path) -> None:
    text = study.read_text(encoding="utf-8")
    for name in re.findall(r"(?:python |data in |: )((?:benchmarks|docs)/[\w/]+\.\w+)", text):
        assert (ROOT / name).exists(), name


def test_every_page_is_listed_under_its_kind() -> None:
    expected: dict[str, set[str]] = {"Guide": set(), "Reference": set(), "Record": set()}
    for page in PAGES:
        if not page.startswith("records/upstream/"):
            kind, sentence = head_of((DOCS / page).read_text(encoding="utf-8"))
            expected[kind].add(f"| [{Path(page).name}]({page}) | {sentence} |")
    sections = (DOCS / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]
    found = {
        each.split("\n", 1)[0].removesuffix("s"): set(re.findall(r"^\| \[\w+\.md\].*$", each, re.M))
        for each in sections
    }
    assert found == expected
    assert "[upstream](records/upstream)" in sections[2]


def dead_links(page: Path, text: str) -> list[str]:
    """Links of a page to files that are not there; what follows a `#` is not looked for."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)#\s=]+)(?:#[^)]*)?\)", prose)
    return [each for each in targets if "://" not in each and not (page.parent / each).exists()]


@pytest.mark.parametrize("page", ["../README.md", "README.md", *PAGES])
def test_links_lead_somewhere(page: str) -> None:
    path = DOCS / page
    assert dead_links(path, path.read_text(encoding="utf-8")) == []


def test_a_dead_link_is_found() -> None:
    text = "[a](verdicts.md) [b](verdict.md#x) [c](https://nowhere) `[d](e)`\n```\n[f](g)\n```\n![h](pictures/none.png)"
    assert dead_links(DOCS / "README.md", text) == ["verdict.md", "pictures/none.png"]


@pytest.mark.parametrize(
    "text",
    [
        "# Title\n\nMade by `x`.\n\nText",
        "# Title\n\n*Note. It says something.*\n\nText",
        "# Title\n\n*Guide. It says something\n\nText*",
        "*Guide. It says something.*\n\nText",
    ],
)
def test_a_page_without_a_head_is_found(text: str) -> None:
    with pytest.raises(AssertionError, match="no head"):
        head_of(text)
