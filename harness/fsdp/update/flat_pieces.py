"""What an optimizer's tensors let the program do between two steps.

[Note: Flat pieces] `optimizer.param_groups` of a bound optimizer holds stretches of this rank's main weights where the
program had put parameters. While a step runs they are tensors like any other. Between steps they have no gradients,
what they hold is this rank's alone, and the other ranks have taken it already: clipping them would clip nothing, and an
average or an edit of them would part the ranks. So they tell what needs no values, and refuse the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import resolve_name

from harness.fsdp.storage.metadata import METADATA
from harness.fsdp.storage.parameter_access import grad_of, put_grad

ASKED = "_fsdp_step_has_gradients"
"""Attribute of a stretch that is guarded: tells whether its model has gradients that the step would bring."""

DECOUPLED = "decoupled_grad"
"""Attribute in which an optimizer of Megatron's protocol finds a gradient of another dtype than the weight's."""


class FlatPieceError(RuntimeError):
    """An operation between steps used values of a tensor of `optimizer.param_groups`, which is a flat piece of this
    rank's main weights and no parameter."""


class FlatPiece(Tensor):
    """A stretch between two steps; see [Note: Flat pieces]."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Tell what needs no values.

        Raises:
            FlatPieceError: for all the rest.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA:
                return func(*args, **(kwargs or {}))
        _refuse(resolve_name(func) or func.__name__)

    @property
    def grad(self) -> Tensor | None:
        """None where no gradient has come, or where it was handed over as `decoupled_grad`; raises where one has."""
        if getattr(self, DECOUPLED, None) is None and getattr(self, ASKED)():
            _refuse(".grad")
        with torch._C.DisableTorchFunctionSubclass():
            return grad_of(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            put_grad(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A tensor of its own, which no model knows."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = self.detach().clone().as_subclass(Tensor).requires_grad_()
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override] # torch leaves it untyped
        with torch._C.DisableTorchFunctionSubclass():
            return f"FlatPiece({self.numel()} elements of this rank's main weights, {self.dtype})"


def guard(weight: Tensor, has_gradients: Callable[[], bool]) -> None:
    """A step is over: refuse what would be of this rank alone."""
    setattr(weight, ASKED, has_gradients)
    weight.__class__ = FlatPiece


def free(weight: Tensor) -> None:
    """A step begins: a tensor like any other."""
    weight.__class__ = Tensor


def _refuse(what: str) -> NoReturn:
    raise FlatPieceError(
        f"{what} of a tensor in optimizer.param_groups, outside optimizer.step(): those are flat pieces of this rank's"
        " main weights, not parameters, and get gradients inside the step alone. Clip with model.clip_grad_norm_("
        "max_norm, norm_type), scale the loss, read model.full_gradients() or model.full_weights(), and read or edit"
        " weights over model.parameters() inside `with model.gathered():`"
    )
