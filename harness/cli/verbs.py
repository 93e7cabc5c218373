"""Every verb, in the order of `--help`."""

from __future__ import annotations

from harness.cli.bisect import BISECT
from harness.cli.cost import BENCH
from harness.cli.judge import COMPARE, VERDICT
from harness.cli.power import POWER
from harness.cli.runs import CANCEL, DIFF, GC, RETRY, SHOW, WATCH
from harness.cli.verb import Verb

VERBS: tuple[Verb, ...] = (COMPARE, VERDICT, BISECT, BENCH, POWER, WATCH, SHOW, DIFF, RETRY, CANCEL, GC)
