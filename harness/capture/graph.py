"""Roundings in series through a model, counted on the graph that autograd keeps of one forward.

[Note: Counted graph] Bounds of a verdict need the number of operations through which a signal passes in turn. The
graph of a forward has them: the longest chain of its nodes, without those that only move numbers. A node of torch may
round more than once (a softmax, a norm), so each counts as `ROUNDINGS`. A compiled region, or a checkpoint that is
re-entrant, hides its operations in one node; without any product in the graph the matrices of the model are counted,
`BY_MATRIX` roundings each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

ROUNDINGS = 2
BY_MATRIX = 6
MOVING = (
    "Alias", "AsStrided", "Clone", "Detach", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze",
    "T", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View", "Cat", "Stack", "AccumulateGrad", "Embedding",
)  # fmt: skip
"""Beginnings of names of nodes that round nothing."""
PRODUCTS = ("Mm", "Bmm", "Addmm", "Baddbmm", "Convolution", "Linear", "ScaledDotProduct", "Mv", "Dot")


class Depth(NamedTuple):
    roundings: int
    products: int
    inner: int
    """Terms of an inner sum, at most."""


class Counted(NamedTuple):
    roundings: int = 0
    products: int = 0


def of_model(model: Iterable[nn.Module], counted: Counted, tokens: int) -> Depth:
    """Depth by a graph, or by the matrices of a model where the graph shows less. Args: tokens: of a microbatch."""
    matrices = [param.shape for each in model for param in each.parameters() if param.ndim > 1]
    inner = max([tokens, *(max(shape[0], shape[1:].numel()) for shape in matrices)])
    least = Counted(BY_MATRIX * len(matrices), len(matrices)) if counted.products < 1 else Counted(1, 1)
    return Depth(max(counted.roundings, least.roundings), max(counted.products, least.products), inner)


def count(output: Any) -> Counted:
    """Longest chains behind the tensors of a module's output."""
    longest: dict[Any, Counted] = {}
    roots = [found.grad_fn for found in _tensors(output) if found.grad_fn is not None]
    waiting = list(roots)
    while waiting:
        node = waiting[-1]
        behind = [found for found, _ in node.next_functions if found is not None]
        missing = [found for found in behind if found not in longest]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if node not in longest:
            own, below = _own(node.name()), [longest[found] for found in behind]
            roundings = max((each.roundings for each in below), default=0)
            products = max((each.products for each in below), default=0)
            longest[node] = Counted(roundings + own.roundings, products + own.products)
    found = [longest[root] for root in roots]
    return Counted(max((f.roundings for f in found), default=0), max((f.products for f in found), default=0))


def _own(name: str) -> Counted:
    kind = name.rpartition("::")[2].partition("Backward")[0]
    if kind.startswith(PRODUCTS):
        return Counted(ROUNDINGS, 2 if kind.startswith("Scaled") else 1)
    return Counted() if kind in MOVING else Counted(ROUNDINGS)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _tensors(each)
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _tensors(each)
