"""Sharded parameters: DTensors over this rank's rows of the main weights.

A module's slots (`module._parameters`) hold sharded parameters between passes. From a unit's pre-forward to its reshard
they hold unsharded ones, views of the compute weights. Each is one object for the life of the model. Hooks, and
gradients during a backward, are the unsharded one's. Where every rank keeps all main weights and computes with them
(`no_shard`), both are one object.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import cache
from sys import getrefcount
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import resolve_name

from harness.fsdp.ragged import RaggedTensor
from harness.fsdp.ragged.tensor import BEFORE_WRITE, copied_data, set_apart
from harness.fsdp.storage.dtensors import DTensorFactory, PortionGradient
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import (
    HOME,
    SHARDED,
    WATCH,
    ModuleSlot,
    by_engine,
    grad_of,
    is_metadata,
    put_grad,
)
from harness.fsdp.tensor_parallel import edits_of, values_here
from harness.private_torch import (
    foreach_types,
    local_tensor,
    put_local_tensor,
    put_spec,
    references_to,
    spec_of,
    tree_leaves,
    tree_map_only,
    version_of,
    without_torch_function,
)

LOCATION = "_fsdp_location"  # attribute of a sharded parameter: weakly its `ShardedParameters`; its index there
(_UNKEPT,) = [getrefcount(held) for _, held in enumerate([object()])]  # of what only the list being iterated holds


class _Hooked:
    def _unsharded(self) -> Any:
        place = location_of(cast(Tensor, self))
        return self if place is None else place[0].unsharded[place[1]]

    @property
    def grad(self) -> Tensor | None:
        with without_torch_function():
            return grad_of(cast(Tensor, self))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        place = location_of(cast(Tensor, self)) if value is None else None
        if place is not None and (sync := place[0].sync()) is not None:
            sync.forget_one(place[0].bucket, place[1])
        with without_torch_function():
            put_grad(cast(Tensor, self), value)

    @by_engine
    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Called once a backward with this rank's own gradient, unreduced."""
        return Tensor.register_hook(self._unsharded(), hook)  # type: ignore[no-untyped-call] # torch's

    @by_engine
    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Called with the unsharded parameter, once a backward's gradient has come; it must not write to it."""
        param = self._unsharded()
        return getattr(param, WATCH, Tensor.register_post_accumulate_grad_hook)(param, hook)


class ShardedParameter(_Hooked, RaggedTensor):
    pass


class PortionAtRest(_Hooked, DTensor):
    pass


class MainWeight(_Hooked, nn.Parameter):
    """A main weight that every rank has unsharded: all edits are counted, and `data` is copied."""

    data = copied_data(lambda held: getattr(held, HOME, ("a parameter",))[0])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fused kernels of optimizers leave version counters as they are. What others may still read, as the root's
        part after a forward, is not touched before. A gradient of this rank's data would be reduced by nobody."""
        with without_torch_function():
            given, alone = () if is_metadata(func) else tree_leaves((args, kwargs)), list[Tensor]()
            for each in (each for each in given if isinstance(each, MainWeight)):
                if (place := location_of(sharded_of(each))) is None:
                    continue
                if place[0].bucket.is_resident:
                    place[0].before_write()
                if place[0].unsharded[place[1]] is not each:
                    alone.append(each)
            if func.__name__.startswith("_fused_"):
                torch.autograd.graph.increment_version(args[0])
            return _watched(func, args, kwargs or {}, alone)


