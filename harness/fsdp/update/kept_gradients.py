"""Gradients that an optimizer keeps in its state as they were handed to it, as `state["previous"] = p.grad` does.

In plain torch such a tensor stays what it was, for the next backward makes new ones. Here the next step's gradients
come to the same place, and the optimizer would read these twice. So what it keeps gets memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from harness.fsdp.storage.parameter_access import by_engine, grad_of


@by_engine
def set_apart(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    """Copy what the state of a weight holds of its gradient's storage."""
    gradient = grad_of(weight)
    state: dict[Any, Any] | None = optimizer.state.get(weight)
    if gradient is None or not state:
        return
    place = gradient.untyped_storage()._cdata

    def apart(value: Tensor) -> Tensor:
        shares = value.layout is torch.strided and value.untyped_storage()._cdata == place
        return value.clone() if shares else value

    state.update({name: tree_map_only(Tensor, apart, value) for name, value in state.items()})
