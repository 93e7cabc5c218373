"""Observations of autograd and the forward in a captured step, taken down outside the engine.

[Note: Witnesses] Two things can be seen beside an engine: the gradient that autograd hands to a trained parameter,
before the engine touches it, and the weights that a module computes with. docs/verdicts.md ("Witnesses") says what is
asked of them. Hooks are there during captured steps only. Nothing is copied that need not be, a sum has memory of its
own (a step has freed pieces of that size; a large new one costs more than the adding does), and sums go to the first
rank only.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fp8.linear import Fp8Linear
from harness.probe.hooks import Aside, ParameterHooks, named_parameters

UNSEEN = -1
SEVERAL = -2


@dataclass
class _Sum:
    """Local gradients of one parameter: their sum in fp64 and the sum of their squares."""

    total: Tensor | None = None
    squares: float = 0.0

    def add(self, gradient: Tensor) -> None:
        wide = gradient.detach().to("cpu", torch.float64, copy=True, memory_format=torch.contiguous_format)
        self.squares += float(torch.linalg.vector_norm(wide)) ** 2
        self.total = wide if self.total is None else self.total.add_(wide)


def _restore(layer: Fp8Linear, own: Any) -> None:
    del layer.__dict__["weight_for"]
    if own is not None:
        layer.__dict__["weight_for"] = own


class Seen(NamedTuple):
    """Where an engine can be observed from outside."""

    module: nn.Module
    """The module whose parameters receive autograd's local gradients, and whose submodules use its weights."""
    divisor: int
    """The sum of these gradients over all microbatches and ranks, divided by this, is the gradient of the step."""
    compute: torch.dtype
    """Dtype of the weights in the forward."""
    shapes: Mapping[str, torch.Size] | None = None
    """Full shapes by parameter, where the module's parameters are shards between passes."""
    rounded: torch.dtype | None = None
    """Dtype of weights before they are quantized to 8 bits; None: that of the main weights."""


