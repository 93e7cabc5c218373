"""Hooks on saving and loading: the program's, which are called as torch calls them; and the engine's own refusal.

Activation checkpointing's wrappers take themselves out of names by such hooks, others add entries or rename old ones. A
hook is given the dictionary of the whole model, where torch gives one on loading what has its module's prefix alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from harness.fsdp.state.named import StateMismatch


def refuse_state_dict(*_: Any) -> None:
    """Raise NotImplementedError: a hook of modules whose tensors are pieces."""
    raise NotImplementedError(
        "what is sharded holds pieces, which a module inside the model cannot name: take state_dict() or"
        " sharded_state() of the ShardedModel, DTensors by the model's own names for any layout;"
        " full_weights() for whole tensors, or local_state() to resume on the same layout"
    )


def saved(module: nn.Module, own: Callable[[str, nn.Module], Mapping[str, Any]]) -> dict[str, Any]:
    """A state dictionary made as torch makes one: of each module the program's hooks before, what is its own, what its
    parts have, and the hooks after, which find no more in it than torch would have.

    Args:
        own: entries of one module alone, given their prefix.
    """
    found: dict[str, Any] = _save(module, "", {}, own)
    return found


def _save(part: nn.Module, prefix: str, found: Any, own: Callable[[str, nn.Module], Mapping[str, Any]]) -> Any:
    for before in part._state_dict_pre_hooks.values():
        if before is not refuse_state_dict:
            before(part, prefix, False)
    found.update(own(prefix, part))
    for name, child in part._modules.items():
        if child is not None:
            _save(child, f"{prefix}{name}.", found, own)
    for after in part._state_dict_hooks.values():
        made = after(part, found, prefix, {"version": part._version})
        found = found if made is None else made
    return found


def before_loading(module: nn.Module, given: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A copy of a state dictionary as the program's hooks make it, outer modules' before inner ones'.

    Raises:
        StateMismatch: a hook found something wrong with it.
    """
    found, wrong = dict(given), list[str]()
    told = getattr(given, "_metadata", None) or {}
    for path, part in module.named_modules(remove_duplicate=False):
        for hook in part._load_state_dict_pre_hooks.values():
            if getattr(hook, "hook", None) is not refuse_state_dict:
                hook(found, f"{path}." if path else "", told.get(path, {}), strict, [], [], wrong)
    if wrong:
        raise StateMismatch(f"state does not fit the model, nothing was loaded: {'; '.join(wrong)}")
    return found


def after_loading(part: nn.Module, names: _IncompatibleKeys) -> _IncompatibleKeys:
    """Tell the program's hooks, inner modules' before outer ones', what names one side lacks; they may change that."""
    for child in part._modules.values():
        if child is not None:
            after_loading(child, names)
    for hook in part._load_state_dict_post_hooks.values():
        hook(part, names)
    return names
