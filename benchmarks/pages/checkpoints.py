"""Write docs/checkpoints.md and benchmarks/data/checkpoints.json: every layout into every other, kills, and the cost.

    python benchmarks/pages/checkpoints.py                  the page, from the data that is there
    python benchmarks/pages/checkpoints.py --run            all parts (about half an hour), then the page
    python benchmarks/pages/checkpoints.py --run matrix     one part: matrix, tp_shards, kills or cost

`matrix` saves and loads every pair of layouts and compares bit by bit (tests/support/layouts.py says how), `TP shards`
the same of layouts under tensor parallelism, in fp64 and under each FP8 recipe; `kills`
kills a rank at fifty random moments of a save; `cost` needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.store.files import write_atomic, write_json
from harness.store.provenance import versions

ROOT = Path(__file__).resolve().parents[2]
PAGE, DATA = ROOT / "docs" / "checkpoints.md", ROOT / "benchmarks" / "data" / "checkpoints.json"
PROSE = ROOT / "benchmarks" / "pages" / "checkpoints_prose.md"
PARTS = ("matrix", "TP shards", "kills", "cost")
KILLS, KILL_SEED = 50, 1
GIB = 1 << 30


def run_matrix() -> dict[str, Any]:
    """Every pair of layouts."""
    from tests.support.layouts import LAYOUTS

    return run_family(LAYOUTS)


def run_tp_shards() -> dict[str, Any]:
    """Every pair of each family of layouts under tensor parallelism."""
    from tests.support.layouts import TP_LAYOUTS

    return {"families": {name: run_family(layouts) for name, layouts in TP_LAYOUTS.items()}}


def run_family(layouts: Sequence[Any]) -> dict[str, Any]:
    """Every pair of layouts; the first trains the reference."""
    from tests.support.layouts import NEXT_STEP_TOLERANCE, run_cells, written_right

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(source, target) for target in layouts for source in layouts]
        cells = run_cells(Path(folder), pairs, layouts[0])
        written = {str(layout): written_right(Path(folder), layout) for layout in layouts}
    return {
        "layouts": [str(layout) for layout in layouts],
        "tolerance": NEXT_STEP_TOLERANCE,
        "written_wrong": {name: keys for name, keys in written.items() if keys},
        "seconds": time.monotonic() - began,
        "cells": [
            {
                "from": str(cell.source),
                "to": str(cell.target),
                "holds": cell.holds,
                "next_step": cell.next_step,
                "problems": list(cell.problems[:5]),
            }
            for cell in cells
        ],
    }


def run_kills() -> dict[str, Any]:
    """Fifty kills."""
    from tests.support.killing import kill_many

    with tempfile.TemporaryDirectory() as folder:
        found = kill_many(Path(folder), KILLS, KILL_SEED)
    return {"seed": KILL_SEED, "kills": [asdict(each) | {"holds": each.holds} for each in found]}


def run_cost() -> dict[str, Any]:
    """Against FSDP2 with DCP."""
    from benchmarks.costs import checkpoint_cost

    with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # on the disk runs lie on, not in memory
        return checkpoint_cost.run(Path(folder) / "cost", layers=4, rounds=5)


def page(data: dict[str, Any]) -> str:
    """The Markdown of docs/checkpoints.md."""
    parts = [PROSE.read_text(encoding="utf-8").rstrip()]
    parts += [_matrix(data["matrix"])] if "matrix" in data else []
    parts += [_tp_shards(data["TP shards"])] if "TP shards" in data else []
    parts += [_kills(data["kills"])] if "kills" in data else []
    parts += [_cost(data["cost"])] if "cost" in data else []
    return "\n\n".join(parts) + "\n"


def _made(part: dict[str, Any], name: str) -> str:
    return f"Made by `python benchmarks/pages/checkpoints.py --run {name}`; {part['made_with']}."


def _matrix(part: dict[str, Any]) -> str:
    held = sum(cell["holds"] for cell in part["cells"])
    largest = max(cell["next_step"] for cell in part["cells"])
    lines = [
        "## Every layout into every other",
        "",
        _made(part, "matrix"),
        "",
        f"{held} of {len(part['cells'])} cells hold: after loading, every weight, as the engine gathers it, and every"
        " chunk of the state has the same bits as in the one process that trained it, and the next update in fp64"
        f" differs from that process's by at most {part['tolerance']:.0e} (largest difference {largest:.1e}). The files"
        " of each row's checkpoint, put together without DCP, have the same bits too"
        + (f", but for {part['written_wrong']}" if part["written_wrong"] else "")
        + ". The model has tied, frozen and unused weights and odd sizes; it is trained with AdamW and clipping.",
        "",
        "`=`: every bit agrees; `x`: not. The row's layout saved, the column's layout loaded.",
        "",
        *_table(part),
    ]
    return "\n".join(lines)


def _table(part: dict[str, Any]) -> list[str]:
    names = part["layouts"]
    cells = {(cell["from"], cell["to"]): cell for cell in part["cells"]}
    head = ["", *(str(number) for number in range(1, len(names) + 1))]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for number, source in enumerate(names, start=1):
        marks = ["=" if cells[source, target]["holds"] else "x" for target in names]
        lines.append("| " + " | ".join([f"{number} {source}", *marks]) + " |")
    return lines


def _tp_shards(part: dict[str, Any]) -> str:
    families = part["families"]
    held = {name: sum(cell["holds"] for cell in family["cells"]) for name, family in families.items()}
    told = {name: f"{held[name]} of {len(family['cells'])}" for name, family in families.items()}
    wrong = {name: family["written_wrong"] for name, family in families.items() if family["written_wrong"]}
    plain = max(cell["next_step"] for cell in families["fp64"]["cells"])
    lines = [
        "## Under tensor parallelism, and in 8 bits",
        "",
        _made(part, "TP shards"),
        "",
        f"Cells that hold: {', '.join(f'{name} {text}' for name, text in told.items())}. Compared as above, with the"
        " decoder that declares how it is cut; checkpoints put together without DCP have the reference's bits too"
        + (f", but for {wrong}" if wrong else "")
        + f". In fp64 the next update lands within {families['fp64']['tolerance']:.0e} of the one process's (largest"
        f" distance {plain:.1e}). Under FP8, main weights, moments, amax histories and scales have the one process's"
        " bits, and what layers of `native` multiply is, to the bit, the whole weight quantized, or a rank's TP shard"
        " of that; the next update is another one where ranks multiply other TP shards of activations, and is not"
        " compared."
        " `2 TP 2` is 2 data-parallel by 2 tensor-parallel ranks.",
    ]
    for name, family in families.items():
        lines += ["", f"{name}:", "", *_table(family)]
    return "\n".join(lines)


def _kills(part: dict[str, Any]) -> str:
    kills = part["kills"]
    torn = sum(kill["torn"] for kill in kills)
    newer = sum(kill["step"] == kill["begun"] for kill in kills)
    held = sum(kill["holds"] for kill in kills)
    moments = sorted(1e3 * kill["seconds"] for kill in kills)
    lines = [
        "## kill -9 during a save",
        "",
        _made(part, "kills"),
        "",
        "Two ranks save one checkpoint after another, until one of them is killed at a random moment; then two new"
        f" ranks load what is there. This was done {len(kills)} times. Every element of the state of step n is n, so a"
        " mixture of two saves would be seen.",
        "",
        "| kills | left an unfinished folder | loaded the last step reported saved | or the one being saved | right |",
        "|---|---|---|---|---|",
        f"| {len(kills)} | {torn} | {len(kills) - newer} | {newer} | {held} |",
        "",
        f"Moments of the kills after the save began: {moments[0]:.1f} to {moments[-1]:.1f} ms,"
        f" median {moments[len(moments) // 2]:.1f} ms. The same with another seed runs in CI"
        " (tests/checkpoint/test_killing.py).",
    ]
    return "\n".join(lines)


def _cost(part: dict[str, Any]) -> str:
    rows = {(row["who"], row["what"]): row for row in part["rows"]}
    ours, theirs = (dict.fromkeys(who for who, _ in rows)).keys()
    lines = [
        "## Cost",
        "",
        _made(part, "cost"),
        "",
        f"State in the shape of Llama 3.2 1B with {part['layers']} of its 16 blocks, weights and AdamW in fp32,"
        f" {part['ranks']} ranks. Each rank holds the state once per engine, and the engines take turns for"
        f" {part['rounds']} rounds. Seconds are the median (fastest to slowest) of the slower rank. Ours computes a"
        " checksum (XXH3) of every byte when it is written and before it is loaded, and then compares the loaded state"
        " with the files; DCP checks nothing. Memory is the increase during the operation, on the rank where it is"
        " larger: anonymous memory alone, and everything, with mapped files.",
        "",
        "| | | seconds | anonymous memory, GiB | all memory, GiB | on the disk, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for (who, what), row in rows.items():
        lines.append(
            f"| {who} | {what} | {row['seconds']:.2f} ({row['fastest']:.2f} to {row['slowest']:.2f}) |"
            f" {row['anonymous'] / GIB:.3f} | {row['resident'] / GIB:.3f} |"
            f" {part['bytes'][who] / GIB:.3f} |"
        )
    ratios = {what: rows[ours, what]["seconds"] / rows[theirs, what]["seconds"] for what in ("save", "load")}
    lines += ["", f"Ours over theirs: save {ratios['save']:.2f}, load {ratios['load']:.2f}."]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run what is asked for, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", choices=PARTS, help="parts to run; none named: all")
    arguments = parser.parse_args(argv)
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    if arguments.run is not None:
        runs = {"matrix": run_matrix, "TP shards": run_tp_shards, "kills": run_kills, "cost": run_cost}
        for name in arguments.run or PARTS:
            held = {key: value for key, value in versions().items() if key in ("python", "torch", "safetensors")}
            told = ", ".join(f"{key} {value}" for key, value in held.items())
            data[name] = runs[name]() | {"made_with": f"{told}, {platform.machine()}, gloo"}
            write_json(DATA, data)
    write_atomic(PAGE, page(data))
    wrong = [cell for cell in data.get("matrix", {}).get("cells", []) if not cell["holds"]]
    families = data.get("TP shards", {}).get("families", {})
    wrong += [cell for family in families.values() for cell in family["cells"] if not cell["holds"]]
    wrong += [kill for kill in data.get("kills", {}).get("kills", []) if not kill["holds"]]
    print(f"{PAGE.relative_to(ROOT)}: {Counter(name for name in PARTS if name in data)}, {len(wrong)} do not hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    from benchmarks.pages import checkpoints  # ranks import what they run by name

    sys.exit(checkpoints.main(sys.argv[1:]))
