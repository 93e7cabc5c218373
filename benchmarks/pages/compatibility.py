"""Write docs/compatibility.md: what ordinary programs come to under DDP, FSDP2, megatron-fsdp and our engine.

    python benchmarks/pages/compatibility.py                       run everything, write data and page
    python benchmarks/pages/compatibility.py --engines DDP,ours    these engines alone, keep the others' outcomes
    python benchmarks/pages/compatibility.py --headings Freezing   these scenarios alone, keep the other outcomes
    python benchmarks/pages/compatibility.py --page                write the page again from the data

Scenarios are programs of tests/fsdp/ordinary, run as text on two ranks with data of their own and held against one
process in fp64. A program may take a minute, a wait for another rank six seconds: what takes longer hangs. Outcomes,
sentences and versions are in benchmarks/data/compatibility.json. Exits 1 where our engine is wrong or hangs.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.pages.tables import DOCS, made, markdown_table, parser, read, versions, write
from tests.fsdp.ordinary.dialects import OURS, PEERS, attempt_as, changed_lines
from tests.fsdp.ordinary.judging import TOLERANCE, difference
from tests.fsdp.ordinary.program import Program
from tests.fsdp.ordinary.running import Lost, Outcome, Raised, Trained, reference, run
from tests.fsdp.ordinary.scenarios import SCENARIOS
from tests.fsdp.pairs import STRATEGIES

DATA, PAGE = "compatibility.json", DOCS / "compatibility.md"
PATIENCE = 6
RIGHT, REFUSED, RAISES, WRONG, HANGS = "right", "refused", "raises", "wrong", "hangs"
WAITED = ("Timed out waiting", "Connection closed by peer", "CollectiveError")
"""Words of a rank that was left waiting."""

Facts = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run, write; returns 1 where our engine is silently wrong or hangs."""
    command = parser(__doc__)
    command.add_argument("--engines", default=",".join([*PEERS, OURS]), help="comma-separated (default: all)")
    command.add_argument("--headings", default=",".join(SCENARIOS), help="comma-separated (default: all)")
    command.add_argument("--page", action="store_true", help="run nothing")
    chosen = command.parse_args(argv)
    facts: Facts = read(DATA, {"outcomes": {}})
    if not chosen.page:
        for name, column, told in measure(chosen.engines.split(","), chosen.headings.split(",")):
            facts["outcomes"].setdefault(name, {})[column] = told
        known = [name for programs in SCENARIOS.values() for name in programs]
        facts["outcomes"] = {name: facts["outcomes"][name] for name in known if name in facts["outcomes"]}
        facts |= {"versions": versions("torch", "megatron-fsdp"), "machine": f"{platform.machine()}, gloo on CPU"}
        write(DATA, facts)
    PAGE.write_text(page(facts), encoding="utf-8")
    bad = [(n, c) for n, told in facts["outcomes"].items() for c, (kind, _) in told.items()
           if c in STRATEGIES and kind in (WRONG, HANGS)]  # fmt: skip
    for name, column in bad:
        print(f"{name}: {column}: {facts['outcomes'][name][column]}", file=sys.stderr)
    return 1 if bad else 0


# -- outcomes ----------------------------------------------------------------------------------------------------------


def measure(engines: Sequence[str], headings: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Scenario, column, and what came of it: a word and a sentence."""
    programs = {name: program for heading in headings for name, program in SCENARIOS[heading].items()}
    right = {name: reference(program) for name, program in programs.items()}
    for column, engine in columns(engines):
        how = {"strategy": column} if column in STRATEGIES else {}
        todo = [(engine, replace(program, **how)) for program in programs.values()]
        for name, ranks in zip(programs, run(attempt_as, todo, patience=PATIENCE), strict=True):
            told = judged(ranks, right[name])
            print(f"{column}: {name}: {told[0]} {told[1][:100]}", flush=True)
            yield name, column, told


def columns(engines: Sequence[str]) -> list[tuple[str, str]]:
    """Columns of the data, and the engine of each; ours has one a strategy."""
    peers = [(name, name) for name in PEERS if name in engines]
    return peers + [(strategy, OURS) for strategy in STRATEGIES if OURS in engines]


def judged(ranks: Sequence[Outcome], right: Trained) -> list[str]:
    """A word and a sentence: of the engine where it refuses, else of what went wrong."""
    lost = [each.why for each in ranks if isinstance(each, Lost)]
    if lost:
        return [HANGS, ""] if "hung" in lost[0] else [RAISES, f"a rank is {lost[0]}"]
    raises = [each for each in ranks if isinstance(each, Raised)]
    if any(word in str(each) for each in raises for word in WAITED):
        return [HANGS, _first_line(next((str(e) for e in raises if not any(w in str(e) for w in WAITED)), ""))]
    if raises:
        kind = REFUSED if all(each.by_engine for each in raises) and len(raises) == len(ranks) else RAISES
        return [kind, _first_line(str(raises[0]))]
    told = difference([each for each in ranks if isinstance(each, Trained)], right, TOLERANCE["fp32"])
    return [WRONG, told] if told else [RIGHT, ""]


def _first_line(text: str) -> str:
    line = text.strip().split("\n")[0]
    return line if len(line) <= 300 else line[:300] + " ..."


# -- the page ----------------------------------------------------------------------------------------------------------


def page(facts: Facts) -> str:
    notes: dict[str, int] = {}
    head = ["", *PEERS, "ours", "lines from DDP, FSDP2, megatron-fsdp"]
    tables = [
        f"## {heading}\n\n{markdown_table(head, [_row(*each, facts, notes) for each in programs.items()])}\n"
        for heading, programs in SCENARIOS.items()
    ]
    sentences = "\n".join(f"{number}. {_escaped(text)}" for text, number in notes.items())
    with_what = f"{facts['versions']}; {facts['machine']}."
    return made(PAGE, {"tables": "\n".join([f"{with_what}\n", *tables]).rstrip(), "sentences": sentences})


def _row(name: str, program: Program, facts: Facts, notes: dict[str, int]) -> list[str]:
    told = facts["outcomes"].get(name, {})
    cells = [_cell(told[peer], notes) if peer in told else "not run" for peer in PEERS]
    return [name, *cells, _ours(told, notes), ", ".join(str(changed_lines(peer, program)) for peer in PEERS)]


def _ours(told: dict[str, list[str]], notes: dict[str, int]) -> str:
    """One word where all strategies agree, else a word for each group of them."""
    groups: dict[str, list[int]] = {}
    for stage, strategy in enumerate(STRATEGIES):
        if strategy in told:
            groups.setdefault(_cell(told[strategy], notes), []).append(stage)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"ZeRO-{', '.join(map(str, stages))}: {cell}" for cell, stages in groups.items()) or "not run"


def _cell(told: Sequence[str], notes: dict[str, int]) -> str:
    kind, sentence = told
    if kind in (RIGHT, WRONG) or not sentence:
        return kind if kind == RIGHT else f"**{kind}**"
    number = notes.setdefault(sentence, len(notes) + 1)
    return f"{kind if kind == REFUSED else f'**{kind}**'} [{number}](#what-was-said)"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
