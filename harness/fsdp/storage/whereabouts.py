"""Where a module holds the parameters that were sharded, and errors where it holds others, or under other names.

Pruning, parametrizations and code that writes into `_parameters` change this without a word. What is taken out of a
module altogether is no fault: it gets no gradient, and nobody asks for its name.
"""

from __future__ import annotations

import weakref
from typing import NoReturn

from torch import Tensor, nn

from harness.fsdp.storage.parameter_access import HOME


class Whereabouts:
    """The parts of a module, and the parameters and modules in each.

    Args:
        module: that is about to be sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(path, weakref.ref(part)) for path, part in module.named_modules()]
        self._have = [_contents(part) for part in module.modules()]

    def check(self) -> None:
        """Raise RuntimeError where a parameter came in that the engine does not know, or one has another name."""
        for place, (path, reference) in enumerate(self._parts):
            part = reference()
            if part is None:
                continue
            if (have := _contents(part)) != self._have[place]:
                check_names(part, path)
                self._have[place] = have


def _contents(part: nn.Module) -> tuple[list[str], list[int]]:
    return list(part._parameters.keys()), list(map(id, part._modules.values()))


def check_names(module: nn.Module, path: str = "") -> None:
    """Raise RuntimeError where a parameter is not called as it was when it was sharded: its state has that name.

    path: of the module in the model.
    """
    for name, param in module.named_parameters(path):
        known_as = _first_name(param)
        if known_as is None:
            refuse_unknown(name, "added")
        if known_as != name:
            raise RuntimeError(
                f"parameter {known_as} is called {name} since it was sharded, and its state goes by the first name:"
                " prune, parametrize or rearrange modules before they are sharded; or undo it (prune.remove,"
                " remove_parametrizations) before state is saved or loaded"
            )


def refuse_unknown(name: str, how: str) -> NoReturn:
    """Raise RuntimeError: a parameter came into the module that the engine does not know. how: "added", "replaced"."""
    raise RuntimeError(
        f"{name} was {how} after sharding: the engine would neither train nor save the new parameters. Change the"
        " module before it is sharded; or write values into the parameters it has, inside `with model.unsharded():`"
    )


def _first_name(param: Tensor) -> str | None:
    home: tuple[str, str] | None = getattr(param, HOME, None)
    return None if home is None else home[0]
