"""Sketches of the outputs of every module in one step's forward: the first difference of two runs of one dtype.

[Note: Forwards in 16 bits] Two runs of one model in bf16 agree in step 1 to every bit, or to a few flipped roundings,
where their kernels are the same; what rounding explains of a forward in bf16 (`Envelope.forward`, half a per cent) is a
hundred times more than a softcap or a wrong rotation changes. So the forward is looked at module by module: the first
output that differs while all that went before agrees was made by other code.

Activations are matrices of positions by features, and a position has its place in the global batch, whoever computes
it: sketches of all ranks and microbatches add up to those of the batch, the same in every layout. What is recomputed in
the backward, or called again in one forward, counts once. Columns have signs by their width alone, so that modules of
one width share them; of very large batches the first `ROWS` positions are looked at.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from harness.probe.hooks import Aside, named_modules
from harness.probe.step_checks.sketch import SKETCHES, Place, Signs

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
