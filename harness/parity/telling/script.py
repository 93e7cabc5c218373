"""Minimal script: makes the runs of a verdict again from overrides alone, and judges them anew.

It is written to `<arm>/verdict/<control>.py` and needs no run directory. Its runs record what those of the verdict did,
so that the same checks are made of them.
"""

from __future__ import annotations

import pprint
import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.config.schema import MeasureMode
from harness.config.words import as_word
from harness.parity.outcome import Finding, Grade, Outcome, Stage, Verdict
from harness.store import commands, provenance
from harness.store.files import private_folder, write_atomic
from harness.store.identity import EXCLUDED
from harness.store.provenance import WATCHED
from harness.store.rundir import RunDir, flatten, read_summary

FOLDER = "verdict"

TEMPLATE = Path(__file__).with_name("script.txt")
WIDTH = 120

KEPT = ("cluster.device", "cluster.threads_per_rank")


def scripted(verdict: Verdict) -> Verdict:
    """A verdict that names its minimal script, written here; as it is where there is none, or the store takes none."""
    path, text = Path(verdict.arm) / FOLDER / f"{Path(verdict.control).name}.py", script(verdict)
    if text is None:
        return verdict
    try:
        private_folder(path.parent)
        write_atomic(path, text)
    except OSError:  # a read-only store
        return verdict
    return replace(verdict, script=commands.script(path))


def script(verdict: Verdict) -> str | None:
    """Text of the script of a DIFFERENT or UNDECIDED verdict.

    None where only evidence is missing, where the two runs differ in no setting, and of runs that no request of ours
    makes again: another program's, and a baseline's.
    """
    finding = first_shown(verdict)
    paths = [RunDir(Path(each)) for each in (verdict.arm, verdict.control)]
    if finding is None or any(run.path.is_file() or WATCHED in provenance.read(run.path) for run in paths):
        return None
    runs = {name: again(run) for name, run in zip(("arm", "control"), paths, strict=True)}
    if sorted(runs["arm"]) == sorted(runs["control"]) and not any(run.name in finding.note for run in paths):
        return None
    filled = {
        "sentence": textwrap.fill(
            verdict.sentence.replace("\\", "/").replace('"', "'"),
            WIDTH - 3,
            break_long_words=False,
            break_on_hyphens=False,
        ),
        "place": repr((finding.check, finding.step or 0))[1:-1],
        "runs": pprint.pformat(runs, width=WIDTH - len("RUNS = "), compact=True, sort_dicts=False),
    }
    return re.sub("@(" + "|".join(filled) + ")@", lambda match: filled[match[1]], TEMPLATE.read_text(encoding="utf-8"))


def first_shown(verdict: Verdict) -> Finding | None:
    """First finding of the verdict's grade that is more than missing evidence."""
    if verdict.outcome not in (Outcome.DIFFERENT, Outcome.UNDECIDED):
        return None
    grave = Grade.bad if verdict.outcome is Outcome.DIFFERENT else Grade.doubt
    return next((f for f in verdict.findings if f.grade is grave and f.stage is not Stage.record), None)


def again(run: RunDir) -> list[str]:
    """Words of a request that makes a run again, interrupted where it was, and checked at every step if it was
    checked."""
    restored = (read_summary(run) or {}).get("restored")
    saved = ["ckpt.policy=last", f"launch.preempt_at={restored['step']}"] if restored else ["ckpt.policy=none"]
    config = flatten(run.config())
    if config["measure.step_checks"] and config["measure.mode"] == MeasureMode.record.name:
        config["measure.step_checks_share"] = 1.0
    return [*overrides(config), *saved]


def overrides(config: Mapping[str, Any]) -> list[str]:
    """Overrides `key=value` of a frozen configuration against the default.

    Args: config: flat, dotted keys. Location, start and checkpoints are left out.
    """
    default = _default()
    return [
        f"{key}={as_word(value)}"
        for key, value in config.items()
        if (key.split(".")[0] not in (*EXCLUDED, "ckpt") or key in KEPT)
        and (key not in default or default[key] != value)
    ]


@cache
def _default() -> Mapping[str, Any]:
    from harness.config.compose import composed, plain

    return flatten(plain(composed()))
