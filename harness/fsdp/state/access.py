"""The state of a sharded model as its user sees it, whole, by name, or as this rank's own; and how it is taken back."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from harness.fsdp.comm.crossed import Everyone
from harness.fsdp.fp8.linear import Fp8Linear
from harness.fsdp.state import flat, hooks
from harness.fsdp.state.named import ShardedState, ShardMap, check_fit, fill
from harness.fsdp.state.of_parameters import add_optimizers, load_local_state, local_state
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.whereabouts import check_names
from harness.fsdp.update.optimizer import ShardedOptimizer

FP8 = "fp8/"
"""Prefix of what delayed scaling knows."""


class Weights(Protocol):
    """What brings main weights into the compute weights."""

    def wait(self, *, writes: bool = False) -> None:
        """Wait until other ranks have taken this rank's weights, so that these may change; edits of the program count
        from now on. writes: main weights are written next."""

    def install(self) -> None:
        """Make main weights that were written count in the very next forward. *Collective.*"""


class StepGradients(Protocol):
    """What finishes or forgets a step's gradients."""

    def finish(self) -> None:
        """Wait for the step's reductions and scale the gradients, once. *Collective.*"""

    def forget(self, *, set_to_none: bool | None = True) -> None:
        """Forget all gradients of the step. set_to_none=None: what is zero and not none stays so."""


class _Plan(NamedTuple):
    """What is loaded: names, tensors of the model and what is given for them; modules and what they are told; and names
    that one side lacks."""

    tensors: list[tuple[str, Tensor, Tensor]]
    more: list[tuple[nn.Module, Any]]
    names: _IncompatibleKeys


