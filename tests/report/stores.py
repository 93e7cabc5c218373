"""A study that has everything a report must survive: faults, failures, cells that never began, names that attack."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from harness.store import provenance, status
from harness.store.status import State
from tests.parity.corpus import DOUBLED, FP32, OURS
from tests.parity.edits import edit_config, edit_json
from tests.parity.lab import as_study, pair, write

EVIL = "<img src=x onerror=alert(1)>$x$|`@all`"
QUESTION = f"Is it <script>alert(1)</script> the same & is {EVIL} told?"
ERROR = 'Traceback (most recent call last):\n  <script src="http://evil.example/x.js"></script>\nValueError: & no luck'


def whole(root: Path) -> Path:
    """A study of a control and an arm, both done, under `root`; the arm's directory."""
    control, arm = pair(root, "study=lab", "notes=it's")
    for run in (control, arm):
        edit_json(run / "provenance.json", sources_digest=provenance.sources_digest())
    return arm


def broken_study(root: Path) -> None:
    """A control, an arm that is the same, one with doubled gradients, one that failed, one that is lost, one whose
    files are damaged, and a cell that was never started."""
    others = [replace(OURS, replicate=number) for number in (1, 2, 3, 4)]
    control, same, bad, failed, lost, damaged, never = (write(root, each) for each in (FP32, OURS, DOUBLED, *others))
    as_study(root, {control: None, **dict.fromkeys((same, bad, failed, lost, damaged, never), control)}, QUESTION)
    for run in (control, same, bad, failed, lost):
        edit_json(run / "provenance.json", sources_digest=provenance.sources_digest())
    edit_config(bad, "dtype", name=EVIL)
    status.note(failed, state=State.failed, reason=f"rank 0: ValueError: {EVIL}")
    (failed / "attempts/0/error.txt").write_text(ERROR)
    status.note(lost, state=State.running, host="a-host")
    (damaged / "summary.json").write_text("{")
    shutil.rmtree(never)
