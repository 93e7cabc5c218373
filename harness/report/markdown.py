"""A report as Markdown for a pull request, without pictures. Names are shown verbatim."""

from __future__ import annotations

from collections.abc import Iterator

from harness.report.contents import Contents, Table
from harness.store.markdown import code, escaped, fenced, folded, rows


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
            yield folded("error.txt", fenced(failure.error))
    yield "### Provenance"
    yield fenced("\n".join(contents.commands))
    common = contents.origin.common
    if common:
        yield folded("What all runs have in common", rows(("fact", "value"), common))
    yield folded(
        "Each run",
        rows(
            ("run", "state", "overrides", "again", "its own"),
            [
                (run.label, run.state, run.overrides, run.command, "; ".join(f"{k} {v}" for k, v in run.facts))
                for run in contents.origin.runs
            ],
        ),
    )
    yield f"Made {contents.made}."


def _table(table: Table) -> str:
    return rows(table.head, table.rows)
