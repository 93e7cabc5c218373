"""Write docs/records/engines.md: every engine in every way it shards, held against one process in double precision.

    python run.py -m study=engines
    python benchmarks/pages/engines_table.py

Reads the study's runs and the comparator's verdicts; writes docs/records/engines.md and benchmarks/data/engines.json
(every number in it, versions, machine). Refuses a study with an unfinished or stale run. For each arm, against `single`
in fp64 on the same global batches:

    loss       largest relative difference of the loss over all steps
    gradient   largest relative distance of one tensor's gradient at step 1, and that tensor
    updates    size of the update of the first three steps over the control's: the median tensor's, a step each
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.config.errors import BadRequest, refuse
from harness.fsdp.vocabulary import OuterStrategy
from harness.parity import StudyVerdict, Verdict, verdict
from harness.parity.outcome import Outcome, percent
from harness.parity.record import Record, load
from harness.parity.tiers.admissible import microbatches_per_rank
from harness.parity.tiers.gradients import TensorPair, compare
from harness.store import provenance
from harness.store.files import write_atomic, write_json

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("torch", "megatron-fsdp", "deepspeed", "numpy")


@dataclass(frozen=True)
class Row:
    """One arm. Sizes are relative to the control's."""

    engine: str
    sharding: str
    dtype: str
    ranks: int
    k: int
    outcome: str
    loss: float
    gradient: float
    tensor: str
    updates: list[float]
    """Median over tensors, of steps 1 to 3."""
    sentence: str

    @property
    def layout(self) -> str:
        """The ranks and microbatches in few words."""
        return f"{self.ranks} ranks, k = {self.k}"


CONFIRMED = (
    ("hfsdp_sums_gradients", "megatron_fsdp", "N = 4, not divided by the ranks"),
    ("adam_first_updates", "megatron_fsdp", "as if one step had been taken before"),
)
"""Faults of released engines that a report in docs/records/upstream shows without this harness: its name, the engine,
and what the verdict says of an arm that has it."""


def main(argv: Sequence[str]) -> int:
    """Write the page; returns 0, 1 where an arm is DIFFERENT and no report says why, 2 where nothing can be shown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs", help="where runs are stored (default: runs)")
    parser.add_argument("--study", default="engines", help="a study that was run (default: engines)")
    parser.add_argument(
        "--out", type=Path, default=ROOT, help="repository whose docs/ and benchmarks/data/ are written"
    )
    arguments = parser.parse_args(argv)
    try:
        study = verdict(arguments.root, arguments.study)
        refuse_unfit(study)
    except BadRequest as error:
        print(error, file=sys.stderr)
        return 2
    rows = [row(arm) for arm in study.arms]
    facts = evidence(study, rows)
    write_json(arguments.out / "benchmarks" / "data" / "engines.json", facts)
    page = arguments.out / "docs" / "records" / "engines.md"
    write_atomic(page, markdown(study, rows, facts))
    different = [r for r in rows if r.outcome == "DIFFERENT"]
    print(f"{page}: {len(rows)} arms, {len(different)} of them DIFFERENT")
    unconfirmed = [r for r in different if not reports(r)]
    for r in unconfirmed:
        print(f"DIFFERENT without a report: {r.engine} {r.sharding} {r.dtype}, {r.layout}", file=sys.stderr)
    return 1 if unconfirmed else 0


def refuse_unfit(study: StudyVerdict) -> None:
    """Raise `BadRequest` where an arm could not be compared: a table with holes is none."""
    unfit = [arm.sentence for arm in study.arms if arm.outcome is Outcome.NOT_COMPARABLE]
    if unfit or not study.arms:
        fix = f"python run.py -m study={study.study} launch.rerun=stale"
        raise refuse(f"study {study.study}", unfit[0] if unfit else "has no arm", fix=fix)


def row(arm: Verdict) -> Row:
    """Measure one arm against its control."""
    run, control = load(Path(arm.arm)), load(Path(arm.control))
    config = run.config
    inner, outer = str(config["sharding.strategy"]), str(config["sharding.outer"])
    hybrid = OuterStrategy[outer].hybrid
    worst = max(_gradients(run, control), key=lambda pair: pair.distance)
    return Row(
        engine=str(config["engine.name"]),
        sharding=hybrid if int(config["mesh.dp_outer"]) > 1 else inner,
        dtype=str(config["dtype.name"]),
        ranks=int(config["mesh.world_size"]),
        k=microbatches_per_rank(config),
        outcome=arm.outcome.value,
        loss=max(_relative(a, c) for a, c in zip(run.series("loss"), control.series("loss"), strict=True)),
        gradient=worst.distance,
        tensor=worst.name,
        updates=[_update_ratio(run, control, step) for step in (1, 2, 3)],
        sentence=arm.sentence,
    )


def _relative(left: float | None, right: float | None) -> float:
    if left is None or right is None:
        return math.nan
    return abs(left - right) / abs(right)


def _gradients(run: Record, control: Record) -> Iterable[TensorPair]:
    return compare(run.captures[1], control.captures[1])


def _update_ratio(run: Record, control: Record, step: int) -> float:
    pairs = compare(run.updates[step], control.updates[step])
    return statistics.median(pair.arm_norm / pair.norm for pair in pairs if pair.norm)


def evidence(study: StudyVerdict, rows: Sequence[Row]) -> dict[str, object]:
    """Everything in the page."""
    origin = provenance.read(Path(study.arms[0].arm))
    return {
        "command": f"python run.py -m study={study.study} && python benchmarks/pages/engines_table.py",
        "question": study.question,
        "versions": {name: origin["versions"].get(name) for name in ("python", *PEERS)},
        "machine": f"{origin.get('cpu_model')}, {origin.get('cpu_count')} cores",
        "sources_digest": origin["sources_digest"],
        "rows": [asdict(each) for each in rows],
    }


def reports(row: Row) -> list[str]:
    """Names of the reports in docs/records/upstream about what this arm's verdict says; any other fault has none."""
    return [name for name, engine, says in CONFIRMED if engine == row.engine and says in row.sentence]


