"""An optimizer's state as torch's `Optimizer.state_dict` has it: by the number of a parameter, for any layout.

Numbers count the parameters that the optimizer was built over, group by group, frozen ones among them. Entries with a
parameter's shape are `DTensor`s over the engine's own memory; counters are tensors of shape [], one a parameter, and
every rank has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.fsdp.comm.crossed import Everyone
from harness.fsdp.state.named import OPTIMIZER, ShardedState, StateMismatch, check_fit, fill, is_counter_elsewhere
from harness.fsdp.update.blank import begins_with_gradient, create_state_of
from harness.fsdp.update.kernels import KERNELS
from harness.fsdp.update.optimizer import ShardedOptimizer


def have_state(optimizer: torch.optim.Optimizer, *, to_load: bool) -> None:
    """Let an optimizer that has not been stepped have state, to be saved or (`to_load`) written over.

    SGD's momentum with dampening has none before its first step, which begins it otherwise than with zeros.
    """
    for group in optimizer.param_groups:
        if to_load or not begins_with_gradient(group):
            create_state_of(optimizer, group)


def state_dict_of(
    optimizer: torch.optim.Optimizer, owner: ShardedOptimizer, held: ShardedState, everyone: Everyone
) -> dict[str, Any]:
    """`state`: entries by a parameter's number. `param_groups`: settings, and numbers of a group. *Collective.*"""
    numbers = {name: number for number, name in enumerate(_names(optimizer, owner))}
    groups_of = owner.groups.names_by_group(optimizer)
    counters = _counters(held, everyone, groups_of)
    state: dict[int, dict[str, Tensor]] = {}
    for name, entry, value in _entries(held):
        if name in numbers:
            state.setdefault(numbers[name], {})[entry] = counters.get((name, entry), value)
    groups = []
    given = owner.groups.given(optimizer)
    for settings, names in zip(given, groups_of, strict=True):
        groups.append(settings | {"params": [numbers[name] for name in names]})
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def load_state_dict(
    optimizer: torch.optim.Optimizer, owner: ShardedOptimizer, held: ShardedState, given: Mapping[str, Any]
) -> None:
    """Take what `state_dict_of` gave, or what torch's gives of the same parameters in one process. *Collective.*

    Raises:
        StateMismatch: it does not fit; nothing was loaded.
    """
    _check_groups(given["param_groups"], owner.groups.names_by_group(optimizer))
    names = list(_names(optimizer, owner))
    known = frozenset(names)
    wanted = {(name, entry): value for name, entry, value in _entries(held) if name in known}
    found = {(names[number], entry): value for number, of in given["state"].items() for entry, value in of.items()}
    found = {key: torch.as_tensor(value) for key, value in found.items() if isinstance(value, Tensor | int | float)}
    pairs = [(_key(key), target, found[key]) for key, target in wanted.items() if key in found]
    missing = [_key(key) for key, target in wanted.items() if key not in found and _is_here(target)]
    check_fit(pairs, missing, [_key(key) for key in found if key not in wanted])
    for _, target, value in pairs:
        fill(target, value)
    for group, settings in zip(optimizer.param_groups, given["param_groups"], strict=True):
        group.update({k: deepcopy(v) for k, v in settings.items() if k != "params" and k not in KERNELS})


def _counters(held: ShardedState, everyone: Everyone, groups: Sequence[Sequence[str]]) -> dict[tuple[str, str], Tensor]:
    """All counters, also of parameters of which this rank has no row. *Collective.*

    No rank counts a parameter without rows: it has the largest count of its group, as torch counts it in every step.
    """
    known = {
        (name, entry): value for name, entry, value in _entries(held) if f"{OPTIMIZER}{name}/{entry}" in held.counters
    }
    order = sorted(known)
    here = [float(not is_counter_elsewhere(known[key])) for key in order]
    values = [0.0 if is_counter_elsewhere(known[key]) else float(known[key]) for key in order]
    device = everyone.runtime.device
    sums = everyone.sum_scalars(torch.tensor([values, here], dtype=torch.float64, device=device), "counters").cpu()
    means = sums[0] / sums[1]  # of equal numbers: exact; NaN where no rank has a copy
    found = {key: means[place].to(known[key].dtype) for place, key in enumerate(order)}
    for name, entry in (key for key in order if found[key].isnan()):
        group = next((names for names in groups if name in names), ())
        others = [found[key] for key in order if key[1] == entry and key[0] in group and not found[key].isnan()]
        found[name, entry] = _largest(others, found[name, entry])
    return found


def _largest(counts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(list(counts)).max() if counts else torch.zeros_like(like)


def _key(parameter_and_entry: tuple[str, str]) -> str:
    return "/".join(parameter_and_entry)


def _is_here(target: Tensor) -> bool:
    """Whether this rank has some of it; of a counter, a copy."""
    return not isinstance(target, DTensor) or bool(target.to_local().numel())


def _names(optimizer: torch.optim.Optimizer, owner: ShardedOptimizer) -> Iterator[str]:
    return (name for names in owner.groups.names_by_group(optimizer) for name in names)


def _entries(held: ShardedState) -> Iterator[tuple[str, str, Tensor]]:
    for key, value in held.tensors.items():
        if key.startswith(OPTIMIZER):
            name, _, entry = key.removeprefix(OPTIMIZER).rpartition("/")
            yield name, entry, value


def _check_groups(given: list[dict[str, Any]], names: list[list[str]]) -> None:
    sizes, own = [len(group["params"]) for group in given], [len(each) for each in names]
    if sizes != own:
        raise StateMismatch(
            f"state does not fit the optimizer, nothing was loaded: it has groups of {sizes} parameters, the"
            f" optimizer's have {own}"
        )
