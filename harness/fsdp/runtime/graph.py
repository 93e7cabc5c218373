"""Questions to autograd's graph, and the nodes that the engine puts into it.

[Note: Edited inputs] A unit computes with aliases of its inputs, whose history begins at the engine's node. They share
storage and version counter, so an edit in place (`F.relu_(x)`) changes the caller's tensor too; its history must then
go through the edit. Where autograd would have to follow the edit into other tensors (a view's base, an input that was
passed twice), it cannot, and the edit is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from harness.fsdp.runtime.refusals import refuse_edit
from harness.private_torch import is_view, keeping_version, number_of_node, running_node, tree_flatten

ABOVE_ALL = 2**64 - 1


class PassedInputs(torch.autograd.Function):
    """Aliases of a unit's inputs, whose backward runs when the unit's is over."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[Any], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.notify = notify
        ctx.set_materialize_grads(False)  # an input without a gradient must not get a zero one
        return tuple(each.detach() for each in inputs)  # what is returned as it came could not be edited in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.notify(ctx)
        return (None, *gradients)


class EditedInput(torch.autograd.Function):
    """Gives the caller's tensor the history of its alias; see [Note: Edited inputs]."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, alias: Tensor) -> Tensor:
        ctx.mark_dirty(own)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


@dataclass(frozen=True)
class Passed:
    own: Sequence[Tensor]
    aliases: Sequence[Tensor]
    node: Node | None

    def take_edits(self, unit: str) -> list[Tensor]:
        """Give edited inputs the history of their aliases; returns them.

        Raises:
            RuntimeError: autograd would have to follow the edit into other tensors.
        """
        pairs = [pair for pair in zip(self.own, self.aliases, strict=True) if pair[1].grad_fn is not self.node]
        for own, alias in pairs:
            places = [each for each in self.own if each.data_ptr() == own.data_ptr()]
            if own.is_leaf or is_view(own) or len(places) > 1:
                refuse_edit(unit)
            with keeping_version(own):
                EditedInput.apply(own, alias)  # type: ignore[no-untyped-call] # torch leaves it unannotated
        return [own for own, _ in pairs]


def number_of(output: Tensor) -> int:
    """Sequence number of a tensor's node; for a leaf, above all of them."""
    return ABOVE_ALL if output.grad_fn is None else number_of_node(output.grad_fn)


def could_reach(params: Set[int]) -> bool:
    """True if the graph below the running node holds one of these parameters."""
    todo: list[Node | None] = [running_node()]
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
    """Arguments with `tensors` in the places found by `direct_tensors`."""
    return tuple(
        next(tensors)
        if isinstance(value, Tensor) and value.requires_grad
        else replaced(value, tensors)
        if type(value) is tuple
        else value
        for value in values
    )


def tensors_with_grad(output: Any) -> list[Tensor]:
    """Tensors with gradients in nested containers and dataclasses."""
    if isinstance(output, Tensor):  # as almost always
        return [output] if output.requires_grad else []
    found = []
    for value in tree_flatten(output)[0]:
        if isinstance(value, Tensor):
            found += [value] if value.requires_grad else []
        elif is_dataclass(value) and not isinstance(value, type):
            found += tensors_with_grad([getattr(value, each.name) for each in fields(value)])
    return found


class BackwardEnd:
    """End callback of a backward; only the autograd engine holds it."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def __call__(self) -> None:
        self._then()