class OfWeight(Tensor):
    """A view or a cast of a main weight, of which a product with data would be as wrong."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            given = () if is_metadata(func) else tree_leaves((args, kwargs))
            return _watched(func, args, kwargs or {}, [each for each in given if isinstance(each, OfWeight)])


def _watched(func: Any, args: Any, kwargs: Any, weights: Sequence[Tensor]) -> Any:
    """Results of a function of main weights and their like. Raises where it has met data of this rank: in a product,
    or as a plain tensor of another shape."""
    made = func(*args, **kwargs)
    of = [each for each in weights if each.requires_grad] if torch.is_grad_enabled() else []
    if not of or not any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(made)):
        return made
    for weight in of:
        _refuse_data(func, weight, tree_leaves((args, kwargs)))
    places = {each.untyped_storage().data_ptr() for each in of}

    def marked(found: Tensor) -> Tensor:
        is_like_it = found.numel() == of[0].numel() or found.untyped_storage().data_ptr() in places
        if not is_like_it or not found.requires_grad or isinstance(found, nn.Parameter):
            return found
        one = found.as_subclass(OfWeight)
        setattr(one, HOME, getattr(of[0], HOME, ("a parameter",)))
        return one

    return tree_map_only(Tensor, marked, made)


def _refuse_data(func: Callable[..., Any], weight: Tensor, given: Sequence[Any]) -> None:
    plain = (each for each in given if isinstance(each, Tensor) and not isinstance(each, nn.Parameter | OfWeight))
    for other in (each for each in plain if func in PRODUCTS or (each.numel() > 1 and each.shape != weight.shape)):
        name = getattr(weight, HOME, ("a parameter",))[0]
        raise RuntimeError(
            f"a tensor of shape {[*other.shape]} meets the main weight {name} outside of its unit's forward, where no"
            " rank would reduce the gradient: call the model, make the module a unit (unit_modules), or do it inside"
            " `with torch.no_grad():`"
        )


PRODUCTS = (
    *(nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm),
    *(torch.einsum, torch.inner, torch.tensordot, torch.addmm, torch.mv),
)


class Superseded:
    """An unsharded parameter between passes: whoever kept it gets no gradient of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            if is_metadata(func) and func != grad_of:
                return func(*args, **(kwargs or {}))
        kept = next((each for each in tree_leaves((args, kwargs)) if isinstance(each, Superseded)), None)
        name, unit = getattr(kept, HOME, ("?", "?"))
        raise RuntimeError(
            f"parameter {name} of unit {unit} was kept from before sharding, or from a forward, and is used by"
            f" {resolve_name(func) or func.__name__}: the module holds another one now. Pass an optimizer that was"
            " built before to fully_shard_optimizer(model, optimizer), or build it after sharding; take parameters from"
            " model.parameters(); read whole weights inside `with model.unsharded():`; where one unit uses another's"
            " weight, make both one unit"
        )


@cache
def counting(own: Any) -> type:
    if own is nn.Parameter:
        return MainWeight
    return cast(type, own) if issubclass(own, DTensor | MainWeight) else _mixed_with(MainWeight, own)


@cache
def _mixed_with(kind: type, own: Any) -> type:
    return cast(type, type(own)(own.__name__, (kind, own), {"__module__": own.__module__}))


for types in foreach_types:
    types += [MainWeight, ShardedParameter, PortionAtRest, PortionGradient]


