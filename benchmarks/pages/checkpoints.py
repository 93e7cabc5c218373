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
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.pages.tables import DOCS, ROOT, markdown_table, read, versions, write

DATA, PAGE = "checkpoints.json", DOCS / "checkpoints.md"
PROSE = ROOT / "benchmarks" / "pages" / "checkpoints_prose.md"
KILLS, KILL_SEED = 50, 1
GIB = 1 << 30
MADE = "Made by `python benchmarks/pages/checkpoints.py --run {name}`; {made_with}."
TEXTS = {
    "matrix": """## Every layout into every other

{made}

{held} of {count} cells hold: after loading, every weight, as the engine gathers it, and every\
 chunk of the state has the same bits as in the one process that trained it, and the next update in fp64\
 differs from that process's by at most {tolerance:.0e} (largest difference {largest:.1e}). The files\
 of each row's checkpoint, put together without DCP, have the same bits too{wrong}\
. The model has tied, frozen and unused weights and odd sizes; it is trained with AdamW and clipping.

`=`: every bit agrees; `x`: not. The row's layout saved, the column's layout loaded.

{table}""",
    "TP shards": """## Under tensor parallelism, and in 8 bits

{made}

Cells that hold: {held}. Compared as above, with the\
 decoder that declares how it is cut; checkpoints put together without DCP have the reference's bits too{wrong}\
. In fp64 the next update lands within {tolerance:.0e} of the one process's (largest\
 distance {largest:.1e}). Under FP8, main weights, moments, amax histories and scales have the one process's\
 bits, and what layers of `native` multiply is, to the bit, the whole weight quantized, or a rank's TP shard of\
 that; the next update is another one where ranks multiply other TP shards of activations, and is not compared.\
 `2 TP 2` is 2 data-parallel by 2 tensor-parallel ranks.

{table}""",
    "kills": """## kill -9 during a save

{made}

Two ranks save one checkpoint after another, until one of them is killed at a random moment; then two new\
 ranks load what is there. This was done {count} times. Every element of the state of step n is n, so a\
 mixture of two saves would be seen.

{table}

Moments of the kills after the save began: {first:.1f} to {last:.1f} ms,\
 median {median:.1f} ms. The same with another seed runs in CI\
 (tests/checkpoint/test_killing.py).""",
    "cost": """## Cost

{made}

State in the shape of Llama 3.2 1B with {layers} of its 16 blocks, weights and AdamW in fp32,\
 {ranks} ranks. Each rank holds the state once per engine, and the engines take turns for\
 {rounds} rounds. Seconds are the median (fastest to slowest) of the slower rank. Ours computes a\
 checksum (XXH3) of every byte when it is written and before it is loaded, and then compares the loaded state\
 with the files; DCP checks nothing. Memory is the increase during the operation, on the rank where it is\
 larger: anonymous memory alone, and everything, with mapped files.

{table}

Ours over theirs: save {save:.2f}, load {load:.2f}.""",
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def run_matrix() -> dict[str, Any]:
    from tests.support.layouts import LAYOUTS

    return run_family(LAYOUTS)


def run_tp_shards() -> dict[str, Any]:
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
        "marks": ["".join("=" if cell.holds else "x" for cell in cells if cell.source == source) for source in layouts],
        "largest": max(cell.next_step for cell in cells),
        "problems": [f"{cell.source} into {cell.target}: {cell.problems[:5]}" for cell in cells if not cell.holds],
    }


def run_kills() -> dict[str, Any]:
    from tests.support.killing import kill_many

    with tempfile.TemporaryDirectory() as folder:
        found = kill_many(Path(folder), KILLS, KILL_SEED)
    return {"seed": KILL_SEED, "kills": [asdict(each) | {"holds": each.holds} for each in found]}


def run_cost() -> dict[str, Any]:
    from benchmarks.costs import checkpoint_cost

    with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # on the disk runs lie on, not in memory
        return checkpoint_cost.run(Path(folder) / "cost", layers=4, rounds=5)


RUNS = {"matrix": run_matrix, "TP shards": run_tp_shards, "kills": run_kills, "cost": run_cost}


# -- the page ----------------------------------------------------------------------------------------------------------


