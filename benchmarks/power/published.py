"""The rules by which others decide that two runs are the same, from their stated thresholds, so that what they would
have said of a pair can stand beside our verdict.

Each reads what its project reads: the losses of two runs, step by step. Sources: NVIDIA-NeMo/Megatron-Bridge
(`evaluate.py` of its convergence tests), NVIDIA/Megatron-LM (golden values of functional tests), pytorch/torchtitan
(`loss_compare --assert-equal`, graph trainer), microsoft/DeepSpeed (ZeRO unit tests). They are written down from the
thresholds these projects state, not copied.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Series = Sequence[float]


@dataclass(frozen=True)
class PublishedRule:
    """A project's rule. `passes` is given the arm's and the control's losses, one a step, of equal length."""

    name: str
    says: str
    passes: Callable[[Series, Series], bool]


def judge(arm: Series, control: Series) -> dict[str, bool]:
    """Whether each rule passes the pair, by its name.

    Raises:
        ValueError: the series have different lengths, or none.
    """
    if len(arm) != len(control) or not arm:
        raise ValueError(f"{len(arm)} losses cannot be held against {len(control)}")
    return {rule.name: rule.passes(arm, control) for rule in RULES}


def _finite(arm: Series, control: Series) -> bool:
    return all(math.isfinite(value) for value in (*arm, *control))


def _bridge(arm: Series, control: Series) -> bool:
    """r >= 0.95; at most 10 % of steps beyond their tolerance; the last step within 3 %; residuals within 3 sigma."""
    if not _finite(arm, control):
        return False
    beyond = sum(abs(a - c) > _bridge_tolerance(c) * abs(c) for a, c in zip(arm, control, strict=True))
    return (
        _correlation(arm, control) >= 0.95
        and beyond <= 0.1 * len(arm)
        and abs(arm[-1] - control[-1]) <= 0.03 * abs(control[-1])
        and _outliers(arm, control) <= 0.1 * len(arm)
    )


def _bridge_tolerance(loss: float) -> float:
    """10 % above a loss of 2, 5 % above 0.5, else 2 %."""
    return 0.10 if loss > 2.0 else 0.05 if loss > 0.5 else 0.02


def _outliers(arm: Series, control: Series) -> int:
    """Steps whose residual lies beyond three standard deviations of the pair's own residuals."""
    residuals = [a - c for a, c in zip(arm, control, strict=True)]
    mean = math.fsum(residuals) / len(residuals)
    sd = math.sqrt(math.fsum((r - mean) ** 2 for r in residuals) / len(residuals))
    return sum(abs(r - mean) > 3 * sd for r in residuals)


def _correlation(arm: Series, control: Series) -> float:
    """Pearson's r; 1 of two flat series, 0 where only one is flat."""
    left, right = ([v - math.fsum(s) / len(s) for v in s] for s in (arm, control))
    squares = math.fsum(v * v for v in left), math.fsum(v * v for v in right)
    if not all(squares):
        return 1.0 if squares[0] == squares[1] else 0.0
    return math.fsum(a * c for a, c in zip(left, right, strict=True)) / math.sqrt(squares[0] * squares[1])


def _golden_approximate(arm: Series, control: Series) -> bool:
    """rtol 0.05, with 1 % of the steps, at least 1 and at most 50, allowed to fail."""
    failed = sum(not _close(a, c, 0.05, 0.0) for a, c in zip(arm, control, strict=True))
    return failed <= min(50, max(1, len(arm) // 100))


def _equal_as_floats(arm: Series, control: Series) -> bool:
    """Equal as fp32 numbers at every step."""
    return all(_float32(a) == _float32(c) for a, c in zip(arm, control, strict=True))


def _float32(value: float) -> bytes:
    return struct.pack("<f", value)


def _close(a: float, c: float, rtol: float, atol: float) -> bool:
    return abs(a - c) <= atol + rtol * abs(c)


def _all_close(rtol: float, atol: float) -> Callable[[Series, Series], bool]:
    return lambda arm, control: all(_close(a, c, rtol, atol) for a, c in zip(arm, control, strict=True))


RULES = (
    PublishedRule("Megatron-Bridge", "r >= 0.95, 10/5/2 % a step, 3 % at the end, 10 % outliers", _bridge),
    PublishedRule("Megatron-LM, approximate", "5 % a step, 1 % of steps may fail", _golden_approximate),
    PublishedRule("Megatron-LM, deterministic; torchtitan, equal", "every loss equal in fp32", _equal_as_floats),
    PublishedRule("torchtitan, close", "rtol 1e-4, atol 1e-5", _all_close(1e-4, 1e-5)),
    PublishedRule("DeepSpeed", "rtol 1e-4, atol 1e-5", _all_close(1e-4, 1e-5)),
    PublishedRule("DeepSpeed, bf16", "rtol 1.6e-2, atol 1e-5", _all_close(1.6e-2, 1e-5)),
)
