"""Unsharded parameters between passes, which nobody may compute with."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from torch import Tensor, nn
from torch.overrides import resolve_name

from harness.fsdp.storage.parameter_access import HOME, is_metadata, put_grad
from harness.private_torch import tree_leaves, without_torch_function


class Superseded:
    """An unsharded parameter between passes: whoever kept it gets no gradient of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            if is_metadata(func):
                return func(*args, **(kwargs or {}))
        kept = next((each for each in tree_leaves((args, kwargs)) if isinstance(each, Superseded)), None)
        raise RuntimeError(_superseded(kept, resolve_name(func) or func.__name__))

    @property
    def grad(self) -> Tensor | None:
        raise RuntimeError(_superseded(self, ".grad, as an optimizer does that was built before sharding"))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        put_grad(cast(nn.Parameter, self), value)


def _superseded(kept: Any, by: str) -> str:
    name, unit = getattr(kept, HOME, ("?", "?"))
    return (
        f"parameter {name} of unit {unit} was kept from before sharding, or from a forward, and is used by {by}: the"
        " module holds another one now. Pass an optimizer that was built before to fully_shard_optimizer(model,"
        " optimizer), or build it after sharding; take parameters from model.parameters(); read whole weights inside"
        " `with model.unsharded():`; where one unit uses another's weight, make both one unit"
    )


@cache
def superseding(own: type) -> type:
    return type(own)(own.__name__, (Superseded, own), {"__module__": own.__module__})
