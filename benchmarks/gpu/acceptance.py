"""What only a GPU can show, in pieces of under ten minutes, most valuable first: `make gpu`.

    python benchmarks/gpu/acceptance.py                        every piece that has no result for these sources
    python benchmarks/gpu/acceptance.py --pieces one_rank,odd  these alone
    python benchmarks/gpu/acceptance.py --device cpu --tiny    a rehearsal: same pieces, no device, minutes
    python benchmarks/gpu/acceptance.py --within 580           end by then, and say what is left
    LD_PRELOAD=/path/libnccl.so.2 python benchmarks/gpu/acceptance.py    with an NCCL that lets ranks share the device

Nothing is fetched: torch 2.11 or newer and this project's dependencies are what the image has, and what lies in
wheels_gpu/ (`make gpu-wheels` fills it, where there is a network); the first piece names what is missing, and where it
is wrong the others are left. Each piece writes benchmarks/data/gpu/NAME.json with versions, device and commands. A
piece whose file is of these sources, versions and device, and found nothing wrong, is skipped. One that its limit cuts
off keeps its runs, and the next call goes on there. Afterwards `python benchmarks/pages/gpu.py` writes
docs/records/gpu.md.

Exit code: 0 all pieces are right, 1 something is wrong or left out, 75 a piece was cut off: call again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.wheels import bring  # noqa: E402

bring(ROOT)  # before what needs it is imported

try:
    from benchmarks.gpu.lab import Facts, Lab, OutOfTime, Setting, last_object
    from benchmarks.gpu.pieces import PIECES, Piece, files
    from harness.store.provenance import git_facts, sources_digest
except ModuleNotFoundError as error:
    raise SystemExit(
        f"acceptance: {error}. What this Python lacks can be brought along: `make gpu-wheels`, where there is a"
        " network, puts it into wheels_gpu/ beside the sources"
    ) from error

OUT = ROOT / "benchmarks" / "data" / "gpu"
LIMIT_S = 560.0
RANKS = {"cuda": 4, "cpu": 2}
CUT_OFF = 75


def main(argv: Sequence[str]) -> int:
    """Run what has no result yet; returns the exit code."""
    chosen = _arguments(argv)
    known = [piece.name for piece in PIECES]
    wanted = chosen.pieces.split(",") if chosen.pieces else known
    if unknown := [name for name in wanted if name not in known]:
        print(f"--pieces={','.join(unknown)}: no such piece; valid: {', '.join(known)}", file=sys.stderr)
        return 2
    until = math.inf if chosen.within is None else time.monotonic() + chosen.within
    setting = Setting(chosen.device, chosen.tiny, RANKS[chosen.device], chosen.limit, chosen.store.absolute(), until)
    try:
        machine = look(setting)
    except OutOfTime:
        print("acceptance: no time to look at this machine, and none for a piece", file=sys.stderr)
        return CUT_OFF
    codes = []
    for piece in PIECES:
        if piece.name in wanted:
            codes.append(carry_out(piece, setting, machine, files(chosen.out)[piece.name]))
            if codes[-1] and piece is PIECES[0]:
                print("the other pieces need what is missing here, and were left", flush=True)
                break
    return next((code for code in (CUT_OFF, 1) if code in codes), 0)


def look(setting: Setting) -> Facts:
    """Sources, versions and device: what a result is of."""
    done = Lab("look", setting).call("benchmarks/gpu/look.py")
    told = last_object(done.stdout)
    if not told:
        raise SystemExit(f"acceptance: this machine cannot be looked at:\n{done.stderr[-1500:]}")
    names = ("python", "versions", "devices", "cuda", "driver", "nccl", "nccl_built", "ranks_share")
    return {
        "sources_digest": sources_digest(),
        "pieces_digest": own_digest(),
        "device": setting.device,
        "tiny": setting.tiny,
        "ranks": setting.ranks,
        **{name: told.get(name) for name in names},
        "preload": os.path.basename(os.environ.get("LD_PRELOAD", "")) or None,
    }


def own_digest() -> str:
    """Hash of what asks: a piece that asks something else has no result yet."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def carry_out(piece: Piece, setting: Setting, machine: Facts, path: Path) -> int:
    """Run one piece and write what it found; 0 right, 1 wrong, 75 cut off."""
    if is_current(path, machine):
        print(f"{piece.name}: done for these sources, versions and device ({path})", flush=True)
        return 0
    if piece.shares and setting.on_cuda and not machine["ranks_share"]:
        print(
            f"{piece.name}: left out: NCCL {machine['nccl']} lets no ranks share a device, which 2.30 does: put its"
            " libnccl.so.2 before torch's (LD_PRELOAD)",
            flush=True,
        )
        return 1
    print(f"{piece.name}: {piece.asks}", flush=True)
    lab, began = Lab(piece.name, setting), time.monotonic()
    try:
        found, is_cut_off = piece.body(lab), False
    except OutOfTime:
        found, is_cut_off = lab.so_far(), True
        seconds = time.monotonic() - began
        print(f"{piece.name}: cut off after {seconds:.0f} s; what it has run is kept: call again", flush=True)
        if not found:
            return CUT_OFF
        last = lab.commands[-1] if lab.commands else ""
        lab.failed.append({"command": last, "words": f"cut off after {seconds:.0f} s: this is what was there"})
    facts = {
        "piece": piece.name,
        "asks": piece.asks,
        "machine": machine,
        "commit": git_facts(ROOT),
        "wall_s": round(time.monotonic() - began, 1),
        "commands": [command.replace(str(setting.store), "STORE") for command in lab.commands],
        "wrong": lab.failed,
        "found": found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for each in lab.failed:
        print(f"{piece.name}: WRONG: {each['words']}\n    {each['command']}", flush=True)
    print(f"{piece.name}: {'wrong' if lab.failed else 'right'}, {facts['wall_s']} s ({path})", flush=True)
    return CUT_OFF if is_cut_off else 1 if lab.failed else 0


def is_current(path: Path, machine: Facts) -> bool:
    """Whether a piece was found right on this very machine with these sources."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(told["machine"] == machine and not told["wrong"])


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few steps of a small model")
    parser.add_argument("--pieces", default="", help="comma-separated (default: all)")
    parser.add_argument("--out", type=Path, default=OUT, help="where results are written")
    parser.add_argument("--store", type=Path, default=ROOT / "runs_gpu", help="where runs are stored")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="longest time of a piece, in seconds")
    parser.add_argument("--within", type=float, help="longest time of the whole call, in seconds (default: none)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.SubprocessError as error:
        sys.exit(f"acceptance: {error}")