@dataclass
class Witness:
    """Watches one step. A context manager around its forwards and backwards; the rest is asked afterwards.

    Args: aside: surrounds what its hooks do (`Timers.aside`).
    """

    seen: Seen
    aside: Aside = nullcontext
    checksums: dict[str, set[int]] = field(default_factory=dict)
    """Checksums of every value that a forward or backward used, by parameter."""
    _sums: dict[str, _Sum] = field(default_factory=dict)
    _quantized: dict[str, Fp8Linear] = field(default_factory=dict)
    """Layers whose weights are not cast to the compute dtype, but quantized from the main weights', by the weight."""
    _in_8_bits: set[str] = field(default_factory=set)
    """Weights that products took in 8 bits; between passes an engine may show wider ones."""
    _ending: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Witness:
        params = named_parameters(self.seen.module)
        for name, param in params.items():
            self.checksums[name] = set()
            if param.requires_grad:
                self._sums[name] = _Sum()
        names = {id(param): name for name, param in params.items()}
        layers = [each for each in self.seen.module.modules() if isinstance(each, Fp8Linear)]
        self._quantized = {names[id(layer.weight)]: layer for layer in layers if layer.is_held}
        for name, layer in self._quantized.items():
            self._ending.callback(_restore, layer, layer.__dict__.get("weight_for"))
            layer.__dict__["weight_for"] = partial(self._multiplied, name, layer, layer.weight_for)
        self._ending.enter_context(ParameterHooks(self.seen.module, self._gradient, self._forward, self.aside))
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def _gradient(self, name: str, gradient: Tensor) -> None:
        self._sums[name].add(gradient)

    def _forward(self, name: str, weight: Tensor) -> None:
        if weight.dtype.itemsize > 1:  # of 8-bit ones `_multiplied` sees the scales too
            self.checksums[name].add(checksum(weight))

    def _multiplied(self, name: str, layer: Fp8Linear, weight_for: Any, *, transposed: bool) -> Any:
        """The operand of a product, in the forward and, transposed, in the backward: of a weight in 8 bits one and the
        same."""
        found = weight_for(transposed=transposed)
        if layer.weight.dtype.itemsize == 1:
            self._in_8_bits.add(name)
            held = found.t if transposed else found
            with self.aside():
                self.checksums[name].add(checksum(held.payload, held.scale_inv))
        return found

    @property
    def saw_gradients(self) -> bool:
        """True if autograd handed this rank any gradient where it was expected."""
        return any(each.total is not None for each in self._sums.values())

    def gradients(self, group: dist.ProcessGroup | None) -> list[tuple[str, Tensor, float]]:
        """Expected result of the reduction, on the first rank: name, fp64 tensor, and the root of the summed squared
        norms of all terms, both over the divisor. *Collective* over `group`; None with one rank. Elsewhere nothing.

        Call it once: the sums are used up.
        """
        shapes = self.seen.shapes or {name: param.shape for name, param in named_parameters(self.seen.module).items()}
        totals = {
            name: torch.zeros(shapes[name], dtype=torch.float64) if held.total is None else held.total
            for name, held in self._sums.items()
        }
        squares = torch.tensor([held.squares for held in self._sums.values()], dtype=torch.float64)
        self._sums.clear()
        if group is not None:
            for work in [dist.reduce(each, 0, group=group, async_op=True) for each in (*totals.values(), squares)]:
                work.wait()
            if dist.get_rank(group) != 0:
                return []
        divisor = self.seen.divisor
        terms = (squares.sqrt() / divisor).tolist()
        return [(name, total.div_(divisor), term) for (name, total), term in zip(totals.items(), terms, strict=True)]

    def kept(self, weights: Iterable[tuple[str, Tensor]]) -> list[int]:
        """A checksum of what each entry of `checksums` should be: of the main weights as a forward should see them,
        cast, or quantized whole, with the reciprocals of the scales."""
        found = {name: checksum(*self._as_seen(name, weight)) for name, weight in weights}
        return [found[name] for name in self.checksums]

    def _as_seen(self, name: str, weight: Tensor) -> tuple[Tensor, ...]:
        layer = self._quantized.get(name)
        if layer is None:
            return (weight.to(self.seen.compute),)
        if self.seen.rounded is not None:
            weight = weight.to(self.seen.rounded)
        if name not in self._in_8_bits:
            return (weight,)
        found = layer.recipe.quantize(layer.recipe.weights, weight)
        return found.payload, found.scale_inv

    def used(self) -> list[int]:
        """A checksum an entry of `checksums`: of the one value that this rank used; `UNSEEN`, or `SEVERAL`."""
        return [
            UNSEEN if not found else next(iter(found)) if len(found) == 1 else SEVERAL
            for found in self.checksums.values()
        ]


def checksum(*tensors: Tensor) -> int:
    """CRC-32 of tensors' bytes, read where they lie if that is contiguous memory of the CPU.

    Not through numpy: storage that numpy has seen cannot be resized any more, and engines resize theirs.
    """
    found = 0
    for tensor in tensors:
        held = tensor.detach().to("cpu").contiguous()
        found = zlib.crc32((ctypes.c_ubyte * held.nbytes).from_address(held.data_ptr()), found)
    return found


def wrong_weights(names: list[str], rows: list[list[int]]) -> list[dict[str, int | str]]:
    """Rank, tensor and what is wrong, of parameters that a rank's forward did not see as the first rank keeps them.

    Args:
        names: parameters in model order.
        rows: by rank: for each parameter the checksum of the main weights as that rank gives them, cast to the compute
            dtype, then for each the checksum of what its forwards used (`Witness.used`).
    """
    kept = rows[0][: len(names)]
    found: list[dict[str, int | str]] = []
    for rank, row in enumerate(rows):
        for name, right, main, used in zip(names, kept, row, row[len(names) :], strict=False):
            wrong = ["keeps other main weights than rank 0"] if main != right else []
            if used == SEVERAL:
                wrong.append("computed with several values in one step")
            elif used not in (UNSEEN, right):
                wrong.append("computed with other weights than the main ones")
            found += [{"rank": rank, "tensor": name, "what": what} for what in wrong]
    return found
