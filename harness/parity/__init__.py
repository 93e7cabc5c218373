"""Verdicts on finished runs: is it still the same training run? They read the runs' records on disk and nothing else.

    compare(RUN, RUN)      the verdict on two runs
    verdict(ROOT, STUDY)   every arm of a study against its control
    so_far(ROOT, STUDY)    the same of a study that is not finished
    against(RUNS, RUN)     runs that no study put together, each against one
    zoom(RUN, RUN, name)   one tensor of the two, close up
    loss_bounds(RUN, RUN)  each step's loss and its bound, for a picture
    scripted(verdict)      write the minimal script of one that found something, beside the arm's record
    text, study_text       a verdict for the terminal; `.as_json()` and `.exit_code` are its methods

They load numpy, and torch never. docs/verdicts.md says what each tier demands and where every bound
comes from.
"""

from harness.parity.compare import CHECKOUT, compare, loss_bounds
from harness.parity.outcome import Finding, Grade, Outcome, Stage, StudyVerdict, Verdict
from harness.parity.study import against, so_far, verdict
from harness.parity.telling.render import study_text, text, zoom
from harness.parity.telling.script import scripted

__all__ = [
    "CHECKOUT",
    "Finding",
    "Grade",
    "Outcome",
    "Stage",
    "StudyVerdict",
    "Verdict",
    "against",
    "compare",
    "loss_bounds",
    "scripted",
    "so_far",
    "study_text",
    "text",
    "verdict",
    "zoom",
]
