"""Saving and loading as torch does it, through what programs hang on it or put in its place, and the engine's refusal.

Activation checkpointing's wrappers take themselves out of names by hooks, others add entries or rename old ones;
modules have a `state_dict`, `load_state_dict`, `_save_to_state_dict` or `_load_from_state_dict` of their own, which
leave a part out, or read older formats. All are torch's own calls here: only what each module has of its own is given,
and taken, by the engine. A hook before loading is given the dictionary of the whole model, where torch gives one what
has its module's prefix alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from harness.fsdp.state.named import StateMismatch
from harness.fsdp.state.receiver import itself, receiving

_ANSWERED = "_fsdp_state_answered"
"""Attribute of modules while the engine answers for their state."""


def refuse_state_dict(module: nn.Module, *_: Any) -> None:
    """Raise NotImplementedError: a hook of modules whose tensors are pieces."""
    if _ANSWERED not in module.__dict__:
        raise NotImplementedError(
            "what is sharded holds pieces, which a module inside the model cannot name: take state_dict() or"
            " sharded_state() of the ShardedModel, DTensors by the model's own names for any layout;"
            " full_weights() for whole tensors, or local_state() to resume on the same layout"
        )


@contextmanager
def _answering(parts: Iterable[nn.Module], **methods: Callable[..., Any]) -> Iterator[None]:
    """Modules have these methods, given the module first, in place of their own, and refuse nothing."""
    names = (_ANSWERED, *methods)
    before = [(part, {name: part.__dict__[name] for name in names if name in part.__dict__}) for part in parts]
    for part, _ in before:
        part.__dict__.update({_ANSWERED: True} | {name: partial(method, part) for name, method in methods.items()})
    try:
        yield
    finally:
        for part, held in before:
            for name in names:
                del part.__dict__[name]
            part.__dict__.update(held)


# -- saving ------------------------------------------------------------------------------------------------------------


def saved(
    module: nn.Module, value_of: Callable[[str, Any], Any], destination: dict[str, Any] | None, prefix: str
) -> dict[str, Any]:
    """What `module.state_dict(destination=..., prefix=...)` gives, with values that the engine knows.

    Args:
        value_of: what is saved, given its name and what the module itself would save: parameters, buffers, or anything.
    """

    def save(part: nn.Module, given: dict[str, Any], start: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        type(part)._save_to_state_dict(part, own, start, keep_vars=True)  # the parameters themselves, and no views
        given.update({name: value_of(name, value) for name, value in own.items()})

    to: dict[str, Any] = {} if destination is None and not prefix else {"destination": destination, "prefix": prefix}
    with _answering(list(module.modules()), _save_to_state_dict=save):
        found: dict[str, Any] = module.state_dict(**to)
    return found


# -- loading -----------------------------------------------------------------------------------------------------------


def through_own(
    module: nn.Module, given: Mapping[str, Any], strict: bool, take: Callable[[Mapping[str, Any]], _IncompatibleKeys]
) -> Any:
    """What a module's own `load_state_dict` gives, which hands torch's, with `super()`, what `take` is called with.

    Raises:
        NotImplementedError: it loads its parts one by one.
    """
    taken = list[Mapping[str, Any]]()

    def listen(part: nn.Module, held: Any, prefix: str, _: Any, __: Any, missing: Any, extra: Any, *___: Any) -> None:
        if part is module:
            taken.append(held)
            names = take(held)
            missing.extend(names.missing_keys)
            extra.extend(names.unexpected_keys)
        elif not prefix:
            _refuse_own(module)

    parts = list(module.modules())
    hooks = [(part, part._load_state_dict_post_hooks) for part in parts]
    try:
        for part, those in hooks:  # called when all is loaded
            part._load_state_dict_post_hooks = type(those)()
        with _answering(parts, _load_from_state_dict=listen):
            result = module.load_state_dict(given, **({} if strict else {"strict": False}))
    finally:
        for part, those in hooks:
            part._load_state_dict_post_hooks = those
    if not taken:
        _refuse_own(module)
    return result


def _refuse_own(module: nn.Module) -> None:
    raise NotImplementedError(
        f"{type(module).__name__}.load_state_dict() loads parts of the model one by one, and nothing was loaded: let it"
        " hand one dictionary for the whole model to super().load_state_dict(), or give such a one to"
        " ShardedModel.load_state_dict"
    )


def before_loading(module: nn.Module, given: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A copy of a state dictionary as the program's hooks, and modules' own `_load_from_state_dict`, make it, outer
    modules' before inner ones'; and names that need not be there, since the latter do without.

    Raises:
        StateMismatch: a hook found something wrong with it.
    """
    found, spared, wrong = dict(given), set[str](), list[str]()
    told = getattr(given, "_metadata", None) or {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix, metadata = f"{path}." if path else "", told.get(path, {})
        if type(part)._load_from_state_dict is not nn.Module._load_from_state_dict:
            spared |= _own_loading(part, prefix, found, metadata, wrong)
            continue
        for hook in part._load_state_dict_pre_hooks.values():
            if getattr(hook, "hook", None) is not refuse_state_dict:
                hook(found, prefix, metadata, True, [], [], wrong)
    if wrong:
        raise StateMismatch(f"state does not fit the model, nothing was loaded: {'; '.join(wrong)}")
    return found, spared


def _own_loading(part: nn.Module, prefix: str, found: dict[str, Any], metadata: Any, wrong: list[str]) -> set[str]:
    """Let a module load what is its own, find out what goes where, and write that into `found` by torch's names.
    Returns its names that it neither found nor missed."""
    inside = [name for name in found if name.startswith(prefix)]
    local = {name: found.pop(name) for name in inside}
    missing, unexpected, errors = list[str](), list[str](), list[str]()
    with receiving(part) as receivers, _answering([part], set_extra_state=lambda *_: None):
        type(part)._load_from_state_dict(part, local, prefix, metadata, True, missing, unexpected, errors)
    own = {prefix + name: receiver for name, receiver in receivers.items()}
    wrong += [each for each in errors if "size mismatch" not in each]  # sizes are told with all others
    for name, value in local.items():
        child = name[len(prefix) :].split(".")[0] in part._modules
        if child or name in own or name in unexpected or name.endswith("_extra_state"):
            found[name] = itself(value)
    found.update({name: receiver.received for name, receiver in own.items() if receiver.received is not None})
    return {name for name in own if name not in found and name not in missing}


def after_loading(part: nn.Module, names: _IncompatibleKeys) -> _IncompatibleKeys:
    """Tell the program's hooks, inner modules' before outer ones', what names one side lacks; they may change that."""
    for child in part._modules.values():
        if child is not None:
            after_loading(child, names)
    for hook in part._load_state_dict_post_hooks.values():
        hook(part, names)
    return names
