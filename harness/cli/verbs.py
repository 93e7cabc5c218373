"""Every verb, in the order of `--help`."""

from __future__ import annotations

from harness.cli.bisect import BISECT
from harness.cli.convert import EXPORT, IMPORT
from harness.cli.cost import BENCH
from harness.cli.judge import COMPARE, VERDICT
from harness.cli.mirror import SYNC, WANDB
from harness.cli.power import POWER
from harness.cli.rehearse import REHEARSE
from harness.cli.runs import CANCEL, DIFF, GC, RETRY, SHOW, WATCH
from harness.cli.verb import Verb

VERBS: tuple[Verb, ...] = (
    COMPARE,
    VERDICT,
    BISECT,
    BENCH,
    POWER,
    REHEARSE,
    WATCH,
    SHOW,
    DIFF,
    RETRY,
    CANCEL,
    EXPORT,
    IMPORT,
    SYNC,
    WANDB,
    GC,
)
