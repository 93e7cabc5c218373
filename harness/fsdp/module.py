"""The mix-in on the class of a sharded module.

A sharded module has a class that inherits `FSDPModule` and the module's own class, as under torch's FSDP2. Names of
parameters, buffers and submodules, attributes, hooks and `isinstance` are the module's as before. The engine is one
entry of the module's `__dict__`, which `model.engine` gives where the module has no `engine` of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.fsdp.build import Engine, engine_of
from harness.fsdp.sharding import copied, register_forward_method
from harness.fsdp.storage.at_rest import sharded_of
from harness.fsdp.storage.dtensors import as_target, refuse_split_experts
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import HOME, check_names
from harness.fsdp.update import norms

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"  # attribute that DDP reads of the module it is given


@contextmanager
def _syncing(engine: Engine, *, value: bool) -> Iterator[None]:
    before, engine.step.sync = engine.step.sync, value
    try:
        yield
    finally:
        engine.step.sync = before


class FSDPModule(nn.Module):
    """A module whose weights, gradients and optimizer state are split over ranks."""

    _own_class: ClassVar[type[nn.Module]]
    engine: Engine

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An ordinary module of the own class, for containers that make others of theirs (`model[:2]`)."""
        made = cls._own_class.__new__(cls._own_class, *args, **kwargs)
        made.__init__(*args, **kwargs)  # type: ignore[misc] # as `type` would, for its class is another one
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; after an interrupt, of which torch calls no hook, the engine is outside a forward again."""
        try:
            return super().__call__(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            engine_of(self).hooks.break_off()
            raise

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            engine = engine_of(self)
            # `module` for one version; the last so that accelerate adds no DDP
            here = {"engine": engine, "module": self, "_is_accelerate_prepared": not engine.is_closed}
            if name in here:
                return here[name]
            if name == IGNORED_BY_DDP and not engine.is_closed:
                raise ValueError(
                    "DistributedDataParallel around a model, or a part of one, that is sharded already would reduce its"
                    " gradients twice. Leave it out; of a larger model, shard the outermost module"
                ) from None
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPModule:
        """A model that is sharded alike, has equal weights and buffers, trains apart and shares nothing; gradients and
        optimizers are not copied. *Collective.*

        Raises:
            NotImplementedError: parameters are TP shards of a tensor-parallel plan, or kept in 8 bits.
        """
        return cast(FSDPModule, copied(self, memo))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters; after a backward that raised, the sharded ones."""
        engine_of(self).hooks.recover()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`to`, `cuda`, `float` and their like: accepted where they change nothing.

        Raises:
            NotImplementedError: a parameter or buffer would get another dtype, device or memory format.
        """
        for name, held in (*self.named_parameters(), *self.named_buffers()):
            like = torch.zeros((2,) * held.dim(), dtype=held.dtype, device=held.device)
            made = fn(like)
            on_cpu = made.device.type == "cpu" == like.device.type  # `cpu:0` is `cpu`
            if made is not like and not (on_cpu and made.dtype is like.dtype and made.stride() == like.stride()):
                raise NotImplementedError(
                    f"a sharded model cannot be cast or moved, and {name} is {held.dtype} on {held.device}: do so"
                    " before"
                )
        return self

    # -- microbatches ----------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Context: backwards inside it accumulate gradients; the first backward outside ends the step's accumulation.

        `no_shard` and `optim` then communicate once per step. `optim_grads` and `optim_grads_params` still reduce every
        microbatch over the inner axis; over the outer axis once per step."""
        return _syncing(engine_of(self), value=False)

    def sync(self) -> AbstractContextManager[None]:
        """Context: a backward inside it ends the accumulation, whatever `set_model_auto_sync` was set to."""
        return _syncing(engine_of(self), value=True)

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Set if a backward outside `no_sync` and `sync` ends the step's accumulation."""
        engine_of(self).step.sync = sync_model

    # -- a step ----------------------------------------------------------------------------------------------------

    def finish_grad_sync(self) -> None:
        """Wait for the step's reductions and scale the gradients. A second call does nothing. *Collective.*

        Raises:
            StepError: the step's last backward ran inside no_sync(), so gradients were never reduced; or it raised, so
                they are incomplete; or this is called inside a backward.
            FloatingPointError: with `report_nan_in_param_grad`, a gradient of any rank is not finite.
            OverflowError: under numerics=exact, one is beyond the range.
        """
        engine_of(self).gradients.finish()

    def grad_norm(self) -> float:
        """Euclidean norm of the step's gradient over all ranks, each parameter counted once. *Collective.*"""
        return float(_gradient_norm(engine_of(self)))

    def weight_norm(self) -> float:
        """Euclidean norm of all main weights over all ranks, each parameter counted once. *Collective.*"""
        engine = engine_of(self)
        engine.weights.wait()
        return float(norms.weight_norm(engine.buckets, engine.meshes.everyone, engine.options.numerics))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale gradients down to `max_norm` if their norm exceeds it. Returns the norm before clipping, as torch's
        function does: an fp64 tensor of shape [] on the model's device. On CUDA the host waits when the norm is read,
        not here, unless `numerics` or `error_if_nonfinite` require it or the gradients are on the host. *Collective.*

        Raises:
            ValueError: another `norm_type`.
            RuntimeError: `error_if_nonfinite` is set and the norm is not finite; gradients are unchanged.
        """
        if norm_type == math.inf:  # torch's, which has the same bits in any order
            engine_of(self).gradients.finish()
            largest: Any = nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
            return cast(Tensor, largest.full_tensor() if isinstance(largest, DTensor) else largest).double()
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} is not built: use torch.nn.utils.clip_grad_norm_")
        norm = _gradient_norm(engine_of(self))
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient's norm is {float(norm)}: nothing was clipped. zero_grad() forgets the step;"
                " report_nan_in_param_grad=True names the tensor"
            )
        norms.clip_gradients(engine_of(self).buckets, norm, float(max_norm))
        return norm

    def install_weights(self) -> None:
        """Copy updated main weights into the compute weights; gathered weights are dropped. *Collective.* A backward
        of an earlier forward is refused then. RuntimeError: compute weights were edited, which would be overwritten."""
        engine_of(self).weights.install()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop main and local gradients. Storage does not depend on `set_to_none`. With False, a parameter that had a
        gradient in the step then has a gradient of zeros, so that decay and momentum keep changing it.

        Raises:
            StepError: a RuntimeError: inside a backward.
        """
        engine_of(self).gradients.forget(set_to_none=set_to_none)

    def register_forward_methods(self, *names: str) -> None:
        """Gather weights for methods other than `forward`; "encoder.embed" names one of a submodule. `generate` is
        registered by default.

        Each call is *collective*: all ranks must call it, and must run the same units in it equally often.

        Raises:
            AttributeError: the module has no such method.
        """
        for name in names:
            register_forward_method(self, name)

    def unsharded(self, wanted: nn.Module | None = None) -> AbstractContextManager[None]:
        """Context with gathered weights, in their compute dtype, to be read or edited in place. wanted: the model, or
        a module of it; None is the whole model. *Collective.*

        Edits, the same on all ranks, take effect when the body ends, under every strategy. Nothing is sent under
        `no_shard`, `optim` and `optim_grads`, but what an update left to install. ValueError: `wanted` is not part of
        the model, or double_buffer has no room for so many units. RuntimeError: inside a forward or backward, or a
        module or parameter was replaced in the body. ReplicaDrift: ranks made different edits."""
        return engine_of(self).weights.unsharded(wanted)

    # -- state -----------------------------------------------------------------------------------------------------

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole main weight of each parameter, on the CPU. *Collective*: exhaust it on all ranks."""
        engine = engine_of(self)
        engine.settle()
        return _unsharded(self, engine.buckets, lambda bucket: bucket.main_shards, "weights")

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole finished gradient of each parameter, on the CPU. *Collective*: exhaust it on all ranks."""
        trained = engine_of(self).gradients.collect()
        check_names(self)
        return _unsharded(self, trained, lambda bucket: bucket.grad_shards, "gradients")

    def state_dict(  # type: ignore[override] # torch's has overloads for destinations
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Main weights as DTensors that share the engine's memory, buffers with the first rank's values, and the
        results of `get_extra_state`, under torch's names. *Collective.*

        Args:
            destination: dictionary that gets the entries and is returned; None: a new one.
            prefix: prefix of the names. keep_vars: has no effect; tensors are always detached.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
        """
        own, engine = cast(Any, super()), engine_of(self)
        engine.settle()
        refuse_split_experts(engine.buckets)
        to = {"destination": destination, "prefix": prefix} if destination is not None or prefix else {}
        found: dict[str, Any] = own.state_dict(keep_vars=True, **to)
        buffers = {id(each) for each in self.buffers()}
        for name, entry in found.items():
            if id(entry) in buffers:
                found[name] = engine.meshes.everyone.from_first(entry, f"saved {name}").clone()
            elif isinstance(entry, Tensor):
                found[name] = sharded_of(entry).detach()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights and buffers, given as whole tensors or DTensors by the names of `state_dict`. They take effect
        in the next forward. As in torch, gradients are kept, and missing and unexpected names returned. *Collective.*

        Raises:
            RuntimeError: as torch: with `strict` a name is missing or unexpected; or a shape differs. What fits was
                loaded.
            ValueError: `assign` is set, which would replace the storage.
        """
        if assign:
            raise ValueError("assign=True would replace flat storage that optimizer and collectives use: load in place")
        own, engine = cast(Any, super()), engine_of(self)
        engine.weights.refuse_held()
        engine.settle()
        in_use = [bucket for bucket in engine.buckets if bucket.sharded().shows_unsharded]
        for bucket in engine.buckets:
            bucket.show(unsharded=False)
        try:
            held = own.state_dict(keep_vars=True)
            values = {
                name: as_target(value, sharded_of(held.get(name)))
                for name, value in _with_tied(state_dict, held).items()
            }
            return own.load_state_dict(values, **({} if strict else {"strict": False}))
        finally:
            for bucket in in_use:
                bucket.use()

    def sharded_state(self) -> Any:
        """Weights and optimizer state by the module's own names, sharing the engine's memory; to be loaded into any
        layout.

        Keys are `weights/<parameter>` (main weights; compute weights of frozen parameters) and
        `optimizer/<parameter>/<entry>`. Tensors with the parameter's shape are DTensors, plain ones where nothing cuts
        them; counters such as `step` are plain tensors of shape [], one a parameter.

        Values written into it take effect in the next forward and update; gradients are kept. An optimizer that has not
        taken a step has no state yet; `harness.fsdp.create_state` creates it. NotImplementedError: ranks hold different
        experts under one name; or an optimizer keeps something else than tensors."""
        engine = engine_of(self)
        for each in engine.local_steps:
            each.take_state()
        engine.settle()
        refuse_split_experts(engine.buckets)
        return {  # views that share the version, by which a forward knows that it must install
            f"weights/{name}": bucket.sharded().view(index, bucket.main_shards)
            for bucket in engine.buckets
            for index, (name, _) in enumerate(bucket.params)
        } | optimizer_entries(engine.buckets, [each.optimizer for each in engine.local_steps])

    def close(self) -> None:
        """See `harness.fsdp.build.Engine.close`."""
        engine_of(self).close()


def optimizer_entries(buckets: Sequence[ParamGroup], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """State of sharded parameters by `optimizer/<parameter>/<entry>`, not copied. Raises NotImplementedError: an
    optimizer keeps something else than tensors."""
    owner = {id(param): each for each in optimizers for group in each.param_groups for param in group["params"]}
    pairs = [pair for each in buckets for pair in zip(each.layout.slots, each.sharded().params, strict=True)]
    found = {}
    for slot, param in (pair for pair in pairs if id(pair[1]) in owner):
        for entry, value in (owner[id(param)].state.get(param) or {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer/{slot.spec.name}/{entry}"] = value.detach()
            elif value is not None:
                raise NotImplementedError(
                    f"{type(owner[id(param)]).__name__} keeps {entry} of {slot.spec.name} as a {type(value).__name__}:"
                    " state by name has tensors alone. Keep a tensor of shape [], or use optimizer.state_dict()"
                )
    return found


def _unsharded(
    module: nn.Module, buckets: Sequence[ParamGroup], shards_of: Callable[[ParamGroup], list[Tensor]], what: str
) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of each parameter, on the CPU, in the module's order. *Collective*."""
    present = {name for bucket in buckets for name, _ in bucket.params}
    homes = (getattr(param, HOME)[0] for _, param in module.named_parameters())
    order = [name for name in homes if name in present]
    early: dict[str, Tensor] = {}
    for bucket in buckets:
        group = None if bucket.tp is None else bucket.tp.group
        slices = bucket.named_slices(bucket.gather_whole(shards_of(bucket), what))
        for slot, (name, view) in zip(bucket.layout.slots, slices, strict=True):
            early[name] = bucket.tp_shard_of(slot).join(view.detach(), group).to("cpu", copy=True)
            while order and order[0] in early:
                yield order[0], early.pop(order.pop(0))


def _with_tied(given: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, those of tied weights by each of their names."""
    by_entry = {id(held[name]): value for name, value in given.items() if name in held}
    missing = ((name, id(entry)) for name, entry in held.items() if name not in given)
    return {**given, **{name: by_entry[entry] for name, entry in missing if entry in by_entry}}


def _gradient_norm(engine: Engine) -> Tensor:
    return norms.gradient_norm(engine.gradients.collect(), engine.meshes.everyone, engine.options.numerics)
