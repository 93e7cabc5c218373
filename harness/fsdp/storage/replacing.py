"""torch's functions that put parameters of their own in the place of a module's: they do so before it is sharded."""

from __future__ import annotations

import sys

from torch import nn

_MODULES = frozenset(
    f"torch.nn.utils.{name}" for name in ("parametrize", "parametrizations", "weight_norm", "spectral_norm", "prune")
)
_FUNCTIONS = frozenset(("register_parametrization", "apply", "weight_norm", "spectral_norm", "orthogonal"))
"""What replaces in these modules; others there compute, in forwards too."""
_MAKING = nn.Parameter.__new__.__code__


def replacer() -> str:
    """The outermost of these functions that is running, by its public name; empty where none is."""
    found, frame = "", sys._getframe(1)
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module in _MODULES and function in _FUNCTIONS:
            found = module if function == "apply" else f"{module.removesuffix('.' + function)}.{function}"
        frame = frame.f_back  # type: ignore[assignment] # None at the end
    return found


def is_made_parameter(depth: int) -> bool:
    """Whether what runs `depth` calls above the caller is `nn.Parameter(...)`."""
    return sys._getframe(depth + 1).f_code is _MAKING


def before_sharding(called: str, by: str) -> str:
    """What to say of a parameter that one of these functions has been given, or `nn.Parameter` itself where none is."""
    if by:
        return (
            f"{called} is sharded, and {by} puts another parameter in its place, or gives it another name: the engine"
            " would neither train nor save that. Apply it before the model is sharded"
        )
    return (
        f"{called} is sharded, and nn.Parameter(p) would share its memory, which the engine writes, releases and moves."
        " Copy the values, nn.Parameter(p.detach().clone()); or make it before the model is sharded"
    )
