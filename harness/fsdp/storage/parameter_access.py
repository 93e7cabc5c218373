"""What a parameter lets the program do with it, by where its weights are.

[Note: The class of a parameter] The engine sets `param.__class__`; the object, and all that hold it, stay. *Free*: the
class it came with, while a forward or a backward runs and its weights are whole; nothing is in torch's way. *Resting*:
whole between forwards and backwards; its `data` counts edits as the parameter itself does, and what is assigned to it
is copied in, so that no edit is lost without a word. *Released*: this rank holds a part of it only. What can be told
without its values (shape, dtype, gradient, hooks) is; whatever would read or write them raises, also through views.
Only Python sees the class: autograd, hooks and kernels of torch work on a released parameter as on any other. Code of
the engine that handles parameters is marked `by_engine` and sees none of it either.

[Note: Views that are kept] A view of a weight (`p.data`, `p.detach()`, `p.t()`) may be kept longer than the weight is
whole, from `gathered()` say. Its storage is empty then, and what reads it ends the process by a signal. So a parameter
that is whole for a while only is *lent*: as resting, but what it gives of its storage has a class that looks for the
storage before torch does. What a unit's forward leaves in attributes of its modules gets that class, too, in forwards
that are looked at (see `harness.fsdp.guards.lost_edits`).

[Note: Edits right after an update] Where every rank updates a part of weights that are whole between uses, others take
this rank's part while its program goes on from `step()`. An edit in that moment would reach ranks that make it
themselves, and be made twice there. So whoever touches values of a resting parameter waits until all have taken theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from functools import cache, wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from harness.fsdp.storage.metadata import FROM_SHAPE, METADATA
from harness.fsdp.storage.replacing import before_sharding, is_made_parameter, replacer

P = ParamSpec("P")
R = TypeVar("R")

HOME = "_fsdp_home"
"""Attribute of a sharded parameter: its first name and its unit's, for messages."""


_OURS = ("_fsdp_", "get_main_grad", "grad_added_to_main_grad")
"""How attributes begin that the engine sets on parameters."""
SHOWN = "_fsdp_shown"
"""Attribute of a parameter whose storage others take turns in: tells whether it has its weights now."""
GRADIENT = "_fsdp_gradient"
"""Attribute of a trained parameter: what answers for its `.grad` while no forward and no backward runs."""


class GradientAnswer(Protocol):
    """Answers for the `.grad` of one parameter."""

    def read(self, held: Tensor | None) -> Tensor | None:
        """What the program reads; `held` is what torch has."""

    def assign(self, value: Tensor | None) -> None:
        """What the program sets it to."""

    def watched(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What is hung on the parameter in place of a hook that the program wants called with it."""


class Source(Protocol):
    """Whose weights other ranks may still be taking."""

    def wait(self) -> None:
        """Wait until they have."""


BEING_TAKEN: weakref.WeakSet[Source] = weakref.WeakSet()
"""See [Note: Edits right after an update]; empty but for a moment after an update."""


class Access(Enum):
    """What a parameter lets the program do; see [Note: The class of a parameter]."""

    free = "everything, as its own class has it"
    resting = "everything, and edits through `data` are counted"
    lent = "as resting, and views must not outlive its weights"
    released = "what needs no values"

    __hash__ = object.__hash__  # Enum's own is written in Python


class ReleasedWeightError(RuntimeError):
    """An operation would read or write a weight that is not gathered, so that this rank holds only a part of it. The
    message names parameter, unit and operation."""


def class_for(own: type, access: Access) -> type:
    """The class of a parameter that may be used as far as `access` says; it was `own` before it was sharded."""
    return own if access is Access.free else _class(own, access)


_GRAD: Any = Tensor.grad
"""torch's own descriptor. Its functions are taken as they are, for they are called for every parameter, and often."""
grad_of: Callable[[Tensor], Tensor | None] = _GRAD.__get__
"""What torch has as a parameter's `.grad`, whatever its class answers. For functions that are marked `by_engine`."""
put_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""Set what torch has as a parameter's `.grad`, as `grad_of` reads it."""


def by_engine(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function of the engine: parameters of whatever access are plain tensors to it."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return run


@cache
def _class(own: type, access: Access) -> type:
    """A subclass of a parameter's class."""
    base = {Access.released: _Released, Access.lent: _Lent}.get(access, _Resting)
    if base is _Released and issubclass(own, DTensor):
        base = _ReleasedPortion
    name = f"{access.name.capitalize()}{own.__name__}"
    return type(own)(name, (base, own), {"__module__": __name__, "_own": own})


def is_guarded(param: Tensor) -> bool:
    """Whether a parameter has a class of the engine's now."""
    return isinstance(param, _Guarded)


def _param(guarded: _Guarded) -> nn.Parameter:
    """The parameter whose class `guarded` has part in."""
    return cast(nn.Parameter, guarded)


class _Guarded:
    """A parameter whose gradient lies elsewhere than in `.grad`."""

    _own: Any
    """The class it came with."""

    @property
    @by_engine
    def grad(self) -> Tensor | None:
        """None where no gradient has come; raises where one has."""
        held = grad_of(_param(self))
        answer: GradientAnswer | None = getattr(self, GRADIENT, None)
        return held if answer is None else answer.read(held)

    @grad.setter
    @by_engine
    def grad(self, value: Tensor | None) -> None:
        answer: GradientAnswer | None = getattr(self, GRADIENT, None)
        if answer is not None:
            answer.assign(value)
        if answer is None or value is None:
            put_grad(_param(self), value)

    def detach(self) -> Tensor:
        """As torch has it.

        Raises:
            RuntimeError: it is made another parameter of.
        """
        if is_made_parameter(1):
            raise RuntimeError(before_sharding(_called(self), replacer()))
        return Tensor.detach(_param(self))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any]) -> Any:
        """As torch has it; see `harness.fsdp.runtime.program_hooks`."""
        answer: GradientAnswer | None = getattr(self, GRADIENT, None)
        hung = hook if answer is None else answer.watched(hook)
        return Tensor.register_post_accumulate_grad_hook(_param(self), hung)  # type: ignore[no-untyped-call] # torch's


