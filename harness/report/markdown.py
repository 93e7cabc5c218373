"""A report as Markdown for a pull request, without pictures. Names are shown verbatim."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from harness.report.contents import Contents, Table
from harness.store.screen import visible


def markdown(contents: Contents) -> str:
    return "\n\n".join(_parts(contents)) + "\n"


def _parts(contents: Contents) -> Iterator[str]:
    yield f"## {code(contents.study)}: {contents.outcome}"
    if contents.question:
        yield escaped(contents.question)
    yield contents.meaning
    if contents.incomplete:
        yield f"**{escaped(contents.incomplete)}**"
    yield from map(escaped, contents.seeds)
    for table in contents.tables:
        yield f"### {table.title}"
        yield _table(table)
        yield escaped(table.caption)
        if table is contents.tables[0]:
            yield from (escaped(arm.sentence) for arm in contents.arms if not arm.passed)
    for failure in contents.failures:
        yield f"**{code(failure.label)} is {failure.state}**: {escaped(failure.reason)}"
        if failure.error:
            yield _folded("error.txt", _fenced(failure.error))
    yield "### Provenance"
    yield _fenced("\n".join(contents.commands))
    rows = contents.origin.common
    if rows:
        yield _folded("What all runs have in common", _rows(("fact", "value"), rows))
    yield _folded(
        "Each run",
        _rows(
            ("run", "state", "overrides", "again", "its own"),
            [
                (run.label, run.state, run.overrides, run.command, "; ".join(f"{k} {v}" for k, v in run.facts))
                for run in contents.origin.runs
            ],
        ),
    )
    yield f"Made {contents.made}."


def _table(table: Table) -> str:
    return _rows(table.head, [[cell.text for cell in row] for row in table.rows])


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(_cell(text) for text in row)} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text if re.fullmatch(r"[\w .,:%/+-]*", text) and "_" not in text else code(text).replace("|", "\\|")


def code(text: str) -> str:
    line = _line(text)
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", line)), default=0))
    pad = " " if line[:1] in ("`", " ", "") or line[-1:] in ("`", " ") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def escaped(text: str) -> str:
    shown = re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", _line(text))
    return shown.replace("@", "@\u200b")


def _line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _fenced(text: str) -> str:
    text = visible(text)
    fence = "`" * (1 + max([2, *(len(run) for run in re.findall(r"`+", text))]))
    return f"{fence}\n{text}\n{fence}"


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
