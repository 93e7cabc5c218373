"""How good are the verdicts? Run faults and clean pairs, judge them, and say what was found.

    python benchmarks/power/first_steps.py --part all --out benchmarks/data/power.json

The exit code is 1 where a fault at full strength passes or a clean pair does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.power.score import (
    Judged,
    Rate,
    as_json,
    caught,
    caught_unwitnessed,
    false_alarms,
    judge_pair,
    placed,
    published_rates,
)
from benchmarks.power.steps import DIFFERENCES, STUDY, Kind, Pair, carry_out, pairs
from harness.parity.processes import judging_processes
from harness.store.files import write_json
from harness.store.identity import directory_name
from harness.store.provenance import PACKAGE, git_facts, sources_digest, versions
from harness.store.screen import INDENT, fold, table, width
from tests.faults.corpus import corpus

PARTS = ("fixed", "held_out", "all")


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the study, or a part of it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where runs are stored (default: runs)")
    parser.add_argument(
        "--short", action="store_true", help="every fault at full strength, and its baseline: what CI runs"
    )
    parser.add_argument("--only", metavar="TEXT", help="faults and differences whose name contains it")
    parser.add_argument("--part", choices=PARTS, default="fixed", help="which pairs (default: those not held out)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every judgement as JSON")
    arguments = parser.parse_args(argv)
    if arguments.out is not None and not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}, and hours of runs come first")
    chosen = [pair for pair in pairs(short=arguments.short) if _wanted(pair, arguments)]
    if not chosen:
        names = ", ".join([*corpus(), *DIFFERENCES])
        parser.error(f"--only {arguments.only} --part {arguments.part} names no fault and no difference of: {names}")
    cells = carry_out(chosen, str(arguments.root))
    folder = arguments.root / STUDY
    paths = {overrides: folder / directory_name(cell.config) for overrides, cell in cells.items()}
    with judging_processes() as pool:
        judged = list(pool.map(_judged, chosen, ((paths[pair.arm], paths[pair.control]) for pair in chosen)))
    if arguments.out is not None:
        made = {"code": git_facts(PACKAGE.parent), "sources": sources_digest(), "versions": versions()}
        write_json(arguments.out, {**made, "pairs": as_json(judged)})
    print(text(judged))
    unseen = any(each.kind == Kind.faulty.value and each.strength == "full" and not each.caught for each in judged)
    return int(unseen or bool(false_alarms(judged).hits))


def _judged(pair: Pair, paths: tuple[Path, Path]) -> Judged:
    return judge_pair(
        *paths,
        kind=pair.kind.value,
        fault=pair.name,
        strength=pair.strength,
        against=pair.against,
        held_out=pair.held_out,
        stage=corpus()[pair.name].stage if pair.kind is Kind.faulty else "",
    )


def _wanted(pair: Pair, arguments: argparse.Namespace) -> bool:
    part = arguments.part == "all" or pair.held_out is (arguments.part == "held_out") or arguments.short
    return part and (arguments.only is None or arguments.only in pair.name)


def text(judged: list[Judged]) -> str:
    """Every fault on a line, then the rates."""
    rows = [
        (each.fault, each.strength, each.against, each.outcome, each.tier, str(each.step or ""), each.named, each.stage)
        for each in judged
        if each.kind == "faulty" or each.caught
    ]
    head = ("fault", "strength", "against", "verdict", "tier", "step", "named", "is in")
    columns = width()
    lines = table(head, rows, columns, flexible=(2, 6, 7), folded=(2, 6, 7))
    rates = [f"faults found: {_rate(caught(judged))}", f"stage right: {_rate(placed(judged))}"]
    rates += [f"found where runs say nothing of themselves: {_rate(caught_unwitnessed(judged))}"]
    rates += [f"false alarms: {_rate(false_alarms(judged))}"]
    for name, rate in published_rates(judged, "faulty").items():
        rates.append(f"{name}: found {_rate(rate)}, alarms {_rate(published_rates(judged, 'clean')[name])}")
    return "\n".join([*lines, "", *(line for rate in rates for line in fold(rate, columns, INDENT))])


def _rate(rate: Rate) -> str:
    if not rate.of:
        return "none"
    bounds = f"at least {100 * rate.at_least:.1f}, at most {100 * rate.at_most:.1f}"
    return f"{rate.hits} of {rate.of} ({100 * rate.share:.1f} %, {bounds})"


if __name__ == "__main__":
    sys.exit(main())
