"""Where a module holds the parameters that were sharded, and what to say where it holds others, or under other names.

Pruning, parametrizations and code that writes into `_parameters` change this without a word. What is taken out of a
module altogether is no fault: it gets no gradient, and nobody asks for its name.
"""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn

from harness.fsdp.storage.parameter_access import HOME


class Whereabouts:
    """The place of each parameter in its module.

    Args:
        module: that is about to be sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (part._parameters, key, param, f"{path}.{key}" if path else key)
            for path, part in module.named_modules()
            for key, param in part._parameters.items()
            if param is not None
        ]

    def check(self) -> None:
        """Raise RuntimeError where a parameter that the engine does not know stands in the place of one it trains."""
        for held, key, param, name in self._places:
            found = held.get(key)
            if found is not param and found is not None and not hasattr(found, HOME):
                refuse_unknown(name, "replaced")


def check_names(module: nn.Module) -> None:
    """Raise RuntimeError where a parameter is not called as it was when it was sharded: its state has that name."""
    for name, param in module.named_parameters():
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
        " module before it is sharded; or write values into the parameters it has, inside `with model.gathered():`"
    )


def _first_name(param: Tensor) -> str | None:
    home: tuple[str, str] | None = getattr(param, HOME, None)
    return None if home is None else home[0]
