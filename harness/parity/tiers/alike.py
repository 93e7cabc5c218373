"""One step of two runs that are equal so far: what goes into the update is equal, so must be what comes out.

[Note: Equal until] Both runs begin with the same weights (T0). As long as every sketch of every gradient and every
logged norm has the same bits in both, an optimizer of one configuration does the same operations on the same numbers,
and weights stay equal, in any dtype and without a bound. The first step whose weights differ nevertheless was another
update in one of the two: no sample of elements is asked, so one element of a tensor is enough. After a step whose
gradients differ, or that was not kept, nothing is said.

Four signed sums and a sum of squares hide a difference of gradients with a negligible chance; differences of rounding
are many. A kernel that does a whole group's update may do its last elements otherwise, so tensors must be cut alike:
one configuration of this harness, and the same sources. On other devices than CPUs memory may choose a kernel, and a
difference is in doubt.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.config.update_rule import KNOWN
from harness.parity.outcome import Finding, Stage, measured
from harness.parity.record import Record
from harness.parity.tiers import watched
from harness.parity.tiers.admissible import matters
from harness.store.check_stream import Stream, tensor_columns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALIKE = "weights after equal gradients"
NOTE = "until then gradients, norms and weights were equal in every sketch; the update was not, or the moments it used"


def check(arm: Record, control: Record) -> list[Finding]:
    if arm.stream is None or control.stream is None or not _one_configuration(arm, control):
        return []
    left, right = (_table(run.stream, run.length) for run in (arm, control) if run.stream)
    if left.shape[1:] != right.shape[1:] or arm.stream.tensors != control.stream.tensors:
        return []
    steps = _steps_of_equal_gradients(arm, control, left, right)
    return [_finding(arm, control, left[:steps], right[:steps])] if steps else []


def _one_configuration(arm: Record, control: Record) -> bool:
    keys = [key for key in arm.config.keys() | control.config.keys() if matters(key) and not key.startswith("fault.")]
    same_code = arm.provenance.get("sources_digest") == control.provenance.get("sources_digest")
    same = all(arm.config.get(key) == control.config.get(key) for key in keys) and not watched.is_one(arm, control)
    return same and same_code and arm.config["optimizer.name"] in KNOWN


def _table(stream: Stream, length: int) -> NDArray[np.float64]:
    """Columns [steps, tensors, columns] of the steps from the first on, up to one that was not kept."""
    import numpy as np

    steps, rows = stream.kept()
    follows = steps == np.arange(1, len(steps) + 1)
    return rows[: min(length, len(steps) if follows.all() else int(np.argmin(follows)))]


def _columns(sketches: int, kind: str) -> list[int]:
    return [at for at, name in enumerate(tensor_columns(sketches)) if name.startswith(f"{kind}_")]


def _steps_of_equal_gradients(
    arm: Record, control: Record, left: NDArray[np.float64], right: NDArray[np.float64]
) -> int:
    import numpy as np

    assert arm.stream is not None
    gradients = _columns(arm.stream.sketches, "reduced")
    steps = min(len(left), len(right))
    equal = (left[:steps, :, gradients] == right[:steps, :, gradients]).all((1, 2))  # what was not seen is not equal
    for key in ("loss", "grad_norm", "lr", "skipped"):
        equal &= [one == other for one, other in zip(*(run.series(key)[:steps] for run in (arm, control)), strict=True)]
    return steps if equal.all() else int(np.argmin(equal))


def _finding(arm: Record, control: Record, left: NDArray[np.float64], right: NDArray[np.float64]) -> Finding:
    import numpy as np

    assert arm.stream is not None
    weights = _columns(arm.stream.sketches, "after")
    differs = ~(left[:, :, weights] == right[:, :, weights]).all(2)
    if not differs.any():
        return replace(measured(ALIKE, Stage.optimizer, 0.0, 0.0, step=len(left)), count=len(left))
    step = int(differs.any(1).argmax())
    *sketches, squares = weights
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.abs(left - right)[step][:, sketches].max(1) / np.sqrt(right[step][:, squares])
    tensor = int(np.where(differs[step], np.nan_to_num(off, nan=np.inf), -1.0).argmax())
    on_cpu = arm.config.get("cluster.device") == "cpu"
    return measured(
        ALIKE,
        Stage.optimizer,
        float(off[tensor]),
        0.0,
        0.0 if on_cpu else math.inf,
        step=step + 1,
        tensor=arm.stream.tensors[tensor].name,
        note=NOTE,
        since=Stage.clipping,
    )
