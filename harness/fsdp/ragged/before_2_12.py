"""Dispatch by the subclass, which torch before 2.12 does not do for DTensor's (pytorch issue 177716).

There its dispatcher computes with a subclass as with a DTensor; here it is made to ask the subclass first. Later
versions do so themselves, and use nothing of this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from harness.private_torch import DTensorSpec, dispatcher_before_2_12, tree_leaves

TAKE_PLAIN = (torch.ops.aten.copy_.default, torch.ops.aten.mul.Tensor)
"""A plain tensor of several elements may take part: torch refuses those before it asks anybody but a handler."""
ASKS_DTENSOR = torch.__version__ < "2.12"


@cache
def apart_spec() -> type:
    """Equal to no other: torch's cache of rules has none for it, and asks."""
    return type("ApartSpec", (DTensorSpec,), {"__eq__": object.__eq__, "__hash__": object.__hash__})


def spec_for(kind: type[DTensor], spec: Any) -> Any:
    if not ASKS_DTENSOR:
        return spec
    made = copy.copy(spec)
    made.__class__ = DTensorSpec if kind is DTensor else apart_spec()
    return made


def ask_subclasses(*kinds: type[DTensor]) -> None:
    """In this process, operations on tensors of these classes run by their `__torch_dispatch__`."""
    dispatcher, slow_path, handlers = dispatcher_before_2_12()

    def first_of(arguments: object) -> type[DTensor] | None:
        return next((type(each) for kind in kinds for each in tree_leaves(arguments) if isinstance(each, kind)), None)

    def asking(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def asked(op: Any, args: Any, kwargs: Any, *more: Any) -> Any:
            kind = first_of((args, kwargs))
            return original(op, args, kwargs, *more) if kind is None else answer(kind, op, args, kwargs)

        return asked

    def run(kind: Any, op: Any, args: Any, kwargs: Any) -> Any:
        return kind.__torch_dispatch__(op, (kind,), args, kwargs)

    # torch's description of the operation, which `run` does not look at
    dispatcher.unwrap_to_op_info = asking(dispatcher.unwrap_to_op_info, lambda *_: None)
    setattr(dispatcher, slow_path, asking(getattr(dispatcher, slow_path), run))

    def unhandled(op: Any, args: Any, kwargs: Any) -> Any:
        handler = handlers.pop(op)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handler

    handlers.update({op: asking(handler, run) for op, handler in handlers.items()})
    handlers.update(dict.fromkeys(TAKE_PLAIN, asking(unhandled, run)))
