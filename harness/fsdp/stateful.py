"""What a sharded model hands out of its state, takes back, keeps and counts. Nothing here runs a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from harness.fsdp.components import Components
from harness.fsdp.runtime.whole_weights import Wanted
from harness.fsdp.state.access import StateAccess
from harness.fsdp.state.named import ShardedState
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.update.flat_step import FlatStep
from harness.fsdp.wrapper import ModuleWrapper


class StatefulModule(ModuleWrapper):
    """A module whose parameters, gradients and optimizer state lie in the buckets of an engine.

    Whoever inherits sets what is declared here.
    """

    buckets: list[Bucket]
    """All of them, in model order."""
    _parts: Components
    _state: StateAccess
    _flat_steps: list[FlatStep]

    def unsharded(self, wanted: Wanted | Iterable[Wanted] | None = None) -> AbstractContextManager[None]:
        """Context with parameters gathered, in their compute dtype, to be read or edited in place. *Collective.*

        Edits take effect when the body ends, under every strategy; all ranks must make the same edits. It takes the
        memory of the units that are gathered. Nothing is sent under `no_shard`, `optim` and `optim_grads`, but what an
        update left to install.

        Args:
            wanted: a module, a parameter, the name of either, or several of them; None is the whole model.

        Raises:
            ValueError: `wanted` is not part of the model; or double_buffer has no room for so many units.
            RuntimeError: inside the model's forward or backward; or a module or parameter was replaced in the body.
            ReplicaDrift: ranks made different edits.
        """
        return self._parts.whole.unsharded(wanted)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the whole main weight of each parameter, on the CPU. *Collective*: exhaust it on all
        ranks."""
        return self._state.full_weights()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the whole finished gradient of each parameter, on the CPU. *Collective*: exhaust it on all
        ranks."""
        return self._state.full_gradients()

    def local_gradients(self) -> dict[str, Tensor]:
        """This rank's rows of every main gradient, by parameter name, sharing the engine's memory. They are the rows
        that `sharded_state()` has of the weights; frozen parameters are left out. Finishes the step's reductions.

        Raises:
            RuntimeError: a reduction failed, or there are no gradients of a step.
        """
        return self._state.local_gradients()

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
        return self._state.state_dict(destination, prefix)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """What `load_state_dict` of a module calls that holds the sharded model.

        Raises:
            NotImplementedError: its tensors are pieces.
        """
        raise NotImplementedError(
            f"load_state_dict() of a module that holds a sharded model, as {prefix.removesuffix('.') or 'itself'}: take"
            f" the entries that begin with {prefix!r}, without that, and give them to load_state_dict() of the"
            " ShardedModel"
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load weights and buffers, given as whole tensors or DTensors by the names of `state_dict`. They take effect
        in the next forward. As in torch, gradients are kept, and missing and unexpected names returned. *Collective.*

        Raises:
            StateMismatch: a ValueError and a RuntimeError: with `strict` a name is missing or unexpected; or a shape
                differs. Nothing was loaded.
            ValueError: `assign` is set, which would replace the storage.
        """
        if assign:
            raise ValueError("assign=True would replace flat storage that optimizer and collectives use: load in place")
        return self._state.load_state_dict(state_dict, strict=strict)

    def sharded_state(self) -> ShardedState:
        """Weights and optimizer state by the module's own names, sharing the engine's memory. It can be loaded into any
        layout.

        Values written into it take effect with `adopt_state`. An optimizer that has not taken a step has no state yet;
        `harness.fsdp.create_state` creates it.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
        """
        return self._state.sharded_state(self._stepped)

    @property
    def _stepped(self) -> list[torch.optim.Optimizer]:
        """Optimizers over sharded parameters, whose state lies where it stays."""
        for each in self._flat_steps:
            each.take_state()
        return [each.optimizer for each in self._flat_steps]

    def adopt_state(self, state: ShardedState) -> None:
        """Let values written into `sharded_state` take effect in the next forward, and drop gradients. *Collective.*

        Raises:
            ValueError: counters differ between parameters that are updated together.
        """
        self._state.adopt_state(state)

    def local_state(self) -> dict[str, Tensor]:
        """This rank's flat weights and optimizer state, for resuming on the same layout.

        Raises:
            RuntimeError: no optimizer is attached.
        """
        return self._state.local_state(self._stepped)

    def load_local_state(self, values: Mapping[str, Tensor]) -> None:
        """Load the result of `local_state`, which takes effect in the next forward, and drop gradients. *Collective.*

        Raises:
            ValueError: it does not fit; nothing was loaded.
            RuntimeError: no optimizer is attached.
        """
        self._state.load_local_state(values, self._stepped)

    # -- what it keeps and counts ----------------------------------------------------------------------------------

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes that this rank keeps, by role: weights (compute, main), main_grads, optimizer, padding, buffers; and
        gradient_sums, if these are integers or on another device, separate from the main gradients.

        Between `zero_grad` and the next reduction, shards of main_grads are not allocated.
        """
        found = self._parts.persistent_bytes(self.module)
        for each in self._flat_steps:
            used, padding = each.state_bytes()
            found["optimizer"] += used
            found["padding"] += padding
        return found

    def transport(self) -> dict[str, str]:
        """How data moves between ranks, with the reason if a requested faster way is not available."""
        return self._parts.transport()

    def optimizer_kernels(self) -> list[str]:
        """For each parameter group, in the order of binding: which of torch's kernels updates it, and whether the user
        or the engine chose that kernel; see `harness.fsdp.update.rules`."""
        return [kernel for each in self._flat_steps for kernel in each.chosen()]

    def user_buffers(self) -> dict[str, str]:
        """State of NCCL user buffers: `requested`, `effective`, and the `reason` if they differ."""
        return self._parts.user_buffers.facts()

    def counters(self) -> dict[str, int]:
        """Counters of this rank since the model was built or `reset_counters` was called, by name:

        transient_peak_bytes: most bytes of temporary buckets (gathered weights, unreduced gradients) alive at once.
        gathered_units_peak: most units, the root apart, whose gathered weights took memory at once.
        peer_read_bytes: bytes read straight from other ranks' memory; 0 where ranks exchange messages instead.
        """
        return self._parts.counters()

    def reset_counters(self) -> None:
        """Reset `counters`: peaks to the current values, totals to 0."""
        self._parts.reset_counters()
