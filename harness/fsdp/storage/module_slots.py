"""Places in modules that hold parameters."""

from __future__ import annotations

import weakref
from typing import Any, cast

from torch import nn


class ModuleSlot:
    """A place in a module that holds a parameter."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.held = module._parameters
        self.name = name
        self.module = weakref.ref(module)
        self.is_plain = type(self.held) is dict and getattr(type(module), "__setattr__", None) is nn.Module.__setattr__
        """Recurrent layers hold their parameters twice, and have their own `__setattr__`."""

    @property
    def param(self) -> nn.Parameter | None:
        """None where the program has taken it out."""
        return self.held[self.name] if self.name in self.held else None  # noqa: SIM401 # TorchScript's has no `get`

    def put(self, coming: nn.Parameter, leaving: nn.Parameter) -> None:
        """Let a parameter take the place of another one, unless the program has taken that out."""
        if self.param is leaving and (module := self.module()) is not None:
            setattr(module, self.name, coming)
            names: list[str] = getattr(module, "_flat_weights_names", [])
            if self.name in names:  # else a recurrent layer collects its parameters anew in each forward
                cast(Any, module)._flat_weight_refs[names.index(self.name)] = weakref.ref(coming)


def slots_of(module: nn.Module) -> dict[int, list[ModuleSlot]]:
    """Every place that holds a parameter, by its identity."""
    found: dict[int, list[ModuleSlot]] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append(ModuleSlot(part, name))
    return found
