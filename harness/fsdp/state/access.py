"""The state of a sharded model as its user sees it, whole, by name, or as this rank's own; and how it is taken back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from harness.fsdp.comm.crossed import Everyone
from harness.fsdp.fp8.linear import delayed_state
from harness.fsdp.state import flat
from harness.fsdp.state.named import ShardedState, ShardMap, check_fit
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


class StateAccess:
    """Hands out the state of one sharded model and takes it back.

    Args:
        module: whose names are the state's.
        buckets: all of the model's.
        weights: waited for before weights are handed out or written, told when they were written.
        gradients: finished before they are handed out, forgotten when weights were written.
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

    def state_dict(self) -> dict[str, Tensor]:
        """Main weights as DTensors over the engine's own memory, and saved buffers as they are on the first rank, under
        all the names that torch gives them, in its order. *Collective* where there are buffers.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
        """
        self._settle()
        held = self._shards.weights(self.buckets)
        first = {id(param): name for name, param in self.module.named_parameters()}
        of_rank_0: dict[int, Tensor] = {}
        found: dict[str, Tensor] = {}
        for name, tensor in saved_tensors(self.module):
            if id(tensor) in first:
                found[name] = held[first[id(tensor)]]
                continue
            if id(tensor) not in of_rank_0:
                of_rank_0[id(tensor)] = self.everyone.from_first(tensor, f"saved {name}").clone()
            found[name] = of_rank_0[id(tensor)]
        return found

    def load_state_dict(self, given: Mapping[str, Any], *, strict: bool) -> _IncompatibleKeys:
        """Take weights and buffers by the names of `state_dict`, and forget gradients; returns names that one side
        lacks. *Collective.*

        Of a tensor with several names one is enough; given more, the last counts, as in torch.

        Raises:
            StateMismatch: with `strict` a name is missing or unexpected; or a shape differs. Nothing was loaded.
        """
        self._settle()
        first = {id(param): name for name, param in self.module.named_parameters()}
        own = dict(saved_tensors(self.module))
        told = {id(own[name]) for name in given if name in own}
        missing = [name for name, tensor in own.items() if id(tensor) not in told]
        unexpected = [name for name in given if name not in own]
        # torch's helpers hand back the model's own tensors for what they lack
        pairs = [(n, own[n], value) for n, value in given.items() if n in own and value is not own[n]]
        shards = self._shards.weights(self.buckets)
        check_fit(pairs, missing if strict else [], unexpected if strict else [])
        for _, tensor, value in pairs:
            if id(tensor) in first:
                shards[first[id(tensor)]].fill_from(value)
            else:
                tensor.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
        self._written()
        return _IncompatibleKeys(missing, unexpected)

    def sharded_state(self, optimizer: ShardedOptimizer | None) -> ShardedState:
        """Weights, and the state of an optimizer, by the module's own names, over the engine's own memory."""
        self._settle()
        found = self._shards.state(self.buckets, optimizer)
        found.tensors |= self._fp8_state()
        return found

    def _fp8_state(self) -> dict[str, Tensor]:
        """What delayed scaling knows, the same on all ranks between steps; in place."""
        return {FP8 + name: buffer for name, buffer in delayed_state(self.module).items()}

    def adopt_state(self, state: ShardedState) -> None:
        """Make what was written into `sharded_state` count from now on, and forget gradients. *Collective.*"""
        state.adopt()
        self._written()

    def local_state(self, optimizer: ShardedOptimizer | None) -> dict[str, Tensor]:
        """This rank's flat weights and optimizer state, for resuming on the same layout.

        Raises:
            RuntimeError: there is no optimizer.
        """
        self.weights.wait()
        return flat.local_state(self.buckets, _required(optimizer)) | self._fp8_state()

    def load_local_state(self, optimizer: ShardedOptimizer | None, values: Mapping[str, Tensor]) -> None:
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
        flat.load_local_state(self.buckets, _required(optimizer), rest)
        for name, buffer in scales.items():
            buffer.copy_(values[name])
        self._written()

    def _written(self) -> None:
        self.weights.install()
        self.gradients.forget(set_to_none=None)


def _required(optimizer: ShardedOptimizer | None) -> ShardedOptimizer:
    if optimizer is None:
        raise RuntimeError("no optimizer is attached; call fully_shard_optimizer(model, optimizer) first")
    return optimizer


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that a module's own `state_dict` would have, under every name, in its order."""
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        saved = (item for item in part._buffers.items() if item[0] not in part._non_persistent_buffers_set)
        for name, tensor in (*part._parameters.items(), *saved):
            if tensor is not None:
                yield prefix + name, tensor


def refuse_state_dict(*_: Any) -> None:
    """Raise NotImplementedError: a hook of modules whose tensors are pieces."""
    raise NotImplementedError(
        "what is sharded holds pieces, which a module inside the model cannot name: take state_dict() or"
        " sharded_state() of the ShardedModel, DTensors by the model's own names for any layout;"
        " full_weights() for whole tensors, or local_state() to resume on the same layout"
    )
