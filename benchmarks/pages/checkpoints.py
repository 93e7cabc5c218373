"""Fill in the made parts of docs/checkpoints.md: every layout into every other, and kills.

    python benchmarks/pages/checkpoints.py                  the parts, from benchmarks/data/checkpoints.json
    python benchmarks/pages/checkpoints.py --run            all of them anew (about half an hour)
    python benchmarks/pages/checkpoints.py --run matrix     one: matrix, TP shards or kills

`matrix` saves and loads every pair of layouts and compares bit by bit (tests/support/layouts.py says how), `TP shards`
the same of layouts under tensor parallelism, in fp64 and under each FP8 recipe; `kills` kills a rank at fifty random
moments of a save.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.pages import tables
from benchmarks.pages.tables import DOCS, markdown_table
from tests.support.killing import kill_many
from tests.support.layouts import LAYOUTS, NEXT_STEP_TOLERANCE, TP_LAYOUTS, run_cells, written_right

DATA, PAGE = "checkpoints.json", DOCS / "checkpoints.md"
KILLS, KILL_SEED = 50, 1


# -- measuring ---------------------------------------------------------------------------------------------------------


def run_family(layouts: Sequence[Any]) -> dict[str, Any]:
    """Every pair of layouts; the first trains the reference."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(source, target) for target in layouts for source in layouts]
        cells = run_cells(Path(folder), pairs, layouts[0])
        written = {str(layout): written_right(Path(folder), layout) for layout in layouts}
    return {
        "layouts": [str(layout) for layout in layouts],
        "tolerance": NEXT_STEP_TOLERANCE,
        "written_wrong": {name: keys for name, keys in written.items() if keys},
        "marks": ["".join("=" if cell.holds else "x" for cell in cells if cell.source == source) for source in layouts],
        "largest": max(cell.next_step for cell in cells),
        "problems": [f"{cell.source} into {cell.target}: {cell.problems[:5]}" for cell in cells if not cell.holds],
    }


def run_kills() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = kill_many(Path(folder), KILLS, KILL_SEED)
    return {"seed": KILL_SEED, "kills": [asdict(each) | {"holds": each.holds} for each in found]}


# -- the page ----------------------------------------------------------------------------------------------------------


def _matrix(part: dict[str, Any], *, steps: bool = True) -> str:
    """steps: the next updates were compared."""
    marks = "".join(part["marks"])
    rows = [
        (f"{at} {name}", *marks)
        for at, (name, marks) in enumerate(zip(part["layouts"], part["marks"], strict=True), start=1)
    ]
    table = markdown_table(["", *range(1, len(rows) + 1)], rows)
    distance = (
        f"; next update: largest difference {part['largest']:.1e}, at most {part['tolerance']:.0e}" if steps else ""
    )
    wrong = f" Put together otherwise: {part['written_wrong']}." if part["written_wrong"] else ""
    return f"{marks.count('=')} of {len(marks)} cells hold{distance}.{wrong}\n\n{table}"


def _tp_shards(part: dict[str, Any]) -> str:
    return "\n\n".join(f"{name}: {_matrix(each, steps=name == 'fp64')}" for name, each in part["families"].items())


def _kills(part: dict[str, Any]) -> str:
    kills = part["kills"]
    torn, held = (sum(kill[key] for kill in kills) for key in ("torn", "holds"))
    newer = sum(kill["step"] == kill["begun"] for kill in kills)
    moments = sorted(1e3 * kill["seconds"] for kill in kills)
    head = ("kills", "left an unfinished folder", "loaded the last step reported saved", "or the one being saved")
    table = markdown_table((*head, "right"), [(len(kills), torn, len(kills) - newer, newer, held)])
    when = f"{moments[0]:.1f} to {moments[-1]:.1f} ms, median {moments[len(moments) // 2]:.1f} ms"
    return f"{table}\n\nMoments of the kills after the save began: {when}."


PARTS = {
    "matrix": (lambda: run_family(LAYOUTS), _matrix),
    "TP shards": (lambda: {"families": {name: run_family(each) for name, each in TP_LAYOUTS.items()}}, _tp_shards),
    "kills": (run_kills, _kills),
}


def page(data: dict[str, Any]) -> str:
    command = "python benchmarks/pages/checkpoints.py --run"
    heads = {name: f"Made by `{command} {name}`; {data[name]['made_with']}." for name in PARTS}
    return tables.made(PAGE, {name: f"{head}\n\n{PARTS[name][1](data[name])}" for name, head in heads.items()})


def main(argv: Sequence[str]) -> int:
    """Run what is asked for, and fill in the parts; returns 1 where something does not hold."""
    parser = tables.parser(__doc__)
    parser.add_argument("--run", nargs="*", choices=tuple(PARTS), help="parts to run; none named: all")
    arguments = parser.parse_args(argv)
    data: dict[str, Any] = tables.read(DATA, {})
    for name in (arguments.run or PARTS) if arguments.run is not None else ():
        made_with = f"{tables.versions('torch', 'safetensors')}, {platform.machine()}, gloo"
        data[name] = PARTS[name][0]() | {"made_with": made_with}
        tables.write(DATA, data)
    PAGE.write_text(page(data), encoding="utf-8")
    families = [data["matrix"], *data["TP shards"]["families"].values()]
    wrong = sum("x" in "".join(family["marks"]) for family in families)
    wrong += sum(not kill["holds"] for kill in data["kills"]["kills"])
    print(f"{PAGE}: {wrong} do not hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    from benchmarks.pages import checkpoints  # ranks import what they run by name

    sys.exit(checkpoints.main(sys.argv[1:]))
