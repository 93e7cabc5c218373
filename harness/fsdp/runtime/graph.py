"""What can be asked of autograd's graph, and the one node that the engine puts into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten

ABOVE_ALL = 2**64 - 1
"""Above the number of every node; see [Note: Sequence numbers]."""


class PassedInputs(torch.autograd.Function):
    """Identity on a unit's inputs whose backward says that the unit's backward has passed them."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[Any], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.notify = notify
        ctx.set_materialize_grads(False)  # an input without a gradient must not get a zero one
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.notify(ctx)
        return (None, *gradients)


def number_of(output: Tensor) -> int:
    """Autograd's number of the node that made a tensor; for a leaf, which says nothing, one above all of them."""
    return ABOVE_ALL if output.grad_fn is None else output.grad_fn._sequence_nr()


def could_reach(params: Set[int]) -> bool:
    """Whether the graph below the node that runs holds one of these parameters: a backward that brings none of them a
    gradient was then asked for other inputs alone (`torch.autograd.grad`)."""
    todo: list[Node | None] = [torch._C._current_autograd_node()]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in params:
            return True
        todo += [each for each, _ in node.next_functions]
    return False


def direct_tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Tensors with gradients among arguments and in tuples of them; lists, dicts and objects keep their identity."""
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            yield value
        elif type(value) is tuple:
            yield from direct_tensors(value)


def replaced(values: tuple[Any, ...], tensors: Iterator[Tensor]) -> tuple[Any, ...]:
    """The arguments with `tensors` in the places `direct_tensors` found."""
    return tuple(
        next(tensors)
        if isinstance(value, Tensor) and value.requires_grad
        else replaced(value, tensors)
        if type(value) is tuple
        else value
        for value in values
    )


def tensors_with_grad(output: Any) -> list[Tensor]:
    """Tensors with gradients anywhere in an output: nested containers, and dataclasses."""
    found = []
    for value in tree_flatten(output)[0]:
        if isinstance(value, Tensor):
            found += [value] if value.requires_grad else []
        elif is_dataclass(value) and not isinstance(value, type):
            found += tensors_with_grad([getattr(value, each.name) for each in fields(value)])
    return found


class BackwardEnd:
    """What is called when a backward has ended. Only the autograd engine holds it, until then or until it raises."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def __call__(self) -> None:
        self._then()
