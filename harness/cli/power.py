"""`power`: how good are the verdicts? Runs faults and clean pairs, judges them, and says what was found."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from harness.cli.verb import Verb, path
from harness.config.errors import refuse
from harness.config.faults import corpus
from harness.config.hints import nearest
from harness.parity.power.score import (
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
from harness.parity.processes import judging_processes
from harness.store.files import write_json
from harness.store.identity import directory_name
from harness.store.provenance import PACKAGE, git_facts, sources_digest, versions
from harness.store.screen import INDENT, fold, table, width
from harness.study.power import DIFFERENCES, STUDY, Kind, Pair, carry_out, pairs

PARTS = ("fixed", "held_out", "all")


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--short", action="store_true", help="every fault at full strength, and its twin: what CI runs")
    parser.add_argument("--only", metavar="TEXT", help="faults and differences whose name contains it")
    parser.add_argument("--part", choices=PARTS, default="fixed", help="which pairs (default: those not held out)")
    parser.add_argument("--out", type=path, metavar="FILE", help="write every judgement as JSON")


def _power(arguments: Namespace) -> int:
    if arguments.out is not None and not arguments.out.parent.is_dir():
        problem = f"there is no folder {arguments.out.parent}, and hours of runs come first"
        raise refuse(f"power --out {arguments.out}", problem, fix="a file in a folder that is there")
    chosen = [pair for pair in pairs(short=arguments.short) if _wanted(pair, arguments)]
    if not chosen:
        subject = f"power --only {arguments.only}" if arguments.only is not None else f"power --part {arguments.part}"
        wanted, names = arguments.only or "", [each.name for each in corpus().values() if not each.is_sealed]
        near = ", ".join(nearest(wanted, names)) or f"such as {names[0]}"
        listed = f"{near}; all in docs/records/power.md"
        choices = f"a part of a fault's name ({listed}), or of a difference's ({'; '.join(DIFFERENCES)})"
        raise refuse(subject, "names no fault and no difference", choices=choices)
    cells = carry_out(chosen, arguments.root)
    folder = Path(arguments.root) / STUDY
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


def _wanted(pair: Pair, arguments: Namespace) -> bool:
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


POWER = Verb("power", "how good verdicts are: faults put in on purpose, and clean pairs", _arguments, _power)
