"""What a sharded model shows of the module it wraps: as much as if it were the module.

[Note: One set of names] Parameters, buffers and submodules go by the module's own names through the wrapper too, in
`named_parameters()` as in `state_dict()` and `full_weights()`: "0.weight", never "module.0.weight". Attributes and
methods that the wrapper does not have are the module's. Setting one that the module has sets it there; a name that
neither has becomes the wrapper's own. What the engine keeps on the wrapper while it is built is the wrapper's, whatever
the module has under that name: a warning tells where either is.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from harness.fsdp.guards.sharded_twice import answer_other_engines

FORWARD_METHODS = ("generate",)
_NOT_JOINABLE = (
    "a sharded model is not Joinable (torch.distributed.algorithms.join.Join([model]), model.join()), since ranks hold"
    " parts of each other's weights and gradients: have all ranks run the same number of batches, and one that has"
    " no data left run any batch with its loss times 0; grad_divisor says what sums are divided by"
)
_SYNC = "of FSDP2: model.set_model_auto_sync(False) before all microbatches of a step but the last, or model.no_sync()"
_GATHERS = "of FSDP2: hooks gather and release; `with model.unsharded():` has weights whole in between; option prefetch"
OF_OTHERS = {
    "join": _NOT_JOINABLE,
    "join_hook": _NOT_JOINABLE,
    "set_requires_gradient_sync": _SYNC,
    "set_is_last_backward": _SYNC,
    "set_requires_all_reduce": _SYNC,
    "unshard": _GATHERS,
    "reshard": _GATHERS,
    "set_reshard_after_forward": _GATHERS,
    "set_reshard_after_backward": _GATHERS,
    "set_modules_to_forward_prefetch": _GATHERS,
    "set_modules_to_backward_prefetch": _GATHERS,
    "set_gradient_divide_factor": "of FSDP2: grad_divisor of fully_shard",
    "summon_full_params": "of FSDP1: `with model.unsharded():`",
}
"""Methods of torch's engines on their models, and their names here."""
_MARK = "_sharded_by_harness"
_RUNS = "_runs_as_forward"
_PART = "_part_of_sharded"


