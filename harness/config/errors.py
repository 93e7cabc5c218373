"""The error of a refused request: every violation with its value, choices and a fix that is not refused in turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

EXIT_BAD_REQUEST = 2


@dataclass(frozen=True)
class Violation:
    """One obstacle of a request.

    `subject` is the setting with its value (`train.steps=0`), `problem` a clause that continues it ("must be at least
    1"), `choices` the valid values, `fix` a remedy, `about` the setting's meaning.
    """

    subject: str
    problem: str
    choices: str = ""
    fix: str = ""
    about: str = ""

    def __str__(self) -> str:
        lines = [f"{self.subject}: {self.problem}"]
        if self.choices:
            lines.append(f"    valid: {self.choices}")
        if self.fix:
            lines.append(f"    fix:   {self.fix}")
        if self.about:
            lines.append(f"    about: {self.about}")
        return "\n".join(lines)


class BadRequest(Exception):
    """A request refused before any rank starts, with every violation; exit code 2."""

    exit_code = EXIT_BAD_REQUEST

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(dict.fromkeys(violations))
        count = len(self.violations)
        head = "bad request" if count == 1 else f"bad request, {count} problems"
        super().__init__(
            "\n".join([f"{head}:", *(f"  {line}" for v in self.violations for line in str(v).split("\n"))])
        )


def refuse(subject: str, problem: str, *, choices: str = "", fix: str = "") -> BadRequest:
    return BadRequest([Violation(subject, problem, choices, fix)])


OR = ", or "
_SETTING = re.compile(r"[a-z_]+(\.[a-z0-9_]+)+=\S+")
_ROUNDS = 6

Refused = Callable[[Sequence[str]], Sequence[Violation]]


def completed(violations: Sequence[Violation], refused: Refused) -> list[Violation]:
    """Violations whose fixes leave nothing but others of these. A fix that is an option or a sentence stays as it is.

    Args: refused: what is said of the request with these settings.
    """
    named = {_setting(each) for each in violations}
    found = []
    for each in violations:
        whole = [_completed(fix, named - {_setting(each)}, refused) for fix in each.fix.split(OR)]
        fixes = [fix for fix in whole if fix and not any({*other.split()} < {*fix.split()} for other in whole if other)]
        found.append(replace(each, fix=OR.join(dict.fromkeys(fixes)) or each.fix))
    return found


def _completed(fix: str, others: Collection[str], refused: Refused) -> str:
    """The fix and further settings; empty where none were found that are accepted."""
    if not _is_typed(fix):
        return fix
    words = _words(fix)
    for _ in range(_ROUNDS):
        typed = [f"{key}={value}" for key, value in words.items()]
        left = [each for each in refused(typed) if _setting(each) not in others]
        if not left:
            return " ".join(typed)
        further = [_words(each) for each in left[0].fix.split(OR) if _is_typed(each)]
        if not further:
            break
        words |= min(further, key=lambda more: len(more.keys() & words.keys()))
    return ""


def _is_typed(fix: str) -> bool:
    return bool(fix) and all(_SETTING.fullmatch(word) for word in fix.split())


def _words(fix: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in fix.split())


def _setting(violation: Violation) -> str:
    return violation.subject.partition("=")[0]
