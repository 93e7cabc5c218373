"""torch's optimizers as the engine knows them: their state, their kernels, and which of them can step shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.options import Numerics
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import HOME
from harness.fsdp.storage.placement import WHOLE
from harness.muon import MOMENTUM, MuonWithAdamW, matrices_of, steps_matrices

Optimizer = torch.optim.Optimizer
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})  # one number for all elements of a tensor
FIRST = {"mu_product": 1.0, "mu": 1.0}  # of NAdam and ASGD; other entries begin with 0
FIRST_OF_GROUP = {"eta": "lr", "step_size": "lr", "sum": "initial_accumulator_value"}
ENTRIES: dict[type[Optimizer], dict[str, str]] = {
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
    torch.optim.Muon: {MOMENTUM: ""},
    MuonWithAdamW: {"step": "", "exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad", MOMENTUM: ""},
}
"""Entries of torch's optimizers, and the setting of the group that asks for each ("": always)."""
NEEDS_WHOLE = "needs_whole"  # function of an optimizer: of a parameter, if `step` needs that whole; [Note: Own step]
_DECLARE = f"let `{NEEDS_WHOLE}(param)` of it say which parameters it needs whole"
REFUSED = {
    "Muon": ("its own `step` has rows of matrices", _DECLARE),
    "LBFGS": ("it works on one vector of all parameters", "leave it out of fully_shard_optimizer: it steps DTensors"),
    "Adafactor": ("it keeps sums over whole rows and columns", _DECLARE),
    "ZeroRedundancyOptimizer": ("it splits whole parameters over ranks once more", "use its optimizer_class itself"),
}
KERNELS = ("fused", "foreach")


def is_of_matrices(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.Muon | MuonWithAdamW) and steps_matrices(group)


def moments_of(optimizer: Optimizer) -> frozenset[str] | None:
    """Entries with a number an element; None for a rule that is not torch's own and elementwise."""
    names = "step", "_init_group"
    if hasattr(optimizer, NEEDS_WHOLE):
        return None
    for kind, entries in ENTRIES.items():
        if all(inspect.unwrap(getattr(type(optimizer), name)) is inspect.unwrap(getattr(kind, name)) for name in names):
            return frozenset(entries) - COUNTERS
    return None


def needs_whole_of(optimizer: Optimizer) -> Callable[[Tensor], bool] | None:
    """None if the optimizer's own `step` needs no parameter whole; else what it declares. Adafactor of torch, and a
    class with another `step` than its base of Muon, need every one."""
    known = torch.optim.Adafactor | torch.optim.Muon | MuonWithAdamW
    declared: Callable[[Tensor], bool] | None = getattr(optimizer, NEEDS_WHOLE, None)
    if declared is None and isinstance(optimizer, known) and moments_of(optimizer) is None:
        return lambda _: True
    return declared


# -- state before the first step ---------------------------------------------------------------------------------------


