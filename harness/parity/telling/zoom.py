"""Close-up of one tensor of two captures: distance, worst pieces, factor, values."""

from __future__ import annotations

import math
from pathlib import Path

from harness.config.errors import refuse
from harness.parity.outcome import REFUTED, Grade, grade, percent
from harness.parity.record import Record, load
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import BLOCKS, Block, compare_tensor
from harness.store import checksums, commands
from harness.store.screen import table

PIECES = 6
VALUES = 3
MARKS = {Grade.ok: "", Grade.doubt: "?", Grade.bad: "BAD"}


def zoom(arm: Path, control: Path, tensor: str, *, step: int = 1) -> str:
    """Text about one tensor of two runs, with its worst pieces and their first values.

    Args: step: captured by both. Pieces of steps after the first, whose bounds grow, are marked as in doubt at most.

    Raises `BadRequest`: the capture or tensor is missing. `StoreError`: no run, or damaged.
    """
    for path in (arm, control):
        checksums.demand(Path(path))
    left, right = load(Path(arm)), load(Path(control))
    for run in (left, right):
        _require(run, tensor, step)
    pair = compare_tensor(tensor, left.captures[step], right.captures[step])
    envelope = Envelope.of(left, right)
    whole = envelope.tensor(tensor, pair.numel)
    allowed = envelope.scale(pair.standard_error, pair.residual, tensor)
    lines = [
        f"{tensor} at step {step}, {pair.numel} elements, norm {pair.norm:.6g} in the control",
        f"distance  {percent(pair.distance)} of the norm; rounding explains {percent(whole)} at step 1",
        f"factor    {1 + pair.b:.6g}, give or take {allowed:.1e}; what no factor explains: {percent(pair.residual)}",
        "",
    ]
    return "\n".join([*lines, *_pieces(left, right, tensor, step, envelope, whole)])


def _require(run: Record, tensor: str, step: int) -> None:
    if step not in run.captures:
        held = ", ".join(map(str, sorted(run.captures))) or "none"
        wanted = ",".join(map(str, sorted({step, *run.config["measure.capture_steps"]})))
        fix = commands.request(f'--from {commands.shown(run.path)} "measure.capture_steps=[{wanted}]"')
        raise refuse(f"--step {step}", f"{run.name} did not capture it", choices=held, fix=fix)
    if tensor not in run.captures[step].tensors:
        choices = ", ".join(sorted(run.captures[step].tensors))
        raise refuse(f"--tensor {tensor}", f"{run.name} has no such tensor at step {step}", choices=choices)


def _pieces(left: Record, right: Record, tensor: str, step: int, envelope: Envelope, whole: float) -> list[str]:
    import numpy as np

    a, c = (run.captures[step].values(tensor).ravel() for run in (left, right))
    edges = np.unique(np.linspace(0, c.size, min(BLOCKS, c.size) + 1).astype(np.int64))
    average = float(np.sqrt(np.mean(c * c)))
    pieces = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        own = float(np.sqrt((np.mean(c[start:stop] ** 2) + average**2) / 2)) or 1.0
        off = float(np.sqrt(np.mean((a[start:stop] - c[start:stop]) ** 2)))
        pieces.append(Block(start, stop, off / own))
    pieces.sort(key=lambda piece: -piece.distance)
    rows = []
    for piece in pieces[:PIECES]:
        allowed = envelope.piece(whole, piece.stop - piece.start)
        refuted = math.inf if step > 1 or envelope.flips else REFUTED * allowed
        rows.append(
            (
                f"{piece.start}:{piece.stop}",
                percent(piece.distance),
                " ".join(f"{value:+.5e}" for value in a[piece.start : piece.start + VALUES]),
                " ".join(f"{value:+.5e}" for value in c[piece.start : piece.start + VALUES]),
                MARKS[grade(piece.distance, allowed, refuted)],
            )
        )
    return table(("elements", "off by", "arm", "control", ""), rows)
