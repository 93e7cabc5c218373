"""What stands for a module's parameters and buffers while its own code says what is to be loaded into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from harness.fsdp.storage.metadata import METADATA

_DESCRIBED = frozenset(getattr(Tensor, name).__get__ for name in ("device", "is_meta"))
_ITSELF = frozenset([Tensor.data.__get__, Tensor.detach])  # type: ignore[attr-defined] # a descriptor of C


class Receiver(Tensor):
    """A tensor without values: it has shape, dtype and device of another one, and notes what is copied into it."""

    stands_for: Tensor
    received: Any

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """One that stands for a tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype, trained = tensor.shape, tensor.dtype, tensor.requires_grad
        made: Self = torch.Tensor._make_subclass(cls, torch.empty(shape, dtype=dtype, device="meta"), trained)
        made.stands_for, made.received = tensor, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what is copied in.

        Raises:
            NotImplementedError: values are asked for.
        """
        own = args[0] if args and isinstance(args[0], Receiver) else None
        if func is Tensor.copy_ and own is not None:
            own.received = itself(args[1])
            return own
        with torch._C.DisableTorchFunctionSubclass():
            if own is not None and func in _ITSELF:
                return own
            if own is not None and func in _DESCRIBED:
                return func(own.stands_for)
            if func in METADATA:
                return func(*args, **(kwargs or {}))
        raise NotImplementedError(
            "a module's own _load_from_state_dict() reads or edits values of the model, which are sharded: let it"
            f" change the dictionary that it is given, or copy_() into parameters ({getattr(func, '__name__', func)})"
        )


def itself(value: Any) -> Any:
    """What a value stands for, or the value."""
    return value.stands_for if isinstance(value, Receiver) else value


@contextmanager
def receiving(part: nn.Module) -> Iterator[dict[str, Receiver]]:
    """A module's parameters and saved buffers, by name, are receivers in the body."""
    saved = {name for name in part._buffers if name not in part._non_persistent_buffers_set}
    held = [(part._parameters, name) for name in part._parameters] + [(part._buffers, name) for name in sorted(saved)]
    there = [(where, name, tensor) for where, name in held if (tensor := where[name]) is not None]
    receivers = {name: Receiver.of(tensor) for _, name, tensor in there}
    for where, name, _ in there:
        where[name] = receivers[name]  # type: ignore[assignment] # a stand-in
    try:
        yield receivers
    finally:
        for where, name, tensor in there:
            if where.get(name) is receivers[name]:  # a module may give itself another buffer
                where[name] = tensor  # type: ignore[assignment] # what was there
