"""Hooks on a step without the engine: autograd's gradients of parameters, and weights that modules look up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

Heard = Callable[[str, Tensor], None]
Aside = Callable[[], AbstractContextManager[None]]


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their names in the model before FSDP1 wrapped any of it."""
    return {_unwrapped(name): param for name, param in module.named_parameters()}


def named_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Modules by their names in the model before FSDP1 wrapped any of it; a wrapper stands for what it wraps."""
    found: dict[str, nn.Module] = {}
    for name, each in module.named_modules():
        found.setdefault(_unwrapped(name), each)
    return found


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")


class Nothing:
    """Hook of a copied module."""

    def __call__(self, *args: Any, **keywords: Any) -> None:
        return None


class ParameterHooks:
    """Context manager around forwards and backwards.

    An engine may put another parameter in a module's slot during the forward, or a view of one (FSDP1): its gradient is
    then hooked instead, unless the engine has moved the first one's hooks (FSDP2 does not). Args: gradient: called with
    a parameter's name and each gradient of autograd. forward: called with a parameter's name and the tensor of a
    module's forward, or its cast copy. aside: context of all work here (`Timers.aside`).
    """

    def __init__(self, module: nn.Module, gradient: Heard, forward: Heard, aside: Aside = nullcontext) -> None:
        self._module, self._gradient, self._forward, self._aside = module, gradient, forward, aside
        self._listened: dict[int, nn.Parameter] = {}
        self._handles: list[Any] = []
        self._hung = set[int]()

    def __reduce__(self) -> tuple[Any, ...]:
        """Hooks that tell nobody, for a copied or pickled module."""
        return ParameterHooks, (nn.Module(), Nothing(), Nothing())

    def __enter__(self) -> ParameterHooks:
        params = named_parameters(self._module)
        names = {id(param): name for name, param in params.items()}
        for name, param in params.items():
            self._listen(name, param)
        for module in self._module.modules():
            own = {slot: names[id(param)] for slot, param in module._parameters.items() if param is not None}
            if own:
                self._handles.append(module.register_forward_pre_hook(partial(self._before, own)))
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._listened.clear()
        self._hung.clear()

    def _listen(self, name: str, param: nn.Parameter) -> None:
        if id(param) not in self._listened and self._hang(name, param):
            self._listened[id(param)] = param

    def _hang(self, name: str, tensor: Tensor) -> bool:
        """True if a hook was registered; False if there is one of these, or no gradient to come."""
        if not tensor.requires_grad or not self._hung.isdisjoint(tensor._backward_hooks or {}):
            return False
        self._handles.append(handle := tensor.register_hook(partial(self._handed, name)))
        self._hung.add(handle.id)
        return True

    def _handed(self, name: str, gradient: Tensor) -> None:
        with self._aside():
            self._gradient(name, gradient)

    def _before(self, own: dict[str, str], module: nn.Module, _args: object) -> None:
        with self._aside():
            for slot, name in own.items():  # looked up as the module does
                weight = getattr(module, slot)
                if isinstance(weight, nn.Parameter):
                    self._listen(name, weight)
                elif isinstance(weight._base, nn.Parameter):
                    self._hang(name, weight)  # not kept: it holds an unsharded tensor; its handle does not
                self._forward(name, weight)
