"""Every verb, in the order of `--help`. A verb's module is imported once it is typed."""

from __future__ import annotations

from harness.cli.verb import Verb

KINDS: dict[str, tuple[Verb, ...]] = {
    "Is it still the same run, and what did it cost": (
        Verb("compare", "two runs, or two versions of the code", "judge.COMPARE"),
        Verb("verdict", "every arm of a study against its control", "judge.VERDICT"),
        Verb("gate", "a run against a baseline, for a pull request", "gate.GATE"),
        Verb("baseline", "a golden file of a run, for gate and compare", "gate.BASELINE"),
        Verb("report", "a study on one page: verdicts, tables, pictures, provenance", "report.REPORT"),
        Verb("bisect", "the first commit that makes a run differ", "bisect.BISECT"),
        Verb("bench", "step time, memory and traffic of a timed study's arms", "cost.BENCH"),
        Verb("plan", "memory and traffic of a request before anything runs", "plan.PLAN"),
    ),
    "How runs fare": (
        Verb("watch", "how every run is doing: state, step, loss; failures by cause", "runs.WATCH"),
        Verb("show", "one run: where it came from, how far it got, why it failed", "runs.SHOW"),
        Verb("diff", "how two runs differ: settings, sources, versions, machine", "runs.DIFF"),
        Verb("retry", "a new attempt of what failed, was lost, preempted or cancelled", "runs.RETRY"),
        Verb("cancel", "end every run that is queued or running", "runs.CANCEL"),
        Verb("gc", "what a store could do without, such as leftovers of crashes", "runs.GC"),
    ),
    "From and to elsewhere": (
        Verb("import-series", "curves of wandb, TensorBoard, CSV, JSONL, Megatron, as runs", "series.SERIES"),
        Verb("sync", "runs into wandb (wandb=online: live), TensorBoard or CSV", "wandb_sync.SYNC"),
        Verb("wandb", "wandb push STUDY: verdicts, evidence, pictures, dashboard", "wandb_sync.WANDB"),
        Verb("completion", "for bash, so that TAB offers what can be typed", "completion.COMPLETION"),
    ),
}
VERBS: tuple[Verb, ...] = tuple(verb for verbs in KINDS.values() for verb in verbs)
