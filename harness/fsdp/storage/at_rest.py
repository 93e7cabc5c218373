"""Parameters between passes: DTensors over this rank's rows of the main weights.

[Note: Sharded and unsharded parameters] A module's slots (`module._parameters`) hold sharded parameters while no pass
needs them, and unsharded ones, views of the whole compute weights, from a unit's pre-forward to its reshard. Each is
one object for the life of the model. Hooks, and gradients while a backward runs, are the unsharded one's. Where every
rank keeps all main weights and computes with them (`no_shard`), both are one object.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _foreach_supported_types as optimizers_types
from torch.overrides import resolve_name
from torch.utils._foreach_utils import _foreach_supported_types as utils_types
from torch.utils._pytree import tree_leaves

from harness.fsdp.ragged import RaggedTensor
from harness.fsdp.ragged.tensor import BEFORE_WRITE
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.dtensors import DTensorFactory
from harness.fsdp.storage.metadata import METADATA
from harness.fsdp.storage.parameter_access import GRADIENT, HOME, by_engine, grad_of, put_grad
from harness.fsdp.tensor_parallel.parameters import put_data

ENABLED = os.environ.get("HARNESS_FSDP_SHARDED_PARAMETERS") == "1"
"""Private, until this is the only way."""
SHARDED = "_fsdp_sharded"
"""Attribute of an unsharded parameter: the sharded one."""
LOCATION = "_fsdp_location"
"""Attribute of a sharded parameter: its `ShardedParameters` and its index in the bucket."""
_ENGINES = ("_fsdp_", "get_main_grad", "grad_added_to_main_grad")


class _Slot:
    """A place in a module that holds a parameter."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.held = module._parameters
        self.name = name
        plain = getattr(type(module), "__setattr__", None) is nn.Module.__setattr__
        self.module = None if plain else weakref.ref(module)
        """A module with its own `__setattr__`: recurrent layers hold their parameters twice. None for any other."""

    def put(self, param: nn.Parameter) -> None:
        if self.module is None:
            self.held[self.name] = param
        elif (module := self.module()) is not None:
            setattr(module, self.name, param)


class ShardedParameter(RaggedTensor):
    """Rows of a parameter. Hooks are hung on the unsharded one, whose gradient autograd brings."""

    @property
    def _unsharded(self) -> nn.Parameter:
        sharded, index = getattr(self, LOCATION)
        found: nn.Parameter = sharded.unsharded[index]
        return found

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Called once a backward with this rank's own gradient, unreduced."""
        return self._unsharded.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Called with the unsharded parameter, once its gradient of a backward has come."""
        answer: Any = getattr(self._unsharded, GRADIENT, None)
        hung = hook if answer is None else answer.watched(hook)
        return self._unsharded.register_post_accumulate_grad_hook(hung)


class _Superseded:
    """An unsharded parameter while the sharded one stands in its place: whoever kept it has no gradient of it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA:
                return func(*args, **(kwargs or {}))
        kept = next((each for each in tree_leaves((args, kwargs)) if isinstance(each, _Superseded)), None)
        raise RuntimeError(_superseded(kept, resolve_name(func) or func.__name__))

    @property
    def grad(self) -> Tensor | None:
        """Raises RuntimeError."""
        raise RuntimeError(_superseded(self, ".grad, as an optimizer does that was built before sharding"))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        put_grad(cast(nn.Parameter, self), value)


def _superseded(kept: Any, by: str) -> str:
    name, unit = getattr(kept, HOME, ("?", "?"))
    return (
        f"parameter {name} of unit {unit} was kept from before sharding, or from a forward, and is used by {by}: the"
        " module holds another one now. Pass an optimizer that was built before to fully_shard_optimizer(model,"
        " optimizer), or build it after sharding; take parameters from model.parameters(); read whole weights inside"
        " `with model.unsharded():`; where one unit uses another's weight, make both one unit"
    )


@cache
def _superseding(own: type) -> type:
    return type(own)(own.__name__, (_Superseded, own), {"__module__": own.__module__})


