"""A verdict for a pull request: Markdown for its comments, and JUnit's XML for what shows tests."""

from __future__ import annotations

from xml.etree import ElementTree

from harness.parity.outcome import Finding, Grade, Outcome, Verdict, percent
from harness.parity.telling.explain import OUTCOMES
from harness.store.markdown import code, escaped, fenced, rows

MARKS = {Grade.ok: "ok", Grade.doubt: "in doubt", Grade.bad: "refuted"}


HEAD = ("tier", "check", "step", "tensor", "observed", "allowed", "of the bound", "")


def markdown(verdict: Verdict, title: str) -> str:
    message = [f"## {code(title)}: {verdict.outcome.value}", escaped(verdict.sentence), OUTCOMES[verdict.outcome]]
    checks = rows(HEAD, [_row(each) for each in _listed(verdict)])
    return "\n\n".join([*message, checks, fenced("\n".join(verdict.commands))]) + "\n"


def junit(verdict: Verdict, title: str) -> str:
    """A test for each check: a failure where it is refuted, and the suite's own where the verdict does not pass.

    A doubt fails, as it does by the exit code; what could not be compared is an error.
    """
    wrong = "error" if verdict.outcome is Outcome.NOT_COMPARABLE else "failure"
    cases = [(title, verdict.sentence if verdict.exit_code else "")]
    for each in _listed(verdict):
        tier, check, step, tensor, observed, allowed, *_ = _row(each)
        where = f" (step {step}{f', {tensor}' if tensor else ''})" if step else ""
        failed = each.grade is not Grade.ok and verdict.exit_code
        message = f"{observed} where {allowed} is allowed; {each.note}".rstrip("; ")
        cases.append((f"{tier} {check}{where}", message if failed else ""))
    failures = sum(bool(message) for _, message in cases)
    counts = {"name": title, "tests": str(len(cases)), f"{wrong}s": str(failures)}
    suite = ElementTree.Element("testsuite", counts)
    for name, message in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=title, name=name)
        if message:
            ElementTree.SubElement(case, wrong, message=message).text = message
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _listed(verdict: Verdict) -> list[Finding]:
    """Checks that did not pass, and the worst of each kind of the others."""
    owed = verdict.admissible.startswith("T1") or verdict.tier == "T0"
    failed = [each for each in verdict.findings if each not in verdict.evidence]
    return [*failed[:20], *(each for each in verdict.evidence if owed or each.tier != "T1" or each.grade is Grade.ok)]


def _row(found: Finding) -> tuple[str, ...]:
    measured = isinstance(found.observed, float) and isinstance(found.allowed, float)
    return (
        found.tier,
        found.check,
        "" if found.step is None else str(found.step),
        found.tensor or "",
        *(each if isinstance(each, str) else f"{each:.2e}" for each in (found.observed, found.allowed)),
        percent(found.ratio) if measured else "",
        MARKS[found.grade],
    )
