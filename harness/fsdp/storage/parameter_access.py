"""Reading and setting `.grad` whatever class a parameter has, and names by which the engine marks parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

HOME = "_fsdp_home"
"""Attribute of a parameter, sharded or not: its first name and its unit's, for messages."""
WATCH = "_fsdp_watch"
"""Attribute of a trained unsharded parameter: what is hung on it in place of a hook of the program."""

_GRAD: Any = Tensor.grad
"""torch's own descriptor. Its functions are taken as they are, for they are called for every parameter, and often."""
grad_of: Callable[[Tensor], Tensor | None] = _GRAD.__get__
put_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__


def by_engine(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function of the engine with `__torch_function__` disabled: parameters of any class are plain tensors."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return run
