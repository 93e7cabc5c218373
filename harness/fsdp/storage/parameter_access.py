"""Parameters of modules: the marks on them, and the slots that hold them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from harness.fsdp.storage.layout import BucketLayout
from harness.private_torch import parameters_of, without_torch_function

P = ParamSpec("P")
R = TypeVar("R")

HOME = "_fsdp_home"  # attribute of a parameter, sharded or not: its first name and its unit's, for messages
SHARDED = "_fsdp_sharded"  # attribute of an unsharded parameter: its sharded one
WATCH = "_fsdp_watch"  # attribute of a trained unsharded parameter: registers a hook of the program on it
CHECKPOINTED = "_checkpoint_wrapped_module."  # which torch's checkpoint_wrapper puts into names of parameters
_GRAD: Any = Tensor.grad  # torch's own descriptor: its functions run for every parameter, and often
grad_of: Callable[[Tensor], Tensor | None] = _GRAD.__get__
put_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__


def by_engine(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function of the engine with `__torch_function__` disabled: parameters of any class are plain tensors."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_torch_function():
            return function(*args, **kwargs)

    return run


DATA = frozenset(["data", "T", "H", "mT", "mH", "real", "imag", "_base", "__cuda_array_interface__"])
READS_NO_VALUES = """size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_signed
    is_inference is_same_size __len__ __hash__ requires_grad_ register_hook register_post_accumulate_grad_hook
    retain_grad new_empty new_zeros new_ones new_full new_tensor empty_like zeros_like ones_like full_like rand_like
    randn_like"""
METADATA = frozenset(
    {getattr(owner, name) for owner in (Tensor, torch) for name in READS_NO_VALUES.split() if hasattr(owner, name)}
    | {torch.autograd.backward, torch.autograd.grad}  # which look at `inputs`, or refuse them, by themselves
)


def is_metadata(func: Any) -> bool:
    """True for a function of torch that reads no values, attributes' descriptors among them."""
    if func in METADATA:
        return True
    return func.__name__ in ("__get__", "__set__") and getattr(func.__self__, "__name__", "data") not in DATA


class ModuleSlot:
    def __init__(self, module: nn.Module, name: str) -> None:
        self.held = parameters_of(module)
        self.name = name
        self.module = weakref.ref(module)
        # recurrent layers hold their parameters twice, and have their own `__setattr__`
        self.is_plain = type(self.held) is dict and getattr(type(module), "__setattr__", None) is nn.Module.__setattr__

    @property
    def param(self) -> nn.Parameter | None:
        return self.held[self.name] if self.name in self.held else None  # noqa: SIM401 # TorchScript's has no `get`

    def put(self, coming: nn.Parameter, leaving: nn.Parameter) -> None:
        if self.param is leaving and (module := self.module()) is not None:
            setattr(module, self.name, coming)
            # a recurrent layer's list of those it has flattened; else it collects its parameters anew
            for held in (each for each in vars(module).values() if type(each) is list):
                for place, each in enumerate(held):
                    if isinstance(each, weakref.ref) and each() is leaving:
                        held[place] = weakref.ref(coming)


def slots_of(module: nn.Module) -> dict[int, list[ModuleSlot]]:
    found: dict[int, list[ModuleSlot]] = {}
    for part in module.modules():
        for name, param in parameters_of(part).items():
            if param is not None:
                found.setdefault(id(param), []).append(ModuleSlot(part, name))
    return found


class Whereabouts:
    """Names and identities of parameters and submodules, as they were when the module was sharded: pruning,
    parametrizations, tied weights and code that writes into `_parameters` change them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(path, weakref.ref(part), _contents(part)) for path, part in module.named_modules()]

    def check(self) -> None:
        for place, (path, reference, had) in enumerate(self._parts):
            if (part := reference()) is not None and (have := _contents(part)) != had:
                check_names(part, path)
                self._parts[place] = path, reference, have


def _contents(part: nn.Module) -> tuple[list[str], list[int], list[int]]:
    params = parameters_of(part)
    held = [id(getattr(param, SHARDED, param)) for param in params.values()]
    return list(params.keys()), held, list(map(id, part.children()))


def check_names(module: nn.Module, path: str = "") -> None:
    """Raise RuntimeError where a parameter has another name than when it was sharded, which its state goes by.

    path: of the module in the model.
    """
    for name, param in module.named_parameters(path):
        home: tuple[str, str] | None = getattr(param, HOME, None)
        if home is None:
            raise RuntimeError(
                f"{name} was added or replaced after sharding: the engine would neither train nor save the new"
                " parameters. Change the module before it is sharded; or write values into the parameters it has,"
                " inside `with model.unsharded():`"
            )
        if home[0].replace(CHECKPOINTED, "") != name.replace(CHECKPOINTED, ""):
            raise RuntimeError(
                f"parameter {home[0]} is called {name} since it was sharded, and its state goes by the first name: tie,"
                " prune, parametrize or rearrange modules before they are sharded; or undo it (prune.remove,"
                " remove_parametrizations) before state is saved or loaded"
            )


def views_of(bucket: Tensor, layout: BucketLayout) -> list[Tensor]:
    first = bucket.storage_offset()
    return [bucket.as_strided(shape, strides, first + begin) for shape, strides, begin in layout.views]
