"""Write docs/records/behaviours.md: the behaviours an FSDP engine is known by, as measured on three engines.

    python benchmarks/pages/behaviours.py                          run all checks on all engines, write data and page
    python benchmarks/pages/behaviours.py --engines native         run these engines alone, keep the others' answers
    python benchmarks/pages/behaviours.py --keys 16,31             run these behaviours alone, keep the other answers
    python benchmarks/pages/behaviours.py --page                   write the page again from the data

The checks are those of tests/fsdp/behaviours; every answer and the versions are in benchmarks/data/behaviours.json.
megatron-fsdp runs through harness/engines/adapters/megatron_on_cpu.py where there is no CUDA. Exits 1 where our engine
lacks a behaviour that is not listed as pending.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.pages.tables import DOCS, markdown_table, read, versions, write
from tests.fsdp.behaviours.catalog import (
    BEHAVIOURS,
    DECIDED,
    PENDING,
    SECTIONS,
    SUBJECTS,
    UNPROVEN,
    WAITING,
)
from tests.fsdp.behaviours.running import Trial, run

DATA, PAGE = "behaviours.json", DOCS / "records" / "behaviours.md"
PATIENCE = 20.0
"""Seconds that a rank of an engine waits for another; some do so for ever."""

KNOWN = {
    ("megatron_fsdp", "2"): "rows_are_cut",
    ("megatron_fsdp", "16"): "idle_parameters",
    ("megatron_fsdp", "23"): "average_in_collective",
    ("megatron_fsdp", "26"): "lone_rank_doubles",
    ("megatron_fsdp", "27"): "hfsdp_sums_gradients",
    ("megatron_fsdp", "27-overlap"): "no_overlap_param_gather",
    ("megatron_fsdp", "28"): "adam_first_updates",
    ("megatron_fsdp", "29"): "one_parameter_group",
    ("megatron_fsdp", "45"): "no_units",
}
"""Failures that a script in docs/records/upstream shows without this repository's code."""

HEAD = """# What an FSDP engine is known by

*Record. What three FSDP engines do and do not do, check by check. Made by
`python benchmarks/pages/behaviours.py`; every answer is in `benchmarks/data/behaviours.json`.
{versions}; {machine}.*

Each behaviour is one check (`tests/fsdp/behaviours/`), the same for all engines: our own, NVIDIA's
megatron-fsdp as released, and torch's FSDP2. *holds*, *fails*: what was measured. *not offered*: the engine
cannot be asked for it. *pending*: our engine does not have it yet. A mutant is our engine with one mistake;
the check fails on it (`pytest tests/fsdp/behaviours`). Without a GPU megatron-fsdp runs through
`harness/engines/adapters/megatron_on_cpu.py`: one thread does everything in the order of issue, so memory
and overlap say less about a GPU than numbers do.
Names in brackets are reports with scripts that need nothing of this repository.
"""

Answers = dict[str, dict[str, dict[str, Any]]]
"""Engine -> behaviour -> answer."""


def main(argv: Sequence[str]) -> int:
    """Run, write; returns 1 where our own engine fails unexpectedly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(SUBJECTS), help="comma-separated (default: all)")
    parser.add_argument("--keys", default=",".join(BEHAVIOURS), help="comma-separated (default: all)")
    parser.add_argument("--page", action="store_true", help="run nothing")
    arguments = parser.parse_args(argv)
    facts = read(DATA, {"answers": {}})
    if not arguments.page:
        for engine, answers in measure(arguments.engines.split(","), arguments.keys.split(",")).items():
            facts["answers"].setdefault(engine, {}).update(answers)
        facts |= {"versions": versions("torch", "megatron-fsdp"), "machine": f"{platform.machine()}, gloo on CPU"}
        write(DATA, facts)
    PAGE.write_text(page(facts), encoding="utf-8")
    bad = [key for key, each in facts["answers"]["native"].items() if each["outcome"] != "holds" and key not in PENDING]
    for key in bad:
        print(f"native fails {key}: {facts['answers']['native'][key]['fact']}", file=sys.stderr)
    return 1 if bad else 0


def measure(engines: Sequence[str], keys: Sequence[str]) -> Answers:
    """Answers of every engine to every check."""
    found: Answers = {engine: {} for engine in engines}
    for engine in engines:
        for ranks in sorted({BEHAVIOURS[key].ranks for key in keys}):
            trials = [Trial(engine, key, whole=True) for key in keys if BEHAVIOURS[key].ranks == ranks]
            for trial, answer in run(trials, ranks, PATIENCE).items():
                found[engine][trial.key] = {"outcome": answer.outcome, "fact": answer.fact}
                print(f"{engine} {trial.key}: {answer.outcome}: {answer.fact} ({answer.seconds:.1f} s)", flush=True)
    return found


def page(facts: dict[str, Any]) -> str:
    answers = facts["answers"]
    kinds = ("holds", "fails", "not offered", "pending")
    each = {engine: [_outcome(engine, *item) for item in answers.get(engine, {}).items()] for engine in SUBJECTS}
    counts = [(engine, *map(outcomes.count, kinds)) for engine, outcomes in each.items()]
    parts = [HEAD.format(**facts), markdown_table(["engine", *kinds], counts)]
    for title, module in SECTIONS.items():
        rows = [
            [b.key, b.says]
            + [_cell(engine, b.key, answers.get(engine, {}).get(b.key)) for engine in SUBJECTS]
            + ["; ".join(mutant.says for mutant in b.mutants)]
            for b in BEHAVIOURS.values()
            if b.check.__module__ == module.__name__
        ]
        parts += [f"\n## {title}\n", markdown_table(["", "behaviour", *SUBJECTS, "mutants"], rows)]
    for title, lead, entries in (
        ("Decided otherwise", "Not wanted as they stand; what is done instead:", DECIDED),
        ("Unproven here", "No machine that ran this can show:", UNPROVEN),
        ("Waiting", "Not checked, or in part only, until other work is done:", WAITING),
        ("Pending in our engine", "Checked, and expected to fail until it has:", PENDING),
    ):
        parts += [f"\n## {title}\n", f"{lead}\n", *(f"- {key}: {text}" for key, text in entries.items())]
    return "\n".join(parts).rstrip() + "\n"


def _outcome(engine: str, key: str, answer: dict[str, Any]) -> str:
    pending = engine == "native" and key in PENDING and answer["outcome"] != "holds"
    return "pending" if pending else str(answer["outcome"])


def _cell(engine: str, key: str, answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "not run"
    outcome = _outcome(engine, key, answer)
    if outcome == "pending":
        return f"**pending**: {PENDING[key]}"
    report = KNOWN.get((engine, key)) if outcome == "fails" else None
    return f"**{outcome}**: {answer['fact']}{f' [[{report}](upstream/{report}.md)]' if report else ''}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
