"""What streams wait for, what breaks without each of these edges, and what a step launches, by tests/streams.

    python benchmarks/checks/streams.py [--parts N]
    python benchmarks/checks/streams.py --page      the page again from the data

Without arguments: the trainings of CI, which hold every pair of values. `--parts N` adds N of the 256 parts of
the whole product (strategies x hybrids x k x prefetch x buffers x offload x recomputation x clipping x stream of the
backward x dtype policy) that are still to come; a part has 63 trainings and takes half a minute of processor time. What
was recorded of other sources of the engine is thrown away. Writes benchmarks/data/streams.json and
docs/records/streams.md.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.pages import tables
from benchmarks.pages.tables import ROOT, markdown_table
from harness.store.provenance import files_digest
from tests.streams.cases import OTHERS, Case, cover, product
from tests.streams.edges import REASONS, Edge, Without
from tests.streams.steps import Arm, measured
from tests.streams.visits import Verdict, trained
from tests.support.spawn import run_ranks

DATA, PAGE = "streams.json", tables.DOCS / "records" / "streams.md"
SOURCES = ("harness/fsdp", "tests/streams")
PARTS = 256
Facts = dict[str, Any]


def digest() -> str:
    """Of the engine, and of what records and analyses it."""
    names = [str(path.relative_to(ROOT)) for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    return files_digest(ROOT, names)


def key_of(edge: Edge) -> str:
    """An edge as it is named in the data: stays as it is where lines move."""
    return f"{edge.file}:{edge.function}: {edge.source}"


def placeless(what: str) -> str:
    return re.sub(r"(\.py):\d+", r"\1", what)


def add(facts: Facts, ran: Mapping[Case, list[Verdict]]) -> None:
    for case, ranks in ran.items():
        facts["trainings"] += 1
        facts["operations"] += ranks[0].num_operations
        facts["races"] += [f"{case}: {placeless(str(race))}" for race in ranks[0].races]
        for without in ranks[0].edges:
            _add_edge(facts["edges"], case, without)


def _add_edge(edges: Facts, case: Case, without: Without) -> None:
    edge, race = without.edge, without.race
    row = edges.setdefault(key_of(edge), {**edge._asdict(), "trainings": 0, "racing": 0, "example": None})
    row["trainings"] += 1
    row["racing"] += race is not None
    if race is not None and row["example"] is None:
        told = {"buffer": race.buffer, "first": race.first, "then": race.then}
        row["example"] = {"training": str(case), **{name: placeless(words) for name, words in told.items()}}


def begun(parts: int) -> Facts:
    """What there is of these sources already, if more parts are asked for; else a new beginning."""
    sources = digest()
    held: Facts = tables.read(DATA, {})
    if parts and held.get("sources") == sources:
        return held
    facts: Facts = {"costs": costs(), "sources": sources, "torch": torch.__version__}
    facts |= {"python": platform.python_version(), "parts": 0, "of": PARTS, "product": len(product())}
    facts |= {"trainings": 0, "operations": 0, "races": [], "edges": {}}
    add(facts, trained((*cover(), *OTHERS)))
    return facts


RANKS, LAYERS = 2, 8
F32, BF16 = torch.float32, torch.bfloat16
ARMS = [
    *(Arm(engine, "optim_grads_params", wire) for wire in (F32, BF16) for engine in ("fsdp2", "native")),
    *(Arm(engine, "optim_grads") for engine in ("fsdp2", "native")),
    Arm("native", "optim"),
    Arm("native", "no_shard"),
]


def costs() -> Facts:
    """What a step launches under each arm."""
    found = run_ranks(measured, RANKS, RANKS, ARMS, LAYERS)[0]
    rows = [
        {
            "name": arm.engine,
            "strategy": arm.strategy,
            "wire": str(arm.wire).removeprefix("torch."),
            **asdict(each),
        }
        for arm, each in zip(ARMS, found, strict=True)
    ]
    return {"ranks": RANKS, "layers": LAYERS, "rows": rows}


# -- the page ----------------------------------------------------------------------------------------------------------


def page(facts: Facts) -> str:
    races, costs = facts["races"], facts["costs"]
    told = (
        f"{facts['trainings']:,} trainings of two steps on two to six ranks, {facts['operations']:,} operations on"
        f" streams, torch {facts['torch']}; {facts['parts']} of {facts['of']} parts of the product, which has"
        f" {facts['product']:,}: {len(races) or 'no'} race{'s' * (len(races) != 1)}."
    )
    parts = {
        "recorded": "\n".join([told, *(f"- {race}" for race in races)]),
        "edges": edges(facts["edges"].values()),
        "costs": f"{costs['layers']} blocks on {costs['ranks']} ranks.\n\n{launches(costs['rows'])}",
    }
    return tables.made(PAGE, parts)


def launches(rows: Any) -> str:
    head = ["kernels", "model's", "beside it", "collectives", "events and waits", "host stops"]
    cells = []
    for row in rows:
        beside = row["engine"] + row["update"]
        total = row["compute"] + beside + row["collectives"]
        counts = [total, row["compute"], beside, row["collectives"], row["orders"], sum(row["stops"].values())]
        cells.append([*_arm(row), *counts])
    return markdown_table([*ARM, *head], cells)


ARM = ("engine", "strategy", "wire")


def _arm(row: Facts) -> tuple[str, str, str]:
    return row["name"], f"`{row['strategy']}`", row["wire"]


def edges(rows: Any) -> str:
    head = ["edge", "what waits", "trainings with it", "of which race without it", "what breaks"]
    cells = []
    for row in sorted(rows, key=lambda row: -row["trainings"]):
        place = f"`{row['file'].removeprefix('harness/fsdp/')}`, `{row['function']}`: `{row['source']}`"
        cells.append([place, row["kind"], f"{row['trainings']:,}", f"{row['racing']:,}", broken(row)])
    return markdown_table(head, cells)


def broken(row: Facts) -> str:
    """A race there is without an edge, or what the edge is for."""
    example = row["example"]
    if example is None:
        return f"No access to memory: {REASONS[row['function']]}"
    then = example["then"].removeprefix("the next use of its memory, ")
    return f"{example['buffer'].replace(' | ', ' and ')}: {_short(example['first'])}; then {_short(then)}"


def _short(what: str) -> str:
    return what.replace("harness/fsdp/", "").replace(" at tests/streams/programs.py (forward)", " in the forward")


def main() -> int:
    parser = tables.parser(__doc__)
    parser.add_argument("--parts", type=int, default=0, help="parts of the product to add")
    parser.add_argument("--page", action="store_true", help="record nothing")
    arguments = parser.parse_args()
    facts = tables.read(DATA) if arguments.page else begun(arguments.parts)
    write(facts)
    for part in range(facts["parts"], min(facts["parts"] + arguments.parts, PARTS)):
        add(facts, trained(product()[part::PARTS]))
        facts["parts"] = part + 1
        write(facts)
        print(f"{facts['parts']} of {PARTS} parts, {facts['trainings']} trainings, {len(facts['races'])} races")
    return 1 if facts["races"] else 0


def write(facts: Facts) -> None:
    tables.write(DATA, facts)
    PAGE.write_text(page(facts), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
