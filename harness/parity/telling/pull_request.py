"""A verdict for a pull request: Markdown for its comments, and JUnit's XML for what shows tests."""

from __future__ import annotations

from xml.etree import ElementTree

from harness.parity.outcome import Finding, Grade, Outcome, Verdict
from harness.parity.telling.explain import OUTCOMES
from harness.parity.telling.render import HEAD, row
from harness.store.markdown import code, escaped, fenced, rows

MOST = 20
"""Listed checks that did not pass, beside the worst of each kind."""


def markdown(verdict: Verdict, title: str) -> str:
    head = [f"## {code(title)}: {verdict.outcome.value}", escaped(verdict.sentence), OUTCOMES[verdict.outcome]]
    checks = rows(HEAD, [row(verdict, each) for each in _listed(verdict)])
    return "\n\n".join([*head, checks, fenced("\n".join(verdict.commands))]) + "\n"


def junit(verdict: Verdict, title: str) -> str:
    """A test for the verdict, and one for each check that was made.

    A doubt is a failure, as it is by the exit code; what could not be compared is an error.
    """
    wrong = "error" if verdict.outcome is Outcome.NOT_COMPARABLE else "failure"
    cases = [(title, verdict.sentence if verdict.exit_code else "")]
    for each in _listed(verdict):
        tier, check, step, tensor, observed, allowed, *_ = row(verdict, each)
        failed = each.grade is not Grade.ok and verdict.exit_code
        problem = f"{observed} where {allowed} is allowed; {each.note}".rstrip("; ") if failed else ""
        cases.append((f"{tier} {check}{f' (step {step})' * bool(step)} {tensor}".rstrip(), problem))
    failures = str(sum(bool(problem) for _, problem in cases))
    suite = ElementTree.Element("testsuite", {"name": title, "tests": str(len(cases)), f"{wrong}s": failures})
    for name, problem in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=title, name=name)
        if problem:
            ElementTree.SubElement(case, wrong, message=problem)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _listed(verdict: Verdict) -> list[Finding]:
    """Checks that did not pass, and the worst of each kind; not of bits that nobody owes."""
    owed = verdict.admissible.startswith("T1") or verdict.tier == "T0"
    failed = [each for each in verdict.findings if each not in verdict.evidence]
    return [*failed[:MOST], *(each for each in verdict.evidence if owed or each.tier != "T1" or each.grade is Grade.ok)]