# -- whole, and nobody is computing ------------------------------------------------------------------------------------


class _Resting(_Guarded):
    """A parameter whose `data` shares its version counter."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch does, when it may be done; see [Note: Edits right after an update]."""
        if any(issubclass(each, _Released | GatheredView) for each in types):
            return NotImplemented  # theirs to refuse
        with torch._C.DisableTorchFunctionSubclass():
            if func not in METADATA:
                for source in list(BEING_TAKEN):
                    source.wait()
            return func(*args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:
        """The values, which may be edited in place."""
        return _param(self).detach()

    @data.setter
    def data(self, given: Tensor) -> None:
        """Copy values in.

        Raises:
            RuntimeError: they have another shape or dtype, or lie elsewhere.
        """
        held = self.data
        if (given.shape, given.dtype, given.device) != (held.shape, held.dtype, held.device):
            raise RuntimeError(
                f"{_called(self)} was given .data of shape {tuple(given.shape)}, {given.dtype}, {given.device}; it is"
                f" sharded with shape {tuple(held.shape)}, {held.dtype}, {held.device}, and keeps these: change them"
                " before sharding"
            )
        held.copy_(given)

    def __repr__(self) -> str:
        shown = self.data.requires_grad_(_param(self).requires_grad)
        return f"{type(self)._own.__name__} containing:\n{shown!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A parameter of its own class, which no engine knows."""
        if id(self) not in memo:
            memo[id(self)] = _plain(self, self.data.clone())
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, and copied by `copy.copy`, as torch does it, with what the program keeps on it alone."""
        plain = _plain(self, self.data)
        vars(plain).update({name: value for name, value in vars(self).items() if not name.startswith(_OURS)})
        return plain.__reduce_ex__(protocol)


def _plain(guarded: _Guarded, values: Tensor) -> Any:
    """A parameter that no engine knows."""
    made: Any = torch.Tensor._make_subclass(type(guarded)._own, values, _param(guarded).requires_grad)
    return made


# -- whole for a while -------------------------------------------------------------------------------------------------


class GatheredView(Tensor):
    """A view of a weight that is whole for a while; see [Note: Views that are kept]."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch does, while there is storage.

        Raises:
            ReleasedWeightError: there is none.
        """
        if any(issubclass(each, _Released) for each in types):
            return NotImplemented  # theirs to refuse
        with torch._C.DisableTorchFunctionSubclass():
            views = [each for each in tree_leaves((args, kwargs)) if isinstance(each, GatheredView)]
            if func not in METADATA:
                for each in views:
                    each._check(resolve_name(func) or func.__name__)
            found = func(*args, **(kwargs or {}))
            return _watched(found, views[0]) if views else found

    def _check(self, by: str) -> None:
        shown = getattr(self, SHOWN, None)
        if self.numel() and (not self.untyped_storage().nbytes() or (shown is not None and not shown())):
            raise ReleasedWeightError(
                f"a view of {_called(self)} (p.data, p.detach(), p.t(), a slice) is used by {by} after the weights it"
                " shows were released: it was kept from a forward, or from gathered(). Keep a copy, p.detach().clone();"
                " or read it inside `with model.gathered():`, on all ranks"
            )

    @by_engine
    def _as_plain(self, by: str) -> Tensor:
        self._check(by)
        return self.as_subclass(Tensor)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override] # torch leaves it untyped
        return repr(self._as_plain("repr"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A tensor of its own, which no engine knows."""
        if id(self) not in memo:
            memo[id(self)] = self._as_plain("copy.deepcopy").clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_plain("pickling (torch.save)").__reduce_ex__(protocol)


def _watched(found: Any, source: Any) -> Any:
    """What torch gave, with views of the storage of `source` among it watched."""
    place = source.untyped_storage()._cdata
    for each in found if isinstance(found, list | tuple) else (found,):
        if type(each) is Tensor and each.layout is torch.strided and each.untyped_storage()._cdata == place:
            watch_view(each, source)
    return found


def watch_view(view: Tensor, source: Tensor) -> None:
    """Refuse a view once the storage is gone that it shares with `source`, a parameter or a view of one."""
    view.__class__ = GatheredView
    for name in (HOME, SHOWN):
        setattr(view, name, getattr(source, name, None))


class _Lent(_Resting):
    """A resting parameter of which this rank holds a part only, otherwise."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        lent = next((each for each in args if isinstance(each, _Lent)), None)
        if lent is None or func in METADATA or found is NotImplemented or isinstance(lent, DTensor):
            return found
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_grad_enabled() and _param(lent).requires_grad:
                _watch_backward(found, lent, resolve_name(func) or func.__name__)
            return _watched(found, lent)


def _watch_backward(found: Any, lent: Any, by: str) -> None:
    """Refuse to differentiate, once its weights are released, what a function made of a parameter that was whole."""

    def check(_: Any) -> None:
        if isinstance(lent, _Released):
            raise ReleasedWeightError(
                f"{_called(lent)} was used by {by} inside `with model.gathered():`, and the backward through that runs"
                " after its weights were released: call backward() inside the body too"
            )

    for each in found if isinstance(found, list | tuple) else (found,):
        if isinstance(each, Tensor) and each.grad_fn is not None:
            each.grad_fn.register_prehook(check)


# -- released ----------------------------------------------------------------------------------------------------------


_STAND_INS = frozenset([Tensor.data.__get__, Tensor.detach])  # type: ignore[attr-defined] # a descriptor of C
"""What gives another tensor of the same values."""


class _Released(_Guarded):
    """A tensor whose values must not be used."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Tell what needs no values.

        Raises:
            ReleasedWeightError: for all the rest.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA:
                return func(*args, **(kwargs or {}))
            if func in FROM_SHAPE:
                return func(torch.empty(args[0].shape, device="meta"), *args[1:], **(kwargs or {}))
            if func in _STAND_INS:
                return _stand_in(args[0])
        raise ReleasedWeightError(_refusal(_first_released([args, kwargs]), resolve_name(func) or func.__name__))

    def __repr__(self) -> str:
        shape, dtype = tuple(_param(self).shape), _param(self).dtype
        return f"{type(self).__name__}({_called(self)}, shape {shape}, {dtype}, weights not gathered)"

    __str__ = __repr__

    def __format__(self, _: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ReleasedWeightError(_refusal(self, "copy.deepcopy"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ReleasedWeightError(_refusal(self, "pickling (torch.save)"))


class _ReleasedPortion(_Released):
    """A DTensor of a plan of tensor parallelism whose values must not be used: it has more ways to them."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ReleasedWeightError(_refusal(self, "a method of DTensor"))

    to_local = full_tensor = redistribute = _refuse


def _stand_in(released: Tensor) -> Tensor:
    """What `data` and `detach()` give: as little of its values."""
    made = released.detach()
    made.__class__ = _class(Tensor, Access.released)
    setattr(made, HOME, getattr(released, HOME, None))
    return made


def _first_released(values: Any) -> Any:
    """The released tensor among arguments, lists of them included."""
    found = None
    if isinstance(values, _Released):
        return values
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        found = next((each for each in map(_first_released, values) if each is not None), None)
    return found


def _called(param: Any) -> str:
    name, unit = getattr(param, HOME, None) or ("?", "?")
    return f"parameter {name} of unit {unit}"


def refuse_replacing(param: Any) -> None:
    """Raise where one of torch's functions takes a sharded parameter away from its module, or under another name there:
    ReleasedWeightError where it is released, else RuntimeError."""
    if is_guarded(param) and (by := replacer()):
        kind = ReleasedWeightError if isinstance(param, _Released) else RuntimeError
        raise kind(before_sharding(_called(param), by))


def _refusal(param: Any, by: str) -> str:
    if replacing := replacer():
        return before_sharding(_called(param), replacing)
    return (
        f"{_called(param)} is used by {by} while its weights are not gathered: outside the forward and the backward of"
        " its unit this rank holds a part of them only. Read or edit them inside `with model.gathered():`, on all"
        " ranks; call modules themselves, not their .forward; a method that runs modules must be one the engine knows,"
        " model.register_forward_methods(name); and where one module's forward uses the weight of another (as attention"
        " may do with its projections), let the one that uses it be the unit"
    )