class ShardedParameters:
    """Sharded parameters of one bucket, and their places in modules.

    Args:
        slots: of each unsharded parameter, by identity.
        before_write: waits until no other rank reads this rank's main weights.
    """

    def __init__(
        self,
        bucket: ParamGroup,
        shards: DTensorFactory,
        slots: dict[int, list[ModuleSlot]],
        before_write: Callable[[], None],
    ) -> None:
        self.bucket, self.before_write, self.shards = bucket, before_write, shards
        self.unsharded = [param for _, param in bucket.params]
        self.params: list[nn.Parameter] = []
        for index, param in enumerate(self.unsharded):
            sharded = self._sharded(index, param)
            self.params.append(sharded)
            setattr(sharded, LOCATION, (weakref.ref(self), index))
            if sharded is not param:
                vars(sharded).update({n: v for n, v in vars(param).items() if n == HOME or not n.startswith("_fsdp_")})
                setattr(param, SHARDED, sharded)
        # with the class that each has while it computes
        self.pairs = [(*pair, type(pair[0])) for pair in zip(self.unsharded, self.params, strict=True)]
        held = [(slot, own, at_rest) for own, at_rest, _ in self.pairs if own is not at_rest for slot in slots[id(own)]]
        self._held = [(slot.held, slot.name, param, sharded) for slot, param, sharded in held if slot.is_plain]
        self._put = [each for each in held if not each[0].is_plain]
        named = zip((name for name, _ in bucket.params), self.params, strict=True)
        self._rows = [(name, each, local_tensor(each)) for name, each in named if isinstance(each, RaggedTensor)]
        # where torch itself counts the edits of all
        self._bare = [] if any(isinstance(param, DTensor) for param in self.unsharded) else self.unsharded
        self.forget_edits()
        self._forget_views()
        self.shows_unsharded = True
        self.sync: Callable[[], Any] = lambda: None

    def _sharded(self, index: int, param: nn.Parameter) -> nn.Parameter:
        rows = self.view(index, self.bucket.main_shards)
        if not isinstance(rows, DTensor) and self.bucket.trainable and self.bucket.computes_with_main_weights:
            return param
        made: Any = nn.Parameter(rows, requires_grad=param.requires_grad)
        made.grad_dtype = None  # main gradients may have another dtype than main weights
        if isinstance(rows, RaggedTensor):
            made.__class__, made.base = ShardedParameter, local_tensor(rows)
            put_local_tensor(made, made.base)
            put_spec(made, spec_of(rows))
            setattr(made.base, BEFORE_WRITE, self.before_write)
        else:
            made.__class__ = PortionAtRest if isinstance(rows, DTensor) else MainWeight
        return cast(nn.Parameter, made)

    def view(self, index: int, flats: Sequence[Tensor]) -> Tensor:
        """This rank's rows in flat tensors laid out as the main weights: a DTensor; plain where nothing cuts it."""
        slot = self.bucket.layout.slots[index]
        return self.shards.rows(self.bucket, slot, flats[slot.segment])

    def show(self, *, unsharded: bool) -> None:
        turns, self.shows_unsharded = unsharded is not self.shows_unsharded, unsharded
        for param, sharded, own in self.pairs:
            if param is sharded:
                param.__class__ = own if unsharded else counting(own)
                continue
            param.__class__ = own
            coming, leaving = (param, sharded) if unsharded else (sharded, param)
            if turns and coming.requires_grad is not leaving.requires_grad:
                coming.requires_grad_(leaving.requires_grad)
            if not unsharded:
                param.__class__ = _mixed_with(Superseded, own)
        for held, name, param, sharded in self._held:
            coming, leaving = (param, sharded) if unsharded else (sharded, param)
            if held.get(name) is leaving:  # else the program has taken it out
                held[name] = coming
        for slot, param, sharded in self._put:
            slot.put(*((param, sharded) if unsharded else (sharded, param)))

    def count_edits(self) -> None:
        for param, _, own in self.pairs:
            param.__class__ = counting(own)

    def flags(self) -> list[bool]:
        return [param.requires_grad for param in (self.unsharded if self.shows_unsharded else self.params)]

    def sync_flags(self) -> None:
        with without_torch_function():
            for param, sharded in zip(self.unsharded, self.params, strict=True):
                if param.requires_grad is not sharded.requires_grad:
                    param.requires_grad_(sharded.requires_grad)

    @by_engine
    def check_untouched(self) -> None:
        """Raise RuntimeError where rows, or unsharded weights, are no longer the engine's."""
        changed = [name for name, param, rows in self._rows if local_tensor(param) is not rows]
        if not changed and not (self._bare and all(map(_is_same, self._bare, self.bucket.views))):
            pairs = zip(self.bucket.params, self.bucket.views, strict=True)
            changed = [name for (name, param), view in pairs if not _is_same(values_here(param), view)]
        if changed:
            raise RuntimeError(
                f"parameter {changed[0]} was changed after sharding: its data is no longer the engine's (cast, moved,"
                " parametrized or swapped); change it before sharding"
            )

    @by_engine
    def forget_edits(self) -> None:
        """Count edits from now on: earlier ones are the engine's own, or main weights have them."""
        self._versions = self._counts()

    def _counts(self) -> list[int]:
        return list(map(version_of, self._bare)) if self._bare else [edits_of(param) for param in self.unsharded]

    def edited(self) -> list[str]:
        """Names of parameters edited in place since `forget_edits`, as far as torch's counters tell."""
        now = self._counts()
        if now == self._versions:
            return []
        return [name for (name, _), was, n in zip(self.bucket.params, self._versions, now, strict=True) if was != n]

    # -- gradients -------------------------------------------------------------------------------------------------

    def _grad(self, index: int) -> Tensor:
        held = self.grads[index]
        if held is None:
            gradients = cast(Gradients, self.bucket.gradients)
            before = references_to(gradients.main_storage)
            held = self.grads[index] = self.view(index, self.bucket.grad_shards)
            if isinstance(held, DTensor) and not isinstance(held, RaggedTensor):
                held.__class__ = PortionGradient
            self._references[index] = references_to(gradients.main_storage) - before
        return held

    def _forget_views(self) -> None:
        self.grads: list[Tensor | None] = [None] * len(self.params)
        self._references = [0] * len(self.params)

    def leave_kept_grads(self, shown: Collection[int] = ()) -> None:
        """Main gradients are written anew: views that the program keeps, and are no `.grad`, get copies.

        shown: parameters whose main gradients are their `.grad`. Raises as `Gradients.renew`.
        """
        gradients = self.bucket.gradients
        if gradients is None or not any(self._references):
            return
        for index, held in enumerate(self.grads):
            if held is not None and getrefcount(held) > _UNKEPT and index not in shown:
                self.grads[index], self._references[index] = None, 0
                set_apart(held)
        if not shown and references_to(gradients.main_storage) > gradients.own_references + sum(self._references):
            gradients.renew()
            self._forget_views()

    def _leave_replaced(self) -> None:
        self.leave_kept_grads([index for index, param in enumerate(self.params) if grad_of(param) is self.grads[index]])

    def install_grads(self, kept: set[int], *, only_kept: bool = False) -> None:
        """Let `.grad` be the main gradient; None where no rank had one, unless it was kept."""
        gradients = self.bucket.gradients
        if gradients is None:
            return
        for index, param in enumerate(self.params):
            none = (only_kept or index in gradients.unused) and index not in kept
            if self.unsharded[index] is not param:
                put_grad(self.unsharded[index], None)  # the next one comes apart from the finished ones
            put_grad(param, None if none else self._grad(index))

    @property
    def with_grads(self) -> set[int]:
        found = set[int]()  # a comprehension would be a call more in each step
        for index, param in enumerate(self.params):
            if grad_of(param) is not None:
                found.add(index)
        return found

    def collect_grads(self) -> set[int]:
        if self.bucket.gradients is None:
            return set()
        self._leave_replaced()
        found = self.with_grads
        for index, param in enumerate(self.params):
            self._take(index)
            if index not in found:
                put_grad(param, None)
        return found

    def take_grad(self, index: int, *, zeros: bool = False) -> None:
        """Copy a gradient that the program has replaced to the main gradient. zeros: None stands for zeros."""
        param = self.params[index]
        given = grad_of(param)
        if self.bucket.gradients is None or (given is None and not (zeros and param.requires_grad)):
            return
        self._leave_replaced()
        self._take(index)

    def _take(self, index: int) -> None:
        param, own = self.params[index], self._grad(index)
        given = grad_of(param)
        if given is None:
            values_here(own).zero_()
        elif given is not own:
            own.copy_(given)
        put_grad(param, own)

    def add_own_grads(self) -> set[int]:
        found = set[int]()
        for index, param in enumerate(self.params if self.bucket.gradients is not None else ()):
            given = grad_of(param) if param is not self.unsharded[index] else None
            if given is not None:
                self._grad(index).add_(given)
                found.add(index)
        return found

    def drop_grads(self) -> None:
        for param in self.params:
            put_grad(param, None)

    def hide_grads(self) -> None:
        for param, sharded, _ in self.pairs:
            if param is sharded:
                put_grad(param, None)


def _is_same(values: Tensor, target: Tensor) -> bool:
    return values.dtype == target.dtype and values.is_set_to(target)


def location_of(param: Tensor) -> tuple[ShardedParameters, int] | None:
    found: Any = getattr(param, LOCATION, None)
    sharded = None if found is None else found[0]()
    return None if sharded is None else (sharded, found[1])


def sharded_of(param: Any) -> Any:
    while (following := getattr(param, SHARDED, None)) is not None:  # what was on meta has another one in between
        param = following
    return param
