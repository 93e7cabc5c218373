"""Write docs/records/gpu.md: what the acceptance found on a GPU, piece by piece, and what is not measured.

    python benchmarks/pages/gpu.py

Results are benchmarks/data/gpu/*.json, of `make gpu`; what the rehearsal on CPU took is in rehearsal.json there:

    python benchmarks/gpu/acceptance.py --device cpu --tiny --out FOLDER
    python benchmarks/pages/gpu.py --rehearsal FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.wheels import bring  # noqa: E402

bring(ROOT)  # before what needs it is imported

from benchmarks.gpu.pieces import PIECES, files  # noqa: E402
from benchmarks.pages.tables import markdown_table  # noqa: E402
from harness.store.provenance import cpu_model  # noqa: E402

DATA = ROOT / "benchmarks" / "data" / "gpu"
REHEARSAL = DATA / "rehearsal.json"
VERSIONS = DATA / "versions.json"
PAGE = ROOT / "docs" / "records" / "gpu.md"
COMMAND = "benchmarks/gpu/acceptance.py --device cpu --tiny --out FOLDER"
NOT_MEASURED = "not measured"
TIMED = ("times_125m", "times_1b")
HEAD = f"""# What a GPU has shown

*Record. What `make gpu` finds out on one NVIDIA GPU, piece by piece, and what of it has not been measured. Made by
`python benchmarks/pages/gpu.py` from [benchmarks/data/gpu](../../benchmarks/data/gpu).*

`make gpu` runs [benchmarks/gpu/acceptance.py](../../benchmarks/gpu/acceptance.py): each piece ends within ten minutes,
writes its result with versions, device and commands, and is skipped once that exists for the same sources. Packages
that an image without a network lacks are brought along by `make gpu-wheels`. Where minutes are counted,
`make gpu GPU_ARGS='--within 580'` ends in time, and the next call goes on. A row that says *{NOT_MEASURED}* has no
result: nobody has run that piece on a GPU. Ranks that share a device show that collectives, groups and orders are
right; their times say nothing of ranks with a device each, and none is given.
"""

Facts = dict[str, Any]


def read() -> dict[str, Facts]:
    """Results by piece; pieces without one are not there."""
    return {name: json.loads(path.read_text("utf-8")) for name, path in files(DATA).items() if path.exists()}


def page(results: dict[str, Facts], rehearsal: Facts | None, compared: Facts | None = None) -> str:
    """The whole page. compared: the engine before and after parameters at rest became DTensors."""
    pieces = [(f"`{piece.name}`", piece.asks, *outcome(results.get(piece.name))) for piece in PIECES]
    parts = [HEAD, markdown_table(["piece", "what it asks", "what it found", "on", "seconds"], pieces)]
    parts += [f"\n## {name}\n\n{rows(results.get(name))}" for name in TIMED]
    parts.append(f"\n## Before and after parameters at rest became DTensors\n\n{versions(compared)}")
    parts.append(f"\n## The rehearsal on CPU\n\n{rehearsed(rehearsal)}")
    return "\n".join(parts) + "\n"


def made() -> str:
    others = [json.loads(path.read_text("utf-8")) if path.exists() else None for path in (REHEARSAL, VERSIONS)]
    return page(read(), *others)


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
    words += [product(row) for row in found.get("products", ()) if row["built"]]
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


def versions(facts: Facts | None) -> str:
    command = "benchmarks/gpu/versions.py of revision 9d4883e1, beside f5f18313"
    if facts is None:
        return f"{NOT_MEASURED}: {command}."
    machine, (dim, layers, _, batch, length) = facts["machine"], facts["sizes"]
    told = (
        f"{command}, on {machine['devices'][0]}, torch {facts['versions']['torch']}, NCCL {machine['nccl']}, driver"
        f" {machine['driver']}: one rank, {layers} layers of width {dim}, {batch} sequences of {length} in bf16;"
        f" {facts['turns']} turns of {facts['steps']} steps, of which *host* is the time that the loop takes to issue"
        " one: here that is all of it. DDP and FSDP2 are the same on both sides, and their ratios what two processes"
        " of one program vary by."
    )
    table = []
    for arm, row in facts["rows"].items():
        ratios = [f"{row[key]['value']:.2f} ({row[key]['low']:.2f} to {row[key]['high']:.2f})" for key in RATIOS]
        here, base = ([row[side][key] for key in COUNTS] for side in ("here", "base"))
        counts = [f"{a}" if a == b else f"{a}, before {b}" for a, b in zip(here, base, strict=True)]
        table.append([arm, f"{row['here_ms']:.1f}", f"{row['host_ms']:.1f}", *ratios, *counts])
    head = ["arm", "step, ms", "host, ms", "/ before", "/ FSDP2", "kernels", "copies", "waits", "peak, MiB"]
    return f"{told}\n\n{markdown_table(head, table)}"


RATIOS, COUNTS = ("ratio", "to_fsdp2"), ("kernels", "copies", "waits", "peak_mib")


def rehearsed(facts: Facts | None) -> str:
    """Seconds that each piece took on CPU with tiny sizes."""
    if facts is None:
        return f"{NOT_MEASURED}: `python {COMMAND}`."
    told = (
        f"`{facts['command']}` on {facts['processor']}, torch {facts['torch']}: the same pieces without a device, which"
        " proves the script and nothing about a GPU."
    )
    each = {piece.name: facts["pieces"][piece.name] for piece in PIECES}
    cells = [(f"`{name}`", f"{row['wall_s']:.0f}", row["commands"], row["wrong"]) for name, row in each.items()]
    return f"{told}\n\n{markdown_table(['piece', 'seconds', 'commands', 'wrong'], cells)}"


def rehearsal_of(folder: Path, command: str, processor: str) -> Facts:
    told = {name: json.loads(path.read_text("utf-8")) for name, path in files(folder).items()}
    pieces = {
        name: {"wall_s": each["wall_s"], "commands": len(each["commands"]), "wrong": len(each["wrong"])}
        for name, each in told.items()
    }
    torch = told["imports"]["machine"]["versions"]["torch"]
    return {"command": command, "processor": processor, "torch": torch, "pieces": pieces}


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearsal", type=Path, help="results of a rehearsal on CPU")
    folder = parser.parse_args().rehearsal
    if folder is not None:
        kept = rehearsal_of(folder, f"python {COMMAND}", cpu_model())
        REHEARSAL.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(made(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
