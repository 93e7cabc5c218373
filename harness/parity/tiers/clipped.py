"""Gradients of a run of ours as its optimizer took them: another program is watched there, after any clipping.

Ours are recorded before it, and the factor follows from the logged norm. Local gradients are unclipped in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from harness.parity.record import Record
from harness.parity.tensors import Capture, Computed
from harness.store.check_stream import Stream, step_columns, tensor_columns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def as_stepped(run: Record) -> Record:
    """The run itself where nothing was clipped, or where it was watched."""
    import numpy as np

    clip = run.config.get("optimizer.clip_norm")
    if run.is_watched or clip is None:
        return run
    norms = np.array(run.series("grad_norm"), float)
    with np.errstate(invalid="ignore"):
        factors = np.where(np.isfinite(norms), np.minimum(1.0, float(clip) / (norms + 1e-6)), 1.0)
    if (factors == 1.0).all():
        return run
    return replace(
        run,
        captures={step: _times(capture, float(factors[step - 1])) for step, capture in run.captures.items()},
        columns={**run.columns, "grad_norm": (norms * factors).tolist()},
        stream=run.stream and _Stepped(**_fields(run.stream), factors=factors),
        as_recorded=run,
    )


def _fields(stream: Stream) -> dict[str, Any]:
    return {each.name: getattr(stream, each.name) for each in fields(Stream)}


def _times(capture: Capture, factor: float) -> Capture:
    return Computed(capture, lambda name: capture.values(name) * factor)


@dataclass(frozen=True, eq=False)
class _Stepped(Stream):
    factors: NDArray[np.float64]
    """Clipping factor by step."""

    @cached_property
    def steps(self) -> NDArray[np.float64]:
        import numpy as np

        rows = super().steps
        factors = np.ones(len(rows))  # a finished run has one row more than steps
        factors[: len(self.factors)] = self.factors[: len(rows)]
        return self._scaled(rows, factors, step_columns(self.sketches))

    @cached_property
    def _kept(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        steps, rows = super()._kept
        return steps, self._scaled(rows, self.factors[steps - 1][:, None], tensor_columns(self.sketches))

    def _scaled(
        self, rows: NDArray[np.float64], factors: NDArray[np.float64], columns: Sequence[str]
    ) -> NDArray[np.float64]:
        found = rows.copy()
        for at, name in enumerate(columns):
            if name.startswith("reduced_"):
                found[..., at] *= factors**2 if name.endswith("squares") else factors
        return found
