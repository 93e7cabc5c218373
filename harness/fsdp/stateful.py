"""What a sharded model hands out of its state, takes back, keeps and counts. Nothing here runs a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from harness.fsdp.components import Components
from harness.fsdp.runtime.gathered import Wanted
from harness.fsdp.state.access import StateAccess
from harness.fsdp.state.named import ShardedState
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.update.optimizer import ShardedOptimizer
from harness.fsdp.wrapper import ModuleWrapper


class StatefulModule(ModuleWrapper):
    """A module whose parameters, gradients and optimizer state lie in the buckets of an engine.

    Whoever inherits sets what is declared here.
    """

    buckets: list[Bucket]
    """All of them, in model order."""
    _parts: Components
    _state: StateAccess
    _sharded_optimizer: ShardedOptimizer | None
    """None until an optimizer is bound."""

    def gathered(self, wanted: Wanted | Iterable[Wanted] | None = None) -> AbstractContextManager[None]:
        """Have parameters whole in the body, in their compute dtype: to be read, and edited in place. *Collective.*

        Edits count when the body ends, under every strategy; all ranks must make the same. Between uses whole weights
        (`no_shard`, `optim`, `optim_grads`) may be read and edited outside as well. Takes the memory of the units they
        lie in.

        Args:
            wanted: a module, a parameter, the name of either, or several of them; None is the whole model.

        Raises:
            ValueError: it is not the model's; or double_buffer has no room for so many units.
            RuntimeError: inside the model's forward or backward; or a module or parameter was replaced in the body.
            ReplicaDrift: ranks edited differently.
        """
        return self._parts.whole.gathered(wanted)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Main weights by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        return self._state.full_weights()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Finished gradients by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        return self._state.full_gradients()

    def local_gradients(self) -> dict[str, Tensor]:
        """This rank's part of every main gradient, by parameter name: the rows that it has of `sharded_state()`'s
        weights, over the engine's own memory; none of frozen parameters. Ends the step's reductions, gathers nothing.

        Raises:
            RuntimeError: a reduction failed, or there are no gradients of a step.
        """
        return self._state.local_gradients()

    def state_dict(  # type: ignore[override] # torch's has overloads for destinations
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Main weights as DTensors over the engine's own memory, and buffers that are saved as the first rank has them,
        by all names torch gives them; and what modules say in `get_extra_state`. *Collective.*

        Args:
            destination: gets the entries, and is returned: so a module has them that holds the sharded model.
            prefix: of the names. keep_vars: what is given is detached in either case.

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
        """Take weights and buffers: whole tensors or DTensors, by the names of `state_dict`. Effective in the very next
        forward. Gradients wait for their step, and names that one side lacks are returned, as in torch. *Collective.*

        Raises:
            StateMismatch: a ValueError and a RuntimeError: with `strict` a name is missing or unexpected; or a shape
                differs. Nothing was loaded.
            ValueError: `assign`, which would replace the storage.
        """
        if assign:
            raise ValueError("assign=True would replace flat storage that optimizer and collectives use: load in place")
        return self._state.load_state_dict(state_dict, strict=strict)

    def sharded_state(self) -> ShardedState:
        """Weights and optimizer state by the module's own names, over the engine's own memory; for any layout.

        What is written into it counts from `adopt_state` on. An optimizer that has not been stepped has no state yet:
        `harness.fsdp.update.blank.create_state` makes it.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
        """
        return self._state.sharded_state(self._sharded_optimizer)

    def adopt_state(self, state: ShardedState) -> None:
        """Make what was written into `sharded_state` effective in the very next forward; forget gradients.
        *Collective.*

        Raises:
            ValueError: counters differ between parameters that are updated together.
        """
        self._state.adopt_state(state)

    def local_state(self) -> dict[str, Tensor]:
        """This rank's flat weights and optimizer state, for resuming on the same layout.

        Raises:
            RuntimeError: no optimizer is attached.
        """
        return self._state.local_state(self._sharded_optimizer)

    def load_local_state(self, values: Mapping[str, Tensor]) -> None:
        """Take `local_state` back, effective in the very next forward; forget gradients. *Collective.*

        Raises:
            ValueError: it does not fit; nothing was loaded.
            RuntimeError: no optimizer is attached.
        """
        self._state.load_local_state(self._sharded_optimizer, values)

    # -- what it keeps and counts ----------------------------------------------------------------------------------

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes this rank keeps, by role: weights (compute, main), main_grads, optimizer, padding, buffers; and
        gradient_sums, where integers or another device keep these apart from the main gradients.

        Between steps, from `zero_grad` to the next reduction, shards of main_grads are not there.
        """
        return self._parts.persistent_bytes(self.module, self._sharded_optimizer)

    def transport(self) -> dict[str, str]:
        """How data moves between ranks here, with the reason where the faster way was asked for and not found."""
        return self._parts.transport()

    def optimizer_kernels(self) -> list[str]:
        """By parameter group, in the order they were bound: with which of torch's kernels it is stepped, and whether
        the user or the engine has chosen them; see `harness.fsdp.update.kernels`."""
        return [] if self._sharded_optimizer is None else self._sharded_optimizer.groups.kernels()

    def user_buffers(self) -> dict[str, str]:
        """NCCL user buffers: requested, effective, and the reason where these differ."""
        return self._parts.user_buffers.facts()

    def counters(self) -> dict[str, int]:
        """What this rank counted since the model was built or `reset_counters` was called, by name:

        transient_peak_bytes: most bytes of temporary buckets (gathered weights, unreduced gradients) alive at once.
        gathered_units_peak: most units, the root apart, whose gathered weights took memory at once.
        peer_read_bytes: bytes read straight from other ranks' memory; 0 where ranks exchange messages instead.
        """
        return self._parts.counters()

    def reset_counters(self) -> None:
        """Begin `counters` anew: peaks from what is alive now, totals from 0."""
        self._parts.reset_counters()
