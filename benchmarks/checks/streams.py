"""What breaks without each edge between streams, over the trainings of tests/streams. Writes data/streams.json.

    python benchmarks/checks/streams.py [--parts N]

Without arguments: the trainings of CI, which hold every pair of values. `--parts N` adds N of the 256 parts of
the whole product (strategies x hybrids x k x prefetch x buffers x offload x recomputation x clipping x stream of the
backward x dtype policy) that are still to come; a part has 63 trainings and takes half a minute of processor time. What
was recorded of other sources of the engine is thrown away. `docs/records/streams.md` is made from it by
`python benchmarks/pages/streams.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from harness.store.files import write_json  # noqa: E402
from harness.store.provenance import files_digest  # noqa: E402
from tests.streams.cases import OTHERS, Case, cover, product  # noqa: E402
from tests.streams.cost import Machine  # noqa: E402
from tests.streams.edges import Edge, Without  # noqa: E402
from tests.streams.steps import Arm, measured  # noqa: E402
from tests.streams.visits import Verdict, trained  # noqa: E402
from tests.support.spawn import run_ranks  # noqa: E402

DATA = ROOT / "benchmarks" / "data" / "streams.json"
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
    """An operation without the number of its line."""
    return re.sub(r"(\.py):\d+", r"\1", what)


def add(facts: Facts, ran: Mapping[Case, list[Verdict]]) -> None:
    """Put into the data what cases found."""
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
    held: Facts = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    if parts and held.get("sources") == sources:
        return held
    facts: Facts = {
        "costs": costs(),
        "sources": sources,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "parts": 0,
        "of": PARTS,
        "product": len(product()),
        "trainings": 0,
        "operations": 0,
        "races": [],
        "edges": {},
    }
    add(facts, trained((*cover(), *OTHERS)))
    return facts


RANKS, LAYERS = 2, 8
LINKS = {"NVLink": (360e9, 15e-6), "400 Gbit/s a GPU": (45e9, 30e-6)}
"""Bytes per second, and seconds of latency."""
SIZES = {"width 4,096, 8,192 tokens": 64, "width 1,024, 2,048 tokens": 16}
"""Times the recorded width and tokens."""
MACHINES = [
    Machine(link_bytes_per_s=rate, latency_s=latency, widen=float(times**2), tokens=float(times), ranks=RANKS)
    for times in SIZES.values()
    for rate, latency in LINKS.values()
]
F32, BF16 = torch.float32, torch.bfloat16
ARMS = [
    *(Arm(engine, "optim_grads_params", wire) for wire in (F32, BF16) for engine in ("fsdp2", "native")),
    *(Arm(engine, "optim_grads") for engine in ("fsdp2", "native")),
    Arm("native", "optim"),
    Arm("native", "no_shard"),
]


def costs() -> Facts:
    """What a step launches under each arm, and when it would end."""
    found = run_ranks(measured, RANKS, RANKS, ARMS, LAYERS, MACHINES)[0]
    machine = {
        name: value for name, value in asdict(MACHINES[0]).items() if name in ("launch_s", "bytes_per_s", "flops")
    }
    rows = [
        {
            "name": arm.engine,
            "strategy": arm.strategy,
            "wire": str(arm.wire).removeprefix("torch."),
            **asdict(each.counts),
            "times": [{"step_ms": t.step_s * 1e3, "exposed_ms": t.exposed_s * 1e3} for t in each.timelines],
        }
        for arm, each in zip(ARMS, found, strict=True)
    ]
    return {"ranks": RANKS, "layers": LAYERS, "machine": machine, "sizes": list(SIZES), "links": LINKS, "rows": rows}


def main() -> int:
    """Record, and write the data after every part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=0, help="parts of the product to add")
    parts = parser.parse_args().parts
    facts = begun(parts)
    write_json(DATA, facts)
    for part in range(facts["parts"], min(facts["parts"] + parts, PARTS)):
        add(facts, trained(product()[part::PARTS]))
        facts["parts"] = part + 1
        write_json(DATA, facts)
        print(f"{facts['parts']} of {PARTS} parts, {facts['trainings']} trainings, {len(facts['races'])} races")
    return 1 if facts["races"] else 0


if __name__ == "__main__":
    sys.exit(main())
