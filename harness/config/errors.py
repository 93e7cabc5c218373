"""The error of a refused request: every violation, each with its value, choices and fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