class ModuleWrapper(nn.Module):
    """A module around another one, which it looks like; see [Note: One set of names].

    Args:
        module: whose attributes, methods and names it has.
    """

    module: nn.Module
    _is_built = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.__dict__["_non_persistent_buffers_set"] = module._non_persistent_buffers_set
        kind: Any = type(self)
        self.__class__ = _holding(kind, *(name for name in _OF_CONTAINERS if hasattr(type(module), name)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.module(*args, **kwargs)
        except Exception:
            raise  # torch calls hooks
        except BaseException:
            self._interrupted()
            raise

    def _interrupted(self) -> None:
        """A forward ended by what torch tells no hook of, as KeyboardInterrupt."""

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_modules", ()):
            return self._modules[name]
        if name.startswith("__") or "module" not in self.__dict__.get("_modules", ()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in OF_OTHERS and not hasattr(self._modules["module"], name):
            raise AttributeError(f"{name}: {OF_OTHERS[name]}")
        return getattr(self._modules["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = not self._is_built or name == "module" or name in self.__dict__ or hasattr(type(self), name)
        if own or not hasattr(self._modules["module"], name):
            super().__setattr__(name, value)
        else:
            setattr(self._modules["module"], name, value)

    def _built(self) -> None:
        twice = sorted(_public_names(self) & _public_names(self.module))
        if twice:
            kind, name = type(self.module).__name__, twice[0]
            warnings.warn(
                f"{kind} and the sharded model around it both have {', '.join(twice)}: model.{name} is the engine's,"
                f" and that of {kind} is model.module.{name}",
                stacklevel=3,
            )
        self._is_built = True

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_children()

    def train(self, mode: bool = True) -> Self:
        """Set the module, and all in it, to training or evaluation."""
        self.training = mode
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self.module.apply(fn)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`to`, `cuda`, `float` and their like: accepted where it changes nothing.

        Raises:
            NotImplementedError: a parameter or buffer would get another dtype, device or memory format.
        """
        for name, held in (*self.named_parameters(), *self.named_buffers()):
            like = torch.zeros((2,) * held.dim(), dtype=held.dtype, device=held.device)
            if fn(like) is not like:
                raise NotImplementedError(
                    f"a sharded model cannot be cast or moved, and {name} is {held.dtype} on {held.device}: give the"
                    " module its dtype before sharding, and its device then or by `device` (with accelerate: prepare"
                    " the data loader alone)"
                )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


def _hung_on_module(name: str) -> Callable[..., Any]:
    def hang(self: ModuleWrapper, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(hook, *args, **kwargs)

    return hang


for _name in (
    *("register_state_dict_pre_hook", "register_state_dict_post_hook", "_register_state_dict_hook"),
    *("register_load_state_dict_pre_hook", "_register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
):
    setattr(ModuleWrapper, _name, _hung_on_module(_name))  # state is the module's, and so are hooks on it


_OF_CONTAINERS = ("__len__", "__iter__", "__contains__", "__getitem__", "__setitem__", "__delitem__", "__reversed__")
"""Methods that Python looks for in classes, and nn.Sequential has: their parts by index or key."""


@cache
def _holding(kind: type, *names: str) -> Any:
    """A wrapper's class with methods of the module's, by names; the class itself where there are none: a wrapper of
    what has no length must have none, as it would be asked for by `if model:`."""
    methods = {name: _of_module(name) for name in names}
    return type(kind)(kind.__name__, (kind,), {"__module__": kind.__module__} | methods) if names else kind


def _of_module(name: str) -> Callable[..., Any]:
    def call(self: ModuleWrapper, *args: Any) -> Any:
        return getattr(self.module, name)(*args)

    return call


def _public_names(module: nn.Module) -> set[str]:
    held = (vars(module), module._modules, module._parameters, module._buffers, *map(vars, type(module).__mro__))
    found = {name for each in held for name in each if not name.startswith("_")}
    return found - _OF_EVERY_MODULE


_OF_EVERY_MODULE = {*vars(nn.Module()), *dir(nn.Module)}


class Engine(Protocol):
    @property
    def is_closed(self) -> bool:
        """True if the engine has let go of the module."""


def mark_sharded(module: nn.Module, engine: Engine) -> None:
    """Remember that a module is sharded, and keep the engine as long as the module is kept.

    Its parts refuse to be copied or pickled, as the engine's hooks on them would be too, and to be wrapped by another
    engine.
    """
    module.__dict__[_MARK] = engine
    for path, each in module.named_modules():
        each.__dict__["__reduce_ex__"] = refuse_copy
        each.__dict__[_PART] = weakref.ref(engine), path
    answer_other_engines(module, partial(_kept, weakref.ref(engine)))


def engine_s_names(part: nn.Module) -> dict[str, Any]:
    """Attributes set by the engine in the dictionary of a part of a sharded module."""
    names = (_MARK, _PART, "__reduce_ex__", "named_modules", "zero_grad")
    return {n: v for n, v in vars(part).items() if n in names or getattr(v, _RUNS, False)}


def part_of(module: nn.Module) -> Engine | None:
    """The engine of the sharded model that a module is a part of, unless that was closed."""
    reference, _ = module.__dict__.get(_PART, (None, ""))
    return None if reference is None else _kept(reference)


def _kept(reference: weakref.ref[Engine]) -> Engine | None:
    engine = reference()
    return None if engine is None or engine.is_closed else engine


def register_forward_method(module: nn.Module, name: str, run: Callable[..., Any]) -> None:
    """Replace a method, on the instance, by a call of `run` with it: "path.to.submodule.method".

    Raises:
        ValueError: there is no such method.
    """
    path, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{name!r}: {error}") from None
    method = getattr(type(owner), last, None)
    if not callable(method):
        raise ValueError(f"{type(owner).__name__} has no method {last!r} to run as a forward")
    owner.__dict__[last] = _as_forward(weakref.ref(owner), method, weakref.WeakMethod(run))


def _as_forward(owner: weakref.ref[nn.Module], method: Callable[..., Any], run: Any) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        engine = run()
        return method(owner(), *args, **kwargs) if engine is None else engine(method, owner(), *args, **kwargs)

    setattr(call, _RUNS, True)
    return call


def is_sharded(module: nn.Module) -> bool:
    return _MARK in module.__dict__


def refuse_copy(*_: Any) -> None:
    """Raise TypeError: instead of copy.deepcopy() and pickle."""
    raise TypeError(
        "a part of a sharded model cannot be copied, and no sharded model can be pickled (torch.save(model)): hooks,"
        " collectives and flat storage are one of a kind. Copy the sharded model itself, by copy.deepcopy(model) on all"
        " ranks; save its state_dict() or full_weights()"
    )