def create_state(optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """Create the state that torch would create in the first step, where it is missing: zeros, and a step count of 0.

    The first update is unchanged. Names come from an attribute `entries` of the optimizer, or a table of torch's. One
    that needs parameters whole makes its own in its first step.

    Returns them by parameter and entry, not copied; nothing of other optimizers. NotImplementedError: the optimizer's
    state depends on the first gradient.
    """
    if any(map(begins_with_gradient, optimizer.param_groups)):
        raise NotImplementedError(
            "SGD's momentum with dampening begins with the first gradient, undampened, and not with zeros: step once"
            " before its state is made, saved or loaded, or use dampening=0"
        )
    found: dict[Tensor, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        create_state_of(optimizer, group)
        entries = _entries_of(optimizer, group)
        for param in (each for each in group["params"] if each.requires_grad):
            held = optimizer.state.get(param, {})
            found[param] = {entry: held[entry] for entry in entries if entry in held}
    return found


def begins_with_gradient(group: Mapping[str, Any]) -> bool:
    return bool(group.get("dampening") and group.get("momentum"))


def create_state_of(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    entries = () if hasattr(optimizer, NEEDS_WHOLE) else _entries_of(optimizer, group)
    for param in (each for each in group["params"] if each.requires_grad and entries):
        held = optimizer.state[param]
        held.update({entry: _first(entry, group, param) for entry in entries if held.get(entry) is None})


def _entries_of(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    declared = getattr(optimizer, "entries", None)
    if declared is not None:
        return tuple(declared)
    kinds = (kind for kind in ENTRIES if isinstance(optimizer, kind))
    known = ENTRIES[torch.optim.Muon] if is_of_matrices(optimizer, group) else ENTRIES.get(next(kinds, Optimizer), {})
    return tuple(entry for entry, setting in known.items() if not setting or group[setting])


def _first(entry: str, group: Mapping[str, Any], param: Tensor) -> Tensor:
    value = float(group[FIRST_OF_GROUP[entry]]) if entry in FIRST_OF_GROUP else FIRST.get(entry, 0.0)
    if entry not in COUNTERS:
        return torch.full_like(param, value, requires_grad=False)
    on_device = group.get("fused") or group.get("capturable")
    return torch.full((), value, dtype=torch.float32, device=param.device if on_device else "cpu")


# -- kernels -----------------------------------------------------------------------------------------------------------


def kernel_settings(optimizer: Optimizer, group: Mapping[str, Any], *, unfused: bool) -> dict[str, bool]:
    """Settings in place of a group's own, where its user has left the choice of kernels open.

    The fused kernel walks once through a flat run of parameters, torch's default a dozen times. SGD walks once or twice
    anyway.

    unfused: as one process steps under `exact`, and as `ordered` does where [Note: Bits and cuts] asks.
    """
    if unfused:
        return {name: False for name in KERNELS if name in group}
    if not isinstance(optimizer, torch.optim.Adam) or any(
        name not in group or group[name] is not None for name in KERNELS
    ):
        return {}
    asks = group.get("differentiable") or group.get("capturable")
    return {} if asks or any(isinstance(value, Tensor) for value in group.values()) else {"fused": True}


# -- preconditions -----------------------------------------------------------------------------------------------------


def check_optimizer(optimizer: Optimizer, buckets: Sequence[ParamGroup], numerics: Numerics) -> None:
    """Refuse an optimizer before anything is changed. TypeError: it needs unsharded parameters where these are cut.
    ValueError: it cannot keep the bits that `numerics` promises; or as `matrices_of`."""
    kind = type(optimizer)
    name = next((base.__name__ for base in kind.__mro__ if base.__name__ in REFUSED), None)
    is_stepped = needs_whole_of(optimizer) is not None or moments_of(optimizer) is not None
    if name and not is_stepped and any(bucket.placements.main_weights != WHOLE for bucket in buckets):
        why, fix = REFUSED[name]
        raise TypeError(
            f"{kind.__name__} cannot step sharded parameters: {why}. Use an elementwise optimizer, as AdamW;"
            f" or zero_dp_strategy=0, under which parameters are whole; or {fix}"
        )
    for group in filter(partial(is_of_matrices, optimizer), optimizer.param_groups):
        for param in group["params"]:
            matrices_of(param.shape, group, f"parameter {getattr(param, HOME, ('?',))[0]}")
    # torch's `add(other, alpha=)` in 16 bits rounds once inside a tensor and twice in its last few elements; of torch's
    # optimizers, AdamW alone gets by without it
    narrow = {str(b.dtypes.main) for b in buckets if b.trainable and b.dtypes.main.itemsize < 4}
    if numerics.bitwise and narrow and type(optimizer).__name__ != "AdamW":
        raise ValueError(
            f"numerics=ordered or exact with main_params_dtype={', '.join(sorted(narrow))} needs AdamW: what"
            f" {type(optimizer).__name__} adds to 16-bit weights is rounded otherwise at the end of a tensor, so that"
            " bits would depend on where shards are cut. Use main_params_dtype=torch.float32, AdamW, or numerics=fast"
        )
