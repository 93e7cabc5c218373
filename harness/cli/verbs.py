"""Every verb, in the order of `--help`."""

from __future__ import annotations

from harness.cli.bisect import BISECT
from harness.cli.completion import completion
from harness.cli.convert import EXPORT, IMPORT
from harness.cli.cost import BENCH
from harness.cli.judge import COMPARE, VERDICT
from harness.cli.mirror import SYNC, WANDB
from harness.cli.rehearse import REHEARSE
from harness.cli.report import REPORT
from harness.cli.runs import CANCEL, DIFF, GC, RETRY, SHOW, WATCH
from harness.cli.verb import Verb

KINDS: dict[str, tuple[Verb, ...]] = {
    "Is it still the same run, and what did it cost": (COMPARE, VERDICT, REPORT, BISECT, BENCH, REHEARSE),
    "How runs fare": (WATCH, SHOW, DIFF, RETRY, CANCEL, GC),
    "From and to elsewhere": (EXPORT, IMPORT, SYNC, WANDB, completion(lambda: VERBS)),
}
VERBS: tuple[Verb, ...] = tuple(verb for verbs in KINDS.values() for verb in verbs)
