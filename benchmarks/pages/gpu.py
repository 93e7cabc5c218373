"""Fill in the made parts of docs/records/gpu.md: what the acceptance found on a GPU, and what is not measured.

    python benchmarks/pages/gpu.py

Results are benchmarks/data/gpu/*.json, of `make gpu`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.pieces import PIECES, files
from benchmarks.pages.tables import DATA as ALL_DATA, DOCS, made, markdown_table

DATA, PAGE = ALL_DATA / "gpu", DOCS / "records" / "gpu.md"
NOT_MEASURED = "not measured"
TIMED = ("times_125m", "times_1b")

Facts = dict[str, Any]


def read() -> dict[str, Facts]:
    """Results by piece; pieces without one are not there."""
    return {name: json.loads(path.read_text("utf-8")) for name, path in files(DATA).items() if path.exists()}


def page(results: dict[str, Facts]) -> str:
    pieces = [(f"`{piece.name}`", piece.asks, *outcome(results.get(piece.name))) for piece in PIECES]
    parts = {"pieces": markdown_table(["piece", "what it asks", "what it found", "on", "seconds"], pieces)}
    return made(PAGE, parts | {name: rows(results.get(name)) for name in TIMED})


def outcome(result: Facts | None) -> tuple[str, str, str]:
    """Finding, device and seconds of a piece."""
    if result is None:
        return NOT_MEASURED, "-", "-"
    machine = result["machine"]
    device = (machine["devices"] or ["CPU"])[0]
    on = f"{device}, torch {machine['versions']['torch']}, NCCL {machine['nccl']}, driver {machine['driver']}"
    return summary(result), on, f"{result['wall_s']:.0f}"


def summary(result: Facts) -> str:
    found = result["found"]
    counts = Counter(row["outcome"] for key in ("verdicts", "again") for row in found.get(key, ()))
    words = [f"{count} {name}" for name, count in sorted(counts.items())]
    words += [product(row) for row in found.get("products", ()) if row.get("built", True)]
    words += [found["reason"]] if found.get("reason") else []
    words += sorted({told for run in found.get("network", {}).values() if (told := unregistered(run["nccl_ub"]))})
    words += [f"{len(result['wrong'])} wrong"] if result["wrong"] else []
    return ", ".join(words) or "right"


def unregistered(buffers: Facts) -> str:
    """Why buffers that were to be registered were not; empty otherwise."""
    if buffers["requested"] == "none" or buffers["effective"] != "none":
        return ""
    return f"`nccl_ub={buffers['requested']}` not in effect ({buffers['reason']})"


def product(row: Facts) -> str:
    return f"{row['kind']} within {row['error']:.0e}" if row["right"] else f"{row['kind']} not used: {row['why'][0]}"


def rows(result: Facts | None) -> str:
    head = ["engine", "strategy", "step, ms", "exposed comm., ms", "peak, MiB", "beside tensors, MiB", "blocks"]
    cells = [[NOT_MEASURED] * len(head)] if result is None else []
    for row in result["found"]["rows"] if result else ():
        exposed = "-" if row["exposed_comm_ms"] is None else f"{row['exposed_comm_ms']:.2f}"
        sizes = [_mib(row[key]) for key in ("peak_bytes", "outside_bytes")]
        cells.append([row["engine"], row["sharding"], f"{row['step_ms']:.2f}", exposed, *sizes, row["blocks"]])
    return markdown_table(head, cells)


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"


if __name__ == "__main__":
    PAGE.write_text(page(read()), encoding="utf-8")
