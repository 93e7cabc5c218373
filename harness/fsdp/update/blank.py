"""An optimizer's state before its first step: what a checkpoint is loaded into, and no step needs to be faked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Entries with one number for all elements of a tensor; others have one for each."""
FIRST = {"mu_product": 1.0, "mu": 1.0}
"""What entries begin with that do not begin with 0 (NAdam, ASGD)."""
FIRST_OF_GROUP = {"eta": "lr", "step_size": "lr", "sum": "initial_accumulator_value"}
"""Entries that begin with a setting of their group (ASGD, Rprop, Adagrad)."""
ENTRIES: dict[type[torch.optim.Optimizer], dict[str, str]] = {
    torch.optim.SGD: {"momentum_buffer": "momentum"},
    torch.optim.RAdam: {"step": "", "exp_avg": "", "exp_avg_sq": ""},
    torch.optim.NAdam: {"step": "", "mu_product": "", "exp_avg": "", "exp_avg_sq": ""},
    torch.optim.Adam: {"step": "", "exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"},
    torch.optim.Adamax: {"step": "", "exp_avg": "", "exp_inf": ""},
    torch.optim.Adadelta: {"step": "", "square_avg": "", "acc_delta": ""},
    torch.optim.Adagrad: {"step": "", "sum": ""},
    torch.optim.RMSprop: {"step": "", "square_avg": "", "momentum_buffer": "momentum", "grad_avg": "centered"},
    torch.optim.ASGD: {"step": "", "eta": "", "mu": "", "ax": ""},
    torch.optim.Rprop: {"step": "", "prev": "", "step_size": ""},
}
"""What torch's optimizers keep of every parameter, and the setting of the group that asks for it ("": always)."""


def create_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """Create the optimizer state that torch would create in the first step, where it is missing: zeros, and a step
    count of 0.

    The state then has the same keys and bytes before and after the first step, and the first update is unchanged.

    Returns:
        The state by parameter and entry, not copied. An optimizer's attribute `entries`, or a table of torch's own,
        names the entries; of any other optimizer nothing is known, and parameters have none.

    Raises:
        NotImplementedError: the optimizer's state depends on the first gradient.
    """
    if any(map(begins_with_gradient, optimizer.param_groups)):
        raise NotImplementedError(
            "SGD's momentum with dampening begins with the first gradient, undampened, and not with zeros: step once"
            " before its state is made, saved or loaded, or use dampening=0"
        )
    found: dict[Tensor, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        create_state_of(optimizer, group)
        entries = entries_of(optimizer, group)
        trained = [param for param in group["params"] if param.requires_grad]
        found |= {param: {entry: optimizer.state[param][entry] for entry in entries} for param in trained}
    return found


def begins_with_gradient(group: Mapping[str, Any]) -> bool:
    """Whether what is kept begins with the first gradient, as SGD's momentum, and zeros would be something else."""
    return bool(group.get("dampening") and group.get("momentum"))


def create_state_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Give every trained parameter of one group the state torch would create in its first step."""
    entries = entries_of(optimizer, group)
    for param in (each for each in group["params"] if each.requires_grad and entries):
        held = optimizer.state[param]
        for entry in entries:
            if held.get(entry) is None:
                held[entry] = blank(entry, group, param)


def entries_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the state tensors that an optimizer keeps for every parameter. They come from its attribute `entries`,
    or from a table of torch's optimizers. For other optimizers nothing is known, and the result is empty."""
    declared = getattr(optimizer, "entries", None)
    if declared is not None:
        return tuple(declared)
    known = next((entries for kind, entries in ENTRIES.items() if isinstance(optimizer, kind)), {})
    return tuple(entry for entry, setting in known.items() if not setting or group[setting])


def blank(entry: str, group: Mapping[str, Any], param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What an entry begins with. dtype: of one with a number an element; None: the parameter's."""
    first = float(group[FIRST_OF_GROUP[entry]]) if entry in FIRST_OF_GROUP else FIRST.get(entry, 0.0)
    if entry not in COUNTERS:
        return torch.full_like(param, first, dtype=dtype, requires_grad=False)
    on_device = group.get("fused") or group.get("capturable")
    return torch.full((), first, dtype=torch.float32, device=param.device if on_device else "cpu")
