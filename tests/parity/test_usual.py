"""What is far out for one pair is told beside what clean pairs show of each check, in tables of studies and reports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from harness.config.catalog import ROOT
from harness.parity import study_text
from harness.parity.outcome import Finding, Grade, Stage, StudyVerdict
from harness.parity.telling import render
from tests.parity.conftest import Bench
from tests.parity.corpus import FAULTS
from tests.parity.test_witness import CONTROL, SEEN
from tests.support.mutants import finds

SAMPLED, SCALE = "update by the rule, sampled", "gradient scale"


def row(check: str, ratio: float, grade: Grade = Grade.ok) -> Finding:
    return Finding("T2", check, Stage.optimizer, grade, ratio, 1.0, step=1)


def explained() -> set[str]:
    """Checks that the page of verdicts has a sentence of."""
    page = (ROOT / "docs/verdicts.md").read_text().partition("## Every check in a sentence\n")[2].partition("\n## ")[0]
    return {row.split(" | ")[0].removeprefix("| ") for row in page.splitlines() if row.startswith("| ")} - {"check"}


def test_every_check_is_explained(bench: Bench) -> None:
    verdicts = [bench.judge(case) for case in FAULTS] + [bench.held(SEEN, CONTROL)]
    seen = {finding.check for verdict in verdicts for finding in (*verdict.evidence, *verdict.findings)}
    assert {check for check in seen if not check.endswith((" bits", " is finite"))} <= explained()
    sources = "".join(path.read_text() for path in (ROOT / "harness/parity").rglob("*.py"))
    assert {check for check in explained() if f'"{re.split(", | given", check)[0]}' not in sources} == set()


def test_the_table_is_of_checks_that_clean_pairs_pass() -> None:
    shares = render.shares()
    assert shares.keys() <= explained()
    assert all(0 <= share < 1 for share in shares.values())
    assert 0.4 < shares[SAMPLED] < 0.6, "it named itself in nearly every table"
    assert len(shares) > 25


def wrong_choices() -> Iterator[str]:
    """What is named of rows whose farthest is known."""
    shares = render.shares()
    unusual = row(SCALE, 2 * shares[SCALE])
    cases = {
        SCALE: [row(SAMPLED, shares[SAMPLED]), unusual],
        "gradient distance": [row("gradient distance", 1.2, Grade.doubt), row("weights between steps", 0.9)],
        "a check of its own": [row(SAMPLED, 0.2), row("a check of its own", 0.9)],
        "gradient norm": [row("gradient norm", 0.03), row("weights of forwards, sketched", 1e-6)],
    }
    for name, rows in cases.items():
        found = render.farthest(rows)
        if found is None or found[1].partition(",")[0] != name:
            yield f"{name}: {found}"
    found = render.farthest(cases[SCALE])
    if found != (unusual.ratio, f"{SCALE}, 200 % of the most in clean pairs"):
        yield f"told: {found}"


def test_what_is_far_for_this_pair_is_named() -> None:
    assert list(wrong_choices()) == []
    assert render.farthest([]) is None
    assert render.farthest([replace(row(SCALE, 0.1), observed="as kept", allowed="as kept")]) is None
    assert render.farthest([row("a check of its own", 0.9)]) == (0.9, "a check of its own")


def test_a_study_names_it(bench: Bench) -> None:
    verdict = bench.judge(next(case for case in FAULTS if case.name == "bucket dropped"))
    ratio, _ = render.used(verdict)
    assert ratio is not None
    assert ratio > 1, "a check that failed comes first"
    assert "of the most in clean pairs" in " ".join(study_text(StudyVerdict("lab", "", arms=(verdict,))).split())


test_a_mutant_is_found = finds(
    "What is far out",
    wrong_choices="""
        the tightest bound: All bounds are taken to be equally wide
            parity.telling.render.farthest: row.ratio / max(known.get(row.check, 1.0), LEAST) => row.ratio
        what passed before what failed: Failures are hidden
            parity.telling.render.farthest: grades.index(row.grade), => 0,
        any bit is far: A last bit of what is always equal is far
            parity.telling.render.LEAST: 1e-12
    """,
)