class MainWeight(nn.Parameter):
    """A main weight that every rank has whole: all edits are counted, and `data` is copied."""

    @property
    def data(self) -> Tensor:
        """The values without autograd, sharing the version counter."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        with torch.no_grad():
            self.copy_(values)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run as for any parameter; fused kernels of optimizers leave version counters as they are."""
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__.startswith("_fused_"):
                torch.autograd.graph.increment_version(args[0])
            return func(*args, **(kwargs or {}))


@cache
def _whole_at_rest(own: type) -> type:
    """The class of a parameter that every rank has whole and computes with."""
    if own is nn.Parameter:
        return MainWeight
    return type(own)(own.__name__, (MainWeight, own), {"__module__": own.__module__})


for types in (optimizers_types, utils_types):
    types += [MainWeight, ShardedParameter]


class ShardedParameters:
    """Sharded parameters of one bucket, and the slots in which they and the unsharded ones take turns.

    Args:
        slots: of each unsharded parameter, by identity.
        before_write: waits until no other rank reads this rank's main weights.
    """

    def __init__(
        self, bucket: Bucket, shards: DTensorFactory, slots: dict[int, list[_Slot]], before_write: Callable[[], None]
    ) -> None:
        self.bucket = bucket
        self.before_write = before_write
        self.shards = shards
        self.unsharded = [param for _, param in bucket.params]
        self.params: list[nn.Parameter] = []
        for index, param in enumerate(self.unsharded):
            sharded = self._sharded(index, param)
            self.params.append(sharded)
            setattr(sharded, LOCATION, (self, index))
            if sharded is not param:
                vars(sharded).update({n: v for n, v in vars(param).items() if not n.startswith(_ENGINES)})
                setattr(sharded, HOME, getattr(param, HOME))
                setattr(param, SHARDED, sharded)
        apart = [(p, s) for p, s in zip(self.unsharded, self.params, strict=True) if p is not s]
        self._pairs = [(slots[id(param)], param, sharded, type(param)) for param, sharded in apart]
        self._same = [(param, type(param)) for param in self.params if not hasattr(param, SHARDED)]
        self._same = [(p, own) for p, own in self._same if any(p is each for each in self.unsharded)]
        """Parameters that are sharded and unsharded in one."""
        self._locals = [local_of(param) for param in self.params]
        self.grads: list[Tensor | None] = [None] * len(self.params)
        """What `.grad` of each parameter is once a step's gradients are finished: views of main gradients."""
        self.shows_unsharded = True

    def _sharded(self, index: int, param: nn.Parameter) -> nn.Parameter:
        rows = self.view(index, self.bucket.main_shards)
        computes_with_it = self.bucket.trainable and self.bucket.computes_with_main_weights
        if not isinstance(rows, RaggedTensor) and computes_with_it:
            return param
        made = nn.Parameter(rows, requires_grad=param.requires_grad)
        if not isinstance(rows, DTensor):
            made.__class__ = MainWeight
        made.grad_dtype = None  # main gradients may have another dtype than main weights
        if isinstance(rows, RaggedTensor):
            held: Any = made
            held.__class__ = ShardedParameter
            held._local_tensor, held.base = rows._local_tensor, rows._local_tensor
            setattr(rows._local_tensor, BEFORE_WRITE, self.before_write)
        return made

    def view(self, index: int, flats: Sequence[Tensor]) -> Tensor:
        """This rank's rows of a parameter in flat tensors that lie as the main weights do, one a segment: a DTensor;
        plain where nothing cuts it."""
        slot = self.bucket.layout.slots[index]
        return self.shards.rows(self.bucket, slot, flats[slot.segment])

    def view_from(self, index: int, flat: Tensor, begins_at: int) -> Tensor:
        """As `view`, in a flat tensor that begins so many elements into the shard of the parameter's segment."""
        return self.shards.rows(self.bucket, self.bucket.layout.slots[index], flat, begins_at)

    def show(self, *, unsharded: bool) -> None:
        """Put parameters into the modules' slots."""
        if unsharded is self.shows_unsharded:
            return
        self.shows_unsharded = unsharded
        for param, own in self._same:
            param.__class__ = own if unsharded else _whole_at_rest(own)
        for slots, param, sharded, own in self._pairs:
            if unsharded:
                param.__class__ = own
            coming, leaving = (param, sharded) if unsharded else (sharded, param)
            if coming.requires_grad is not leaving.requires_grad:
                coming.requires_grad_(leaving.requires_grad)
            for slot in slots:
                slot.put(coming)
            if not unsharded:
                param.__class__ = _superseding(own)

    def flags(self) -> list[bool]:
        """`requires_grad` of each parameter, as the program has set it."""
        return [param.requires_grad for param in (self.unsharded if self.shows_unsharded else self.params)]

    @by_engine
    def sync_flags(self) -> None:
        """Let unsharded parameters be trained or frozen as the program has set it."""
        for param, flag in zip(self.unsharded, self.flags(), strict=True):
            if param.requires_grad is not flag:
                param.requires_grad_(flag)

    def moved(self) -> None:
        """Main weights lie elsewhere now, maybe in another dtype: sharded parameters follow."""
        self.shards.moved(self.bucket)
        for index, param in enumerate(self.params):
            if param is self.unsharded[index]:
                continue
            rows = self.view(index, self.bucket.main_shards)
            put_data(param, rows)
            held: Any = param
            if isinstance(rows, RaggedTensor):
                held._local_tensor, held._spec, held.base = rows._local_tensor, rows._spec, rows._local_tensor
                setattr(rows._local_tensor, BEFORE_WRITE, self.before_write)
        self._locals = [local_of(param) for param in self.params]
        self.grads = [None] * len(self.params)

    def check(self) -> None:
        """Raise RuntimeError where a sharded parameter was cast or moved after it was made."""
        for param, local, (name, _) in zip(self.params, self._locals, self.bucket.params, strict=True):
            if local_of(param) is not local and param is not self.unsharded[0]:
                raise RuntimeError(
                    f"parameter {name} was changed after sharding: its data is no longer the engine's (cast, moved or"
                    " swapped); change it before sharding"
                )

    # -- gradients -------------------------------------------------------------------------------------------------

    def _grad(self, index: int) -> Tensor:
        held = self.grads[index]
        if held is None:
            held = self.grads[index] = self.view(index, self.bucket.grad_shards)
        return held

    def install_grads(self, kept: set[int], *, only_kept: bool = False) -> None:
        """Let `.grad` be the main gradient; None where no rank had one, unless it was kept from before."""
        gradients = self.bucket.gradients
        if gradients is None:
            return
        for index, param in enumerate(self.params):
            none = (only_kept or index in gradients.unused) and index not in kept
            put_grad(param, None if none else self._grad(index))

    @property
    def with_grads(self) -> set[int]:
        """Parameters whose `.grad` is not None."""
        return {index for index, param in enumerate(self.params) if grad_of(param) is not None}

    def collect_grads(self) -> set[int]:
        """Bring gradients that the program has replaced into the main gradients, zeros for those it has set to None.
        Returns the parameters that have one."""
        found = set[int]()
        for index, param in enumerate(self.params if self.bucket.gradients is not None else ()):
            given, own = grad_of(param), self._grad(index)
            if given is None:
                local_of(own).zero_()
                continue
            found.add(index)
            if given is not own:
                own.copy_(given)
                put_grad(param, own)
        return found

    def take_grad(self, index: int, *, zeros: bool = False) -> None:
        """Bring a gradient that the program has replaced into the main gradient. zeros: let None be zeros."""
        param = self.params[index]
        given = grad_of(param)
        if self.bucket.gradients is None or (given is None and not (zeros and param.requires_grad)):
            return
        own = self._grad(index)
        if given is own:
            return
        if given is None:
            local_of(own).zero_()
        else:
            own.copy_(given)
        put_grad(param, own)

    def drop_grads(self) -> None:
        """Set `.grad` of every parameter to None."""
        for param in self.params:
            put_grad(param, None)


def local_of(param: Tensor) -> Tensor:
    """This rank's rows, plain."""
    held: Any = param
    return held._local_tensor if isinstance(param, RaggedTensor) else param


def sharded_of(param: Tensor) -> Tensor:
    """The sharded parameter that an unsharded one belongs to; any other tensor itself."""
    found: Tensor = getattr(param, SHARDED, param)
    return found


def slots_of(module: nn.Module) -> dict[int, list[_Slot]]:
    """Every place that holds a parameter, by its identity."""
    found: dict[int, list[_Slot]] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append(_Slot(part, name))
    return found