def page(data: dict[str, Any]) -> str:
    parts = [PROSE.read_text(encoding="utf-8").rstrip()]
    for name in (name for name in RUNS if name in data):
        told = SAID[name](data[name])
        parts.append(TEXTS[name].format(made=MADE.format(name=name, made_with=data[name]["made_with"]), **told))
    return "\n\n".join(parts) + "\n"


def _matrix(part: dict[str, Any]) -> dict[str, Any]:
    marks = "".join(part["marks"])
    wrong = f", but for {part['written_wrong']}" if part["written_wrong"] else ""
    told = {"held": marks.count("="), "count": len(marks), "table": _table(part), "wrong": wrong}
    return told | {"tolerance": part["tolerance"], "largest": part["largest"]}


def _table(part: dict[str, Any]) -> str:
    rows = [
        (f"{at} {name}", *marks)
        for at, (name, marks) in enumerate(zip(part["layouts"], part["marks"], strict=True), start=1)
    ]
    return markdown_table(["", *range(1, len(rows) + 1)], rows)


def _tp_shards(part: dict[str, Any]) -> dict[str, Any]:
    each = {name: _matrix(family) for name, family in part["families"].items()}
    return {
        "held": ", ".join(f"{name} {told['held']} of {told['count']}" for name, told in each.items()),
        "wrong": "".join(f"{told['wrong']} ({name})" for name, told in each.items() if told["wrong"]),
        "table": "\n\n".join(f"{name}:\n\n{told['table']}" for name, told in each.items()),
        **{key: each["fp64"][key] for key in ("tolerance", "largest")},
    }


def _kills(part: dict[str, Any]) -> dict[str, Any]:
    kills = part["kills"]
    torn, held = (sum(kill[key] for kill in kills) for key in ("torn", "holds"))
    newer = sum(kill["step"] == kill["begun"] for kill in kills)
    moments = sorted(1e3 * kill["seconds"] for kill in kills)
    head = [
        "kills",
        "left an unfinished folder",
        "loaded the last step reported saved",
        "or the one being saved",
        "right",
    ]
    return {
        "count": len(kills),
        "table": markdown_table(head, [(len(kills), torn, len(kills) - newer, newer, held)]),
        "first": moments[0],
        "last": moments[-1],
        "median": moments[len(moments) // 2],
    }


def _cost(part: dict[str, Any]) -> dict[str, Any]:
    seconds = {(row["who"], row["what"]): row["seconds"] for row in part["rows"]}
    ours, theirs = dict.fromkeys(who for who, _ in seconds)
    rows = []
    for row in part["rows"]:
        memory = [row["anonymous"], row["resident"], part["bytes"][row["who"]]]
        spread = f"{row['seconds']:.2f} ({row['fastest']:.2f} to {row['slowest']:.2f})"
        rows.append((row["who"], row["what"], spread, *(f"{size / GIB:.3f}" for size in memory)))
    head = ["", "", "seconds", "anonymous memory, GiB", "all memory, GiB", "on the disk, GiB"]
    ratios = {what: seconds[ours, what] / seconds[theirs, what] for what in ("save", "load")}
    return {**{key: part[key] for key in ("layers", "ranks", "rounds")}, **ratios, "table": markdown_table(head, rows)}


SAID = {"matrix": _matrix, "TP shards": _tp_shards, "kills": _kills, "cost": _cost}


def main(argv: Sequence[str]) -> int:
    """Run what is asked for, and write both files; returns 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", choices=tuple(RUNS), help="parts to run; none named: all")
    arguments = parser.parse_args(argv)
    data: dict[str, Any] = read(DATA, {})
    for name in (arguments.run or RUNS) if arguments.run is not None else ():
        data[name] = RUNS[name]() | {"made_with": f"{versions('torch', 'safetensors')}, {platform.machine()}, gloo"}
        write(DATA, data)
    PAGE.write_text(page(data), encoding="utf-8")
    families = [data.get("matrix", {}), *data.get("TP shards", {}).get("families", {}).values()]
    wrong = sum("x" in "".join(family.get("marks", ())) for family in families)
    wrong += sum(not kill["holds"] for kill in data.get("kills", {}).get("kills", []))
    print(f"{PAGE.relative_to(ROOT)}: {', '.join(name for name in RUNS if name in data)}; {wrong} do not hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    from benchmarks.pages import checkpoints  # ranks import what they run by name

    sys.exit(checkpoints.main(sys.argv[1:]))
