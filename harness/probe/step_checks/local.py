"""Sketches of local gradients, and of the weights that modules compute with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from harness.fsdp import Fp8Linear
from harness.probe.hooks import Aside, ParameterHooks, named_parameters
from harness.probe.step_checks.sketch import Place, Signs, Sketch


class LocalWatch:
    """Context manager around a step's forwards and backwards.

    Hooks see autograd's gradient of a parameter before the engine does, and a weight as the module looks it up. Args:
    names: parameters in model order. weights: observe forwards' weights too. kept: indices of unsharded weights: if a
    forward uses that very memory, its first sketch is `begun`'s too. aside: context of its hooks (`Timers.aside`).
    """

    def __init__(
        self,
        module: nn.Module,
        names: list[str],
        signs: Signs,
        *,
        weights: bool = True,
        kept: Mapping[int, Tensor] | None = None,
        aside: Aside = nullcontext,
    ) -> None:
        self.module, self._aside = module, aside
        self._kept = dict(kept or {})
        self.begun: dict[int, Sketch] = {}
        """Sketches, without squares, of weights in `kept` at their first use in this step."""
        self._looks_at_weights = weights
        self.signs = signs
        self._places = {name: place for place, name in enumerate(names)}
        self._gradients: list[tuple[int, Sketch]] = []
        self._weights: list[tuple[int, Sketch]] = []
        self._quantized: set[str] = set()
        self.hidden: set[int] = set()
        """Indices of tensors that the forward used in 8 bits."""
        self._hooks = ExitStack()

    def __enter__(self) -> LocalWatch:
        names = {id(param): name for name, param in named_parameters(self.module).items()}
        layers = [each for each in self.module.modules() if isinstance(each, Fp8Linear)]
        # not `layer.weight`, which may be a copy that was cast
        self._quantized = {names[id(layer._parameters["weight"])] for layer in layers}
        self._hooks.enter_context(ParameterHooks(self.module, self._gradient, self._forward, self._aside))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()  # lets go of the hooks too: sketches in a cycle stay between other memory

    def _gradient(self, name: str, gradient: Tensor) -> None:
        self._look(self._gradients, name, gradient)

    def _forward(self, name: str, weight: Tensor) -> None:
        if not self._looks_at_weights:
            return
        if name in self._quantized:  # used in 8 bits, not cast: no sketch of the main weight is its own
            self.hidden.add(self._places[name])
        else:
            found = self._look(self._weights, name, weight, squares=False)
            kept = self._kept.pop(self._places[name], None)
            if kept is not None and _is_same_memory(weight, kept):
                self.begun[self._places[name]] = found

    def _look(self, seen: list[tuple[int, Sketch]], name: str, tensor: Tensor, *, squares: bool = True) -> Sketch:
        found = self.signs.sketch(name, tensor.shape, tensor, Place.whole(tensor.shape), squares=squares)
        seen.append((self._places[name], found))
        return found

    @property
    def saw_gradients(self) -> bool:
        return bool(self._gradients)

    def gradients(self) -> Sketch:
        """Sketches of the sum of this rank's local gradients [tensors, m]; their squared norms, added up [tensors]."""
        found = Sketch(self._table(0.0), self._table(0.0)[:, 0])
        if self._gradients:
            places, seen = _together(self._gradients)
            found.values.index_add_(0, places, seen.values)
            found.squares.index_add_(0, places, seen.squares)
        return found

    def weights(self) -> tuple[Tensor, Tensor]:
        """Largest and least sketch [tensors, m] of weights in this rank's forwards; -inf and inf for unused ones."""
        largest, least = self._table(-math.inf), self._table(math.inf)
        if self._weights:
            places, seen = _together(self._weights)
            np.maximum.at(largest.numpy(), places.numpy(), seen.values.numpy())
            np.minimum.at(least.numpy(), places.numpy(), seen.values.numpy())
        return largest, least

    def _table(self, value: float) -> Tensor:
        return torch.full((len(self._places), self.signs.sketches), value, dtype=torch.float64)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.stride(), one.device) != (other.dtype, other.shape, other.stride(), other.device):
        return False
    return one.data_ptr() == other.data_ptr()


def _together(seen: Sequence[tuple[int, Sketch]]) -> tuple[Tensor, Sketch]:
    return torch.tensor([place for place, _ in seen]), Sketch.stack([sketch for _, sketch in seen])
