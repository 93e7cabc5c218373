"""Puts checks to subjects: many in one set of ranks, each in a process group of its own."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from harness.probe import collectives
from tests.fsdp.behaviours.catalog import BEHAVIOURS, SUBJECTS
from tests.fsdp.behaviours.lab import Broken, Lab, first_line
from tests.fsdp.behaviours.subject import NotOffered
from tests.support.visits import Lost, Visit

HOLDS, FAILS, NOT_OFFERED, SILENT = "holds", "fails", "not offered", "no answer"


@dataclass(frozen=True)
class Trial:
    """One check on one subject.

    mutant: which of the behaviour's, or none; the check of a mutant ends with the first value that shows it.
    whole: of several layouts of a state, all are tried, and not only as many as it takes to meet each strategy.
    """

    subject: str
    key: str
    mutant: int | None = None
    whole: bool = False


@dataclass(frozen=True)
class Answer:
    """fact: what was measured, or why it was not. trace: where an exception that is no claim came from."""

    outcome: str
    fact: str
    trace: str = ""
    seconds: float = 0.0


def run(trials: Sequence[Trial], ranks: int, timeout: float = 60.0) -> dict[Trial, Answer]:
    """Answers of all trials, which have one number of ranks.

    A trial that ends its processes costs itself alone, and is tried twice: gloo at times closes a connection before a
    trial has begun.

    Args:
        timeout: seconds that a rank waits for another in a collective.
    """
    visit = Visit(_answer, ranks, _broke_off, timeout, limit=180, goes_on=True, tries=2)
    return {trial: combined(answers) for trial, answers in zip(trials, visit.run(trials), strict=True)}


def _broke_off(answer: Answer) -> bool:
    """A rank that fails leaves the process group at once; but for a claim, which it tells with the others."""
    return bool(answer.trace) or answer.outcome == NOT_OFFERED


def combined(answers: Sequence[Answer | Lost]) -> Answer:
    """The ranks' answers as one: a rank whose claim failed speaks for all, before one that merely broke off."""
    told = [each for each in answers if isinstance(each, Answer)]
    if len(told) < len(answers):
        return Answer(SILENT, "ended its processes, or never came to an end")
    order = {FAILS: 1, NOT_OFFERED: 2, HOLDS: 3}
    first = min(told, key=lambda each: 0 if each.outcome == FAILS and not each.trace else order[each.outcome])
    return Answer(first.outcome, first.fact, first.trace, max(each.seconds for each in told))


def _answer(rank: int, trial: Trial) -> Answer:
    began, behaviour = time.perf_counter(), BEHAVIOURS[trial.key]
    broken = nullcontext() if trial.mutant is None else behaviour.mutants[trial.mutant].patch()
    outcome, trace = HOLDS, ""
    try:
        with broken:
            lab = Lab(SUBJECTS[trial.subject], whole=trial.whole, hasty=trial.mutant is not None)
            fact = behaviour.check(lab)
            lab.close()
    except NotOffered as reason:
        outcome, fact = NOT_OFFERED, str(reason)
    except Broken as measured:
        outcome, fact = FAILS, str(measured)
    except Exception as error:
        outcome, fact, trace = FAILS, f"{type(error).__name__}: {first_line(error)}", traceback.format_exc()
    finally:
        if collectives._active is not None:
            collectives._active.close()
    return Answer(outcome, fact, trace, time.perf_counter() - began)
