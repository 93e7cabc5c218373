"""The state of a sharded model as its user sees it, whole, by name, or as this rank's own; and how it is taken back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from harness.fsdp.state import flat
from harness.fsdp.state.named import ShardedState, ShardMap, load_weights
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.update import optimizer as optim


class StatefulModel(nn.Module):
    """The part of `ShardedModel` that hands out state and takes it back."""

    module: nn.Module
    buckets: list[Bucket]
    _trainable: dict[str, Bucket]
    _sharded_optimizer: optim.ShardedOptimizer | None

    def __init__(self) -> None:
        super().__init__()
        self._shards = ShardMap()

    @abstractmethod
    def _wait_until_installed(self) -> None:
        """Wait until other ranks have taken this rank's weights, so that they may change."""

    @abstractmethod
    def install_weights(self) -> None:
        """Bring main weights into the compute weights. *Collective.*"""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""

    @abstractmethod
    def finish_grad_sync(self) -> None:
        """Wait for the step's reductions. *Collective.*"""

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Main weights by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        return self._in_model_order(flat.full_weights(self.buckets), self.buckets)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Finished gradients by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        self.finish_grad_sync()
        return self._in_model_order(flat.full_gradients(self.buckets), list(self._trainable.values()))

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

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override] # torch's has overloads for destinations
        """Main weights by their first names as DTensors over the engine's own memory, and buffers that are saved.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
        """
        self._wait_until_installed()
        held = self._shards.weights(self.buckets)
        weights = {name: held[name] for name, _ in self.module.named_parameters() if name in held}
        return {**weights, **saved_buffers(self.module)}

    def load_state_dict(self, given: Mapping[str, Any], strict: bool = True, assign: bool = False) -> list[str]:
        """Take weights and buffers: whole tensors or DTensors, by first names. Effective in the very next forward.

        Returns names that one side lacks (none with `strict`). *Collective.*

        Raises:
            ValueError: see `harness.fsdp.state.named.load_weights`; or `assign`, which would replace the storage.
        """
        if assign:
            raise ValueError("assign=True would replace flat storage that optimizer and collectives use: load in place")
        self._wait_until_installed()
        buffers = saved_buffers(self.module)
        rest = {name: value for name, value in given.items() if name not in buffers}
        problems = load_weights(self._shards.weights(self.buckets), rest, strict=strict)
        for name in buffers.keys() & given.keys():
            buffers[name].copy_(given[name])
        self.install_weights()
        self.zero_grad()
        return problems

    def sharded_state(self) -> ShardedState:
        """Weights and optimizer state by the module's own names, over the engine's own memory; for any layout.

        What is written into it counts from `adopt_state` on. An optimizer that has not been stepped has no state yet:
        `harness.fsdp.state.blank.create_state` makes it.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
        """
        self._wait_until_installed()
        return self._shards.state(self.buckets, self._sharded_optimizer)

    def adopt_state(self, state: ShardedState) -> None:
        """Make what was written into `sharded_state` effective in the very next forward. *Collective.*

        Raises:
            ValueError: counters differ between parameters that are updated together.
        """
        state.adopt()
        self.install_weights()
        self.zero_grad()

    def local_state(self) -> dict[str, Tensor]:
        """This rank's flat state, for resuming on the same layout."""
        return flat.local_state(self.buckets, self._require_optimizer())

    def load_local_state(self, values: Mapping[str, Tensor]) -> None:
        """Take `local_state` back, effective in the very next forward. *Collective.*

        Raises:
            ValueError: it does not fit; nothing was loaded.
        """
        self._wait_until_installed()
        flat.load_local_state(self.buckets, self._require_optimizer(), values)
        self.install_weights()
        self.zero_grad()

    def _require_optimizer(self) -> optim.ShardedOptimizer:
        if self._sharded_optimizer is None:
            raise RuntimeError("no optimizer is attached; call fully_shard_optimizer(model, optimizer) first")
        return self._sharded_optimizer


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