class StateAccess:
    """Hands out the state of one sharded model and takes it back.

    Args:
        module: whose names are the state's.
        buckets: all of the model's.
        weights: waited for before weights are handed out or written, told when they were written.
        gradients: finished before they are handed out, forgotten when a state was taken back whole.
        everyone: all ranks, the first of which has the buffers that count.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        weights: Weights,
        gradients: StepGradients,
        everyone: Everyone,
    ) -> None:
        self.module = module
        self.buckets = buckets
        self.weights = weights
        self.gradients = gradients
        self.everyone = everyone
        self._shards = ShardMap(buckets)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Main weights by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        self._settle()
        return self._in_model_order(flat.full_weights(self.buckets), self.buckets)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Finished gradients by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        self.gradients.finish()
        check_names(self.module)
        trainable = [bucket for bucket in self.buckets if bucket.trainable]
        return self._in_model_order(flat.full_gradients(self.buckets), trainable)

    def local_gradients(self) -> dict[str, Tensor]:
        """This rank's rows of every finished gradient, by parameter name; not copied."""
        self.gradients.finish()
        return dict(flat.local_gradients([bucket for bucket in self.buckets if bucket.trainable]))

    def _settle(self) -> None:
        """Let weights, and their names, be what they are everywhere.

        Raises:
            RuntimeError: the module's parameters have other names by now.
        """
        self.weights.wait(writes=True)  # by whoever is given them
        check_names(self.module)

    def _in_model_order(
        self, named: Iterator[tuple[str, Tensor]], buckets: Sequence[Bucket]
    ) -> Iterator[tuple[str, Tensor]]:
        """Hold back only what comes before its turn, so that little more than a bucket is in memory."""
        present = {name for bucket in buckets for name, _ in bucket.params}
        order = [name for name, _ in self.module.named_parameters() if name in present]
        early: dict[str, Tensor] = {}
        place = 0
        for name, value in named:
            early[name] = value
            while place < len(order) and order[place] in early:
                yield order[place], early.pop(order[place])
                place += 1

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
        """What the module's own `state_dict` gives, with main weights as DTensors over the engine's own memory and
        saved buffers as they are on the first rank; what modules say besides is this rank's. *Collective* where there
        are buffers.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
            RuntimeError: on all ranks: a buffer has another shape or dtype on one of them.
        """
        self._settle()
        held = self._shards.weights(self.buckets)
        first = {id(param): name for name, param in self.module.named_parameters()}
        buffers = {id(each) for each in self.module.buffers()}
        of_rank_0: dict[int, Tensor] = {}
        self._refuse_uneven(first)

        def value_of(name: str, entry: Any) -> Any:
            if id(entry) in first:
                return held[first[id(entry)]]
            if id(entry) not in buffers:
                return entry.detach() if isinstance(entry, Tensor) else entry
            if id(entry) not in of_rank_0:
                of_rank_0[id(entry)] = self.everyone.from_first(entry, f"saved {name}").clone()
            return of_rank_0[id(entry)]

        return hooks.saved(self.module, value_of, destination, prefix)

    def _refuse_uneven(self, params: Container[int]) -> None:
        """Raise RuntimeError where ranks have buffers of other kinds, of which no rank could take the first one's.
        *Collective* where there are any."""
        entries = saved_entries(self.module)
        buffers = [(n, each) for n, each in entries if isinstance(each, Tensor) and id(each) not in params]
        kinds = [f"{name} {each.dtype} {each.layout} {list(each.shape)}" for name, each in buffers]
        if not kinds or self.everyone.size == 1:
            return
        together, counts = self._everyones([_hash("\t".join(kinds)), len(kinds)]).unbind(1)
        if bool((together == together[0]).all()):
            return
        told = f"there are {counts.tolist()} on the ranks"
        if bool((counts == counts[0]).all()):
            hashes = self._everyones([_hash(kind) for kind in kinds])
            place = int((hashes != hashes[0]).any(0).nonzero()[0])
            told = f"{kinds[place]} on rank {self.everyone.rank} is another one elsewhere"
        raise RuntimeError(
            f"ranks have other buffers, and what is saved of buffers is the first rank's: {told}. Give each the same"
            " shape and dtype on all ranks, or leave it out of what is saved: register_buffer(..., persistent=False)"
        )

    def _everyones(self, numbers: Sequence[int]) -> Tensor:
        """What each rank says: int64, shape [ranks, numbers]. *Collective.*"""
        table = torch.zeros(self.everyone.size, len(numbers), dtype=torch.int64, device=self.everyone.runtime.device)
        table[self.everyone.rank] = torch.tensor(numbers, dtype=torch.int64)
        return self.everyone.sum_scalars(table, "kinds of buffers")

    def load_state_dict(self, given: Mapping[str, Any], *, strict: bool) -> _IncompatibleKeys:
        """Take weights and buffers by the names of `state_dict`; returns names that one side lacks. Gradients wait for
        their step, as in torch. *Collective.*

        Of a tensor with several names one is enough; given more, the last counts, as in torch.

        Raises:
            StateMismatch: with `strict` a name is missing or unexpected; or a shape differs. Nothing was loaded.
        """
        self._settle()
        plans = list[_Plan]()

        def take(state: Mapping[str, Any], strict: bool = False) -> _IncompatibleKeys:
            plans.append(self._plan(state, strict=strict))
            return plans[-1].names

        if type(self.module).load_state_dict is nn.Module.load_state_dict:
            names: Any = take(given, strict)
        else:
            names = hooks.through_own(self.module, given, strict, take)
        for plan in plans:
            self._fill(plan)
        self.weights.install()
        hooks.after_loading(self.module, plans[-1].names)
        return plans[-1].names if names is None else names

    def _plan(self, given: Mapping[str, Any], *, strict: bool) -> _Plan:
        """What of a dictionary goes where; nothing is loaded.

        Raises:
            StateMismatch: as `load_state_dict`.
        """
        given, spared = hooks.before_loading(self.module, given)
        own = dict(saved_entries(self.module))
        told = {id(own[name]) for name in (*given, *spared) if name in own}
        missing = [name for name, saved in own.items() if id(saved) not in told]
        unexpected = [name for name in given if name not in own]
        # torch's helpers hand back the model's own tensors for what they lack
        taken = [(n, own[n], value) for n, value in given.items() if n in own and value is not own[n]]
        pairs = [(name, saved, value) for name, saved, value in taken if isinstance(saved, Tensor)]
        check_fit(pairs, missing if strict else [], unexpected if strict else [])
        return _Plan(
            pairs, [(p, v) for _, p, v in taken if isinstance(p, nn.Module)], _IncompatibleKeys(missing, unexpected)
        )

    def _fill(self, plan: _Plan) -> None:
        """Copy what was given to where it belongs."""
        first = {id(param): name for name, param in self.module.named_parameters()}
        shards = self._shards.weights(self.buckets)
        for _, tensor, value in plan.tensors:
            if id(tensor) in first:
                fill(shards[first[id(tensor)]], value)
            else:
                tensor.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
        for part, value in plan.more:
            part.set_extra_state(value)

    @property
    def _is_sharded(self) -> bool:
        return any(bucket.views.sharded is not None for bucket in self.buckets)

    def sharded_state(
        self, optimizer: ShardedOptimizer | None, stepped: Sequence[torch.optim.Optimizer] = ()
    ) -> ShardedState:
        """Weights, and the state of an optimizer, by the module's own names, over the engine's own memory.

        stepped: optimizers over sharded parameters.
        """
        self._settle()
        found = self._shards.state(self.buckets, optimizer)
        if self._is_sharded:
            add_optimizers(found, self.buckets, stepped)
        found.tensors |= self._fp8_state()
        return found

    def _fp8_state(self) -> dict[str, Tensor]:
        """What delayed scaling knows, the same on all ranks between steps; in place."""
        return {FP8 + name: buffer for name, buffer in Fp8Linear.delayed_state(self.module).items()}

    def adopt_state(self, state: ShardedState) -> None:
        """Make what was written into `sharded_state` count from now on, and forget gradients. *Collective.*"""
        state.adopt()
        self._written()

    def local_state(
        self, optimizer: ShardedOptimizer | None, stepped: Sequence[torch.optim.Optimizer] = ()
    ) -> dict[str, Tensor]:
        """This rank's flat weights and optimizer state, for resuming on the same layout.

        Raises:
            RuntimeError: there is no optimizer.
        """
        self.weights.wait()
        if self._is_sharded:
            return local_state(self.buckets, _some(stepped)) | self._fp8_state()
        return flat.local_state(self.buckets, _required(optimizer)) | self._fp8_state()

    def load_local_state(
        self,
        optimizer: ShardedOptimizer | None,
        values: Mapping[str, Tensor],
        stepped: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Take `local_state` back, and forget gradients. *Collective.*

        Raises:
            ValueError: it does not fit; nothing was loaded.
            RuntimeError: there is no optimizer.
        """
        self.weights.wait(writes=True)
        scales = self._fp8_state()
        check_fit(
            [(name, buffer, values[name]) for name, buffer in scales.items() if name in values],
            [name for name in scales if name not in values],
            [name for name in values if name.startswith(FP8) and name not in scales],
        )
        rest = {name: value for name, value in values.items() if not name.startswith(FP8)}
        if self._is_sharded:
            load_local_state(self.buckets, _some(stepped), rest)
        else:
            flat.load_local_state(self.buckets, _required(optimizer), rest)
        for name, buffer in scales.items():
            buffer.copy_(values[name])
        self._written()

    def _written(self) -> None:
        self.weights.install()
        self.gradients.forget(set_to_none=None)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def _some(stepped: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
    if not stepped:
        raise RuntimeError("no optimizer is attached; call fully_shard_optimizer(model, optimizer) first")
    return stepped


def _required(optimizer: ShardedOptimizer | None) -> ShardedOptimizer:
    if optimizer is None:
        raise RuntimeError("no optimizer is attached; call fully_shard_optimizer(model, optimizer) first")
    return optimizer


EXTRA = "_extra_state"
"""What torch calls an entry that a module makes by `get_extra_state`."""


def saved_entries(module: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Parameters and buffers that a module's own `state_dict` would have, and modules that have an entry of their own
    making, under every name, in its order."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name, entry in entries_of(part):
            yield f"{path}.{name}" if path else name, entry


def entries_of(part: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """As `saved_entries`, without those of its parts."""
    saved = (item for item in part._buffers.items() if item[0] not in part._non_persistent_buffers_set)
    for name, tensor in (*part._parameters.items(), *saved):
        if tensor is not None:
            yield name, tensor
    if type(part).get_extra_state is not nn.Module.get_extra_state:
        yield EXTRA, part
