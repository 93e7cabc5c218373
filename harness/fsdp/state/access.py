"""The state of a sharded model as its user sees it, whole, by name, or as this rank's own; and how it is taken back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from harness.fsdp.state import flat
from harness.fsdp.state.named import ShardedState, ShardMap, load_weights
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.update.optimizer import ShardedOptimizer


class Weights(Protocol):
    """What brings main weights into the compute weights."""

    def wait(self) -> None:
        """Wait until other ranks have taken this rank's weights, so that these may change; edits of the program count
        from now on."""

    def install(self) -> None:
        """Make main weights that were written count in the very next forward. *Collective.*"""


class StepGradients(Protocol):
    """What finishes or forgets a step's gradients."""

    def finish(self) -> None:
        """Wait for the step's reductions and scale the gradients, once. *Collective.*"""

    def forget(self) -> None:
        """Forget all gradients of the step."""


class StateAccess:
    """Hands out the state of one sharded model and takes it back.

    Args:
        module: whose names are the state's.
        buckets: all of the model's.
        weights: waited for before weights are handed out or written, told when they were written.
        gradients: finished before they are handed out, forgotten when weights were written.
    """

    def __init__(
        self, module: nn.Module, buckets: Sequence[Bucket], weights: Weights, gradients: StepGradients
    ) -> None:
        self.module = module
        self.buckets = buckets
        self.weights = weights
        self.gradients = gradients
        self._shards = ShardMap()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Main weights by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        self.weights.wait()
        return self._in_model_order(flat.full_weights(self.buckets), self.buckets)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Finished gradients by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        self.gradients.finish()
        trainable = [bucket for bucket in self.buckets if bucket.trainable]
        return self._in_model_order(flat.full_gradients(self.buckets), trainable)

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
        """Main weights by their first names as DTensors over the engine's own memory, and buffers that are saved."""
        self.weights.wait()
        held = self._shards.weights(self.buckets)
        weights = {name: held[name] for name, _ in self.module.named_parameters() if name in held}
        return {**weights, **saved_buffers(self.module)}

    def load_state_dict(self, given: Mapping[str, Any], *, strict: bool) -> list[str]:
        """Take weights and buffers by first names, and forget gradients; returns names that one side lacks.
        *Collective.*

        Raises:
            ValueError: see `harness.fsdp.state.named.load_weights`.
        """
        self.weights.wait()
        buffers = saved_buffers(self.module)
        rest = {name: value for name, value in given.items() if name not in buffers}
        problems = load_weights(self._shards.weights(self.buckets), rest, strict=strict)
        for name in buffers.keys() & given.keys():
            buffers[name].copy_(given[name])
        self._written()
        return problems

    def sharded_state(self, optimizer: ShardedOptimizer | None) -> ShardedState:
        """Weights, and the state of an optimizer, by the module's own names, over the engine's own memory."""
        self.weights.wait()
        return self._shards.state(self.buckets, optimizer)

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
        return flat.local_state(self.buckets, _required(optimizer))

    def load_local_state(self, optimizer: ShardedOptimizer | None, values: Mapping[str, Tensor]) -> None:
        """Take `local_state` back, and forget gradients. *Collective.*

        Raises:
            ValueError: it does not fit; nothing was loaded.
            RuntimeError: there is no optimizer.
        """
        self.weights.wait()
        flat.load_local_state(self.buckets, _required(optimizer), values)
        self._written()

    def _written(self) -> None:
        self.weights.install()
        self.gradients.forget()


def _required(optimizer: ShardedOptimizer | None) -> ShardedOptimizer:
    if optimizer is None:
        raise RuntimeError("no optimizer is attached; call fully_shard_optimizer(model, optimizer) first")
    return optimizer


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that a module's own `state_dict` would have, by first name."""
    transient = {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name not in transient}


def refuse_state_dict(*_: Any) -> None:
    """Raise NotImplementedError: a hook of modules and optimizers whose tensors are pieces."""
    raise NotImplementedError(
        "what is sharded holds pieces, which a module or an optimizer by itself cannot name: take state_dict() or"
        " sharded_state() of the ShardedModel, DTensors by the model's own names for any layout;"
        " full_weights() for whole tensors, or local_state() to resume on the same layout"
    )
