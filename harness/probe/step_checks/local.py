"""Sketches of local gradients, of the weights that modules compute with, and of modules' outputs in one forward.

[Note: Forwards in 16 bits] docs/verdicts.md ("Forwards in 16 bits, and in fp32") says what outputs are asked. They are
matrices of positions by features, and a position has its place in the global batch, whoever computes it: sketches of
all ranks and microbatches add up to those of the batch, the same in every layout. What is recomputed in the backward,
or called again in one forward, counts once. Columns have signs by their width alone, so that modules of one width share
them; of very large batches the first `ROWS` positions are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.fp8.linear import Fp8Linear
from harness.probe.hooks import Aside, ParameterHooks, named_modules, named_parameters
from harness.probe.step_checks.sketch import SKETCHES, Place, Signs, Sketch, added


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
        return added(self._gradients, len(self._places))

    def weights(self) -> tuple[Tensor, Tensor]:
        """Largest and least sketch [tensors, m] of weights in this rank's forwards; -inf and inf for unused ones."""
        largest, least = self._table(-math.inf), self._table(math.inf)
        if self._weights:
            places = np.array([place for place, _ in self._weights])
            seen = Sketch.stack([sketch for _, sketch in self._weights]).values.numpy()
            np.maximum.at(largest.numpy(), places, seen)
            np.minimum.at(least.numpy(), places, seen)
        return largest, least

    def _table(self, value: float) -> Tensor:
        return torch.full((len(self._places), SKETCHES), value, dtype=torch.float64)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.stride(), one.device) != (other.dtype, other.shape, other.stride(), other.device):
        return False
    return one.data_ptr() == other.data_ptr()


ROWS = 1 << 20


class ForwardWatch:
    """Context manager around a step's forwards and backwards.

    Args: module: called once a microbatch. rows: positions of the global batch: sequences times tokens. first: first
    position of this rank. aside: context of its hooks (`Timers.aside`).
    """

    def __init__(self, module: nn.Module, signs: Signs, rows: int, first: int, aside: Aside = nullcontext) -> None:
        self.module, self.signs, self._aside = module, signs, aside
        self.rows, self.next = min(rows, ROWS), first
        self.found: dict[str, Tensor] = {}
        """By module, in order of first calls: m sketches and the sum of squares; fp64 [m + 1], on the CPU."""
        self._begin, self._called = first, set[str]()
        self._handles: list[Any] = []

    def __enter__(self) -> ForwardWatch:
        self._handles.append(self.module.register_forward_pre_hook(self._new))
        for name, module in named_modules(self.module).items():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _new(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Begin a microbatch, whose first input is [sequences, tokens]."""
        self._begin, self._called = self.next, set()
        self.next += inputs[0].numel() if inputs and isinstance(inputs[0], Tensor) else 0

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if name in self._called or not isinstance(output, Tensor) or not output.is_floating_point():
                return
            self._called.add(name)
            with self._aside():
                self._look(name, output.detach())

        return look

    def _look(self, name: str, output: Tensor) -> None:
        matrix = output.reshape(-1, output.shape[-1]) if output.ndim > 1 else output.reshape(-1, 1)
        count = self.next - self._begin
        if matrix.shape[0] != count:  # no row a position: nothing that has a place in the batch
            return
        end = min(self._begin + count, self.rows)
        if end <= self._begin:
            return
        place = Place((self._begin, end), (0, matrix.shape[1]))
        shape = (self.rows, matrix.shape[1])
        seen = self.signs.sketch(f"outputs of width {shape[1]}", shape, matrix[: end - self._begin], place)
        row = torch.cat([seen.values.cpu(), seen.squares.cpu().reshape(1)])
        self.found[name] = self.found.get(name, torch.zeros(SKETCHES + 1, dtype=torch.float64)) + row