def markdown(study: StudyVerdict, rows: Sequence[Row], facts: dict[str, object]) -> str:
    """The page."""
    counts = {name: sum(r.outcome == name for r in rows) for name in (outcome.value for outcome in Outcome)}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    versions = facts["versions"]
    assert isinstance(versions, dict)
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    parts = [
        "# Engines against one process in double precision\n",
        "*Record. Which engines train the same model as one process in fp64, arm by arm.",
        f"Made by `{facts['command']}`; every number is in `benchmarks/data/engines.json`.",
        f"{shown}; {facts['machine']}, gloo.*\n",
        f"{study.question} {len(rows)} arms: {told}.\n",
        "*loss*: largest relative difference over all steps. *gradient*: largest relative distance of one tensor's",
        "gradient at step 1. *updates*: size of the first three updates over the control's, median tensor. bf16 rounds",
        "activations and weights, so its distances are those of the format; the verdict knows (docs/verdicts.md).\n",
        *_overview(rows),
        *_different(rows),
        *_details(rows),
    ]
    return "\n".join(parts) + "\n"


def _overview(rows: Sequence[Row]) -> list[str]:
    dtypes = list(dict.fromkeys(r.dtype for r in rows))
    lines = ["## Verdicts\n", "| engine | sharding | " + " | ".join(dtypes) + " |", "|---|---|" + "---|" * len(dtypes)]
    for engine, sharding in dict.fromkeys((r.engine, r.sharding) for r in rows):
        cells = []
        for dtype in dtypes:
            here = [r.outcome for r in rows if (r.engine, r.sharding, r.dtype) == (engine, sharding, dtype)]
            each = [f"{here.count(o)} {o}" if len(set(here)) > 1 else f"{o} ({len(here)})" for o in dict.fromkeys(here)]
            cells.append(", ".join(each) or "not offered")
        lines.append(f"| {engine} | {sharding} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _different(rows: Sequence[Row]) -> list[str]:
    """Every arm that is not the same training run, in the comparator's words, and the report that confirms it."""
    lines = ["## What is not EQUIVALENT\n"]
    odd = [r for r in rows if r.outcome not in ("EQUAL", "EQUIVALENT")]
    if not odd:
        return [*lines, "Nothing.\n"]
    lines += [
        "Behind every name in brackets stands a report with a script that uses neither this harness nor its adapters;",
        "`tests/engines/test_upstream.py` runs the scripts.\n",
    ]
    for engine in dict.fromkeys(r.engine for r in odd):
        lines.append(f"### {engine}\n")
        for r in (r for r in odd if r.engine == engine):
            links = ", ".join(f"[{name}](upstream/{name}.md)" for name in reports(r))
            confirmed = f" [{links}]" if links else " **Not confirmed by a script of its own.**"
            lines.append(f"- {r.sharding}, {r.dtype}, {r.layout}: {_clause(r.sentence)}{confirmed}")
        lines.append("")
    return lines


def _clause(sentence: str) -> str:
    """A verdict without the names of the two runs."""
    outcome, _, rest = sentence.partition(": ")
    return f"{outcome}: {rest.partition(': ')[2] or rest}"


def _details(rows: Sequence[Row]) -> list[str]:
    lines = [
        "## Every arm\n",
        "| engine | sharding | dtype | ranks | k | loss | gradient | tensor | updates 1, 2, 3 | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        updates = ", ".join(f"{ratio:.4f}" for ratio in r.updates)
        cells = [r.engine, r.sharding, r.dtype, r.ranks, r.k, percent(r.loss), percent(r.gradient)]
        lines.append("| " + " | ".join(map(str, [*cells, f"`{r.tensor}`", updates, r.outcome])) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
