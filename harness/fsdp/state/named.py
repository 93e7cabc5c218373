"""All of a model's state by the module's own names.

Keys are `weights/<parameter>` (main weights; of frozen parameters the compute weights) and
`optimizer/<parameter>/<entry>`. Tensors with the parameter's shape are DTensors over the engine's own memory, plain
ones where nothing cuts them. Counters such as `step` are plain tensors of shape [], one a parameter, and belong to the
caller until `adopt` takes them back. `fp8/<layer>.<buffer>` is what delayed scaling knows, whole on every rank and in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
COUNTER_DTYPE = torch.float32
"""Dtype of counters that an optimizer keeps as plain numbers; torch keeps its own as fp32 tensors."""


@dataclass
class ShardedState:
    """tensors: key -> the state itself, or a copy of a counter. counters: keys of copies, which `adopt` takes back."""

    tensors: dict[str, Tensor]
    counters: set[str] = field(default_factory=set)
    taking_back: list[tuple[str, Callable[[Tensor], None]]] = field(default_factory=list)
    """Keys of copies, and what takes each."""

    def adopt(self) -> None:
        """Take the counters back."""
        for key, take in self.taking_back:
            take(self.tensors[key])


class StateMismatch(ValueError, RuntimeError):
    """A state does not fit the model: names are missing or unexpected, or shapes differ. Nothing was loaded. It is a
    RuntimeError, as torch raises, and a ValueError."""


def check_fit(pairs: Sequence[tuple[str, Tensor, Tensor]], missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise StateMismatch where a name is missing or unexpected, or of name, own tensor and given one shapes differ."""
    problems = [
        f"{n} is {list(given.shape)}, the model's {list(o.shape)}" for n, o, given in pairs if given.shape != o.shape
    ]
    problems += [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in unexpected]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StateMismatch(f"state does not fit the model, nothing was loaded: {'; '.join(problems[:8])}{more}")
