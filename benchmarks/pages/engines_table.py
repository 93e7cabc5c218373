"""Write docs/records/engines.md: every engine in every way it shards, held against one process in double precision.

    python run.py -m study=engines
    python benchmarks/pages/engines_table.py            verdicts and numbers of the study's runs, and the page
    python benchmarks/pages/engines_table.py --page     the page again from benchmarks/data/engines.json

Refuses a study with an unfinished or stale run; exits 1 where an arm is DIFFERENT and no report says why. Of each arm,
against `single` in fp64 on the same global batches:

    loss       largest relative difference of the loss over all steps
    gradient   largest relative distance of one tensor's gradient at step 1, and that tensor
    updates    size of the update of the first three steps over the control's: the median tensor's, a step each
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.pages.tables import DOCS, made, markdown_table, parser, read, write
from harness.config.errors import BadRequest, refuse
from harness.parity import StudyVerdict, Verdict, verdict
from harness.parity.outcome import Outcome, percent
from harness.parity.record import Record, load
from harness.parity.tiers.comparable import microbatches_per_rank
from harness.parity.tiers.gradients import compared
from harness.store import provenance
from harness.store.labels import strategy_of

DATA, PAGE = "engines.json", DOCS / "records" / "engines.md"
SHOWN = ("python", "torch", "megatron-fsdp", "deepspeed", "numpy")
CONFIRMED = (
    ("hfsdp_sums_gradients", "megatron_fsdp", "N = 4, not divided by the ranks"),
    ("adam_first_updates", "megatron_fsdp", "as if one step had been taken before"),
)
"""Faults of released engines that a report in docs/records/upstream shows without this harness: its name, the engine,
and the verdict's words about an arm that has it."""


def main(argv: Sequence[str]) -> int:
    """Write the page; returns 0, 1 where an arm is DIFFERENT and no report says why, 2 where nothing can be shown."""
    command = parser(__doc__)
    command.add_argument("--root", default="runs", help="where runs are stored (default: runs)")
    command.add_argument("--study", default="engines", help="a study that was run (default: engines)")
    command.add_argument("--page", action="store_true", help="read no run")
    arguments = command.parse_args(argv)
    if not arguments.page:
        try:
            write(DATA, evidence(verdict(arguments.root, arguments.study)))
        except BadRequest as error:
            print(error, file=sys.stderr)
            return 2
    facts = read(DATA)
    PAGE.write_text(page(facts), encoding="utf-8")
    unconfirmed = [row for row in facts["rows"] if row["outcome"] == "DIFFERENT" and not reports(row)]
    for row in unconfirmed:
        print(f"DIFFERENT without a report: {row['engine']} {row['sharding']} {row['dtype']}", file=sys.stderr)
    return 1 if unconfirmed else 0


def evidence(study: StudyVerdict) -> dict[str, Any]:
    """Raises `BadRequest`: an arm could not be compared; a table with holes is none."""
    unfit = [arm.sentence for arm in study.arms if arm.outcome is Outcome.NOT_COMPARABLE]
    if unfit or not study.arms:
        fix = f"python run.py -m study={study.study} launch.rerun=stale"
        raise refuse(f"study {study.study}", unfit[0] if unfit else "has no arm", fix=fix)
    origin = provenance.read(Path(study.arms[0].arm))
    return {
        "command": f"python run.py -m study={study.study} && python benchmarks/pages/engines_table.py",
        "question": study.question,
        "versions": {name: origin["versions"].get(name) for name in SHOWN},
        "machine": f"{origin.get('cpu_model')}, {origin.get('cpu_count')} cores",
        "sources_digest": origin["sources_digest"],
        "rows": [measured(arm) for arm in study.arms],
    }


def measured(arm: Verdict) -> dict[str, Any]:
    run, control = load(Path(arm.arm)), load(Path(arm.control))
    worst = max(compared(run.captures[1], control.captures[1]), key=lambda pair: pair.distance)
    losses = zip(run.series("loss"), control.series("loss"), strict=True)
    return {
        "engine": run.config["engine.name"],
        "sharding": strategy_of(run.config),
        "dtype": run.config["dtype.name"],
        "ranks": run.config["mesh.world_size"],
        "k": microbatches_per_rank(run.config),
        "outcome": arm.outcome.value,
        "loss": max(math.nan if None in (a, c) else abs(a - c) / abs(c) for a, c in losses),
        "gradient": worst.distance,
        "tensor": worst.name,
        "updates": [_update_ratio(run, control, step) for step in (1, 2, 3)],
        "sentence": arm.sentence,
    }


def _update_ratio(run: Record, control: Record, step: int) -> float:
    pairs = compared(run.updates[step], control.updates[step])
    return statistics.median(pair.arm_norm / pair.norm for pair in pairs if pair.norm)


def page(facts: dict[str, Any]) -> str:
    rows = pd.DataFrame(facts["rows"])
    counts = rows["outcome"].value_counts()
    dtypes = [*rows["dtype"].unique()]
    arms = rows.groupby(["engine", "sharding"], sort=False)
    overview = [
        (*arm, *(_outcomes(own.loc[own["dtype"] == dtype, "outcome"]) for dtype in dtypes)) for arm, own in arms
    ]
    every = []
    for r in rows.itertuples():
        updates = ", ".join(f"{ratio:.4f}" for ratio in r.updates)
        numbers = [percent(r.loss), percent(r.gradient), f"`{r.tensor}`", updates]
        every.append([r.engine, r.sharding, r.dtype, r.ranks, r.k, *numbers, r.outcome])
    head = ["engine", "sharding", "dtype", "ranks", "k", "loss", "gradient", "tensor", "updates 1, 2, 3", "verdict"]
    versions = ", ".join(f"{name} {each}" for name, each in facts["versions"].items() if each)
    told = ", ".join(f"{counts[o.value]} {o.value}" for o in Outcome if o.value in counts)
    parts = {
        "study": f"{facts['question']} {len(rows)} arms: {told}.\n\n{versions}; {facts['machine']}, gloo.",
        "verdicts": markdown_table(["engine", "sharding", *dtypes], overview),
        "odd": "\n".join(_odd(facts["rows"])).rstrip() or "Nothing.",
        "every": markdown_table(head, every),
    }
    return made(PAGE, parts)


def _outcomes(found: pd.Series) -> str:
    counts = found.value_counts(sort=False)
    several = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return several if len(counts) > 1 else f"{counts.index[0]} ({counts.iloc[0]})" if len(counts) else "not offered"


def _odd(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Every arm that is not the same training run, in the comparator's words, and the report that confirms it."""
    odd = [row for row in rows if row["outcome"] not in ("EQUAL", "EQUIVALENT")]
    for engine in dict.fromkeys(row["engine"] for row in odd):
        yield f"### {engine}\n"
        for row in (row for row in odd if row["engine"] == engine):
            links = ", ".join(f"[{name}](upstream/{name}.md)" for name in reports(row))
            confirmed = f" [{links}]" if links else " **Not confirmed by a script of its own.**"
            outcome, _, rest = row["sentence"].partition(": ")
            where = f"{row['sharding']}, {row['dtype']}, {row['ranks']} ranks, k = {row['k']}"
            yield f"- {where}: {outcome}: {rest.partition(': ')[2] or rest}{confirmed}"
        yield ""


def reports(row: dict[str, Any]) -> list[str]:
    """Names of the reports in docs/records/upstream about this arm's fault; another fault has none."""
    return [name for name, engine, says in CONFIRMED if engine == row["engine"] and says in row["sentence"]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
