"""megatron-fsdp's names on the model: what a loop written for that engine calls, said in this one's terms.

The arguments of the entries are read in `harness.fsdp.megatron_arguments`, those of `optimizer.step` and
`optimizer.zero_grad` in `harness.fsdp.binding`. What has no meaning here raises, and says what to use in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.fsdp.guards.replicas import held_by_several
from harness.fsdp.model import ShardedModel
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.runtime.step import Call, StepError, StepState
from harness.fsdp.update import norms
from harness.fsdp.vocabulary import Registration
from harness.fsdp.wiring import set_wire, with_wire_of

_PARAMS = "parameters stay the module's own, before and after a step: drop the call, or read model.named_parameters()"
_RANKS = "the ranks are those of the device mesh that the model was given"
ELSEWHERE = {
    "param_and_grad_buffer": "read model.buckets, or model.persistent_bytes() for their bytes",
    "dist_index": _RANKS,
    "get_distributed_index": _RANKS,
    "ddp_config": "read model.options, model.strategy and model.outer_strategy",
    "mp_policy": "read model.policy",
    "raw_param": _PARAMS,
    "is_param_fsdp_distributed": _PARAMS,
    "_replace_param_with_distributed_if_needed": _PARAMS,
    "_replace_param_with_raw_if_needed": _PARAMS,
    "microbatch_count": "a step begins with zero_grad(); is_last_microbatch says which backward ends it",
    "all_gather_pipeline": "hooks gather; model.unsharded() has weights whole outside the forward",
    "all_gather_and_wait_parameters_ready": "hooks gather; model.unsharded() has weights whole outside the forward",
    "grad_reduce_pipeline": "backwards reduce; model.finish_grad_sync() waits",
}


class MegatronModel(ShardedModel):
    """A `ShardedModel` that also has the methods of megatron-fsdp's `MegatronFSDP`, under their names.

    `fully_shard` and `fully_shard_model` return it. All ranks call these methods, in the same order.
    """

    # -- which backward ends a step ------------------------------------------------------------------------------

    @property
    def is_last_microbatch(self) -> bool:
        """True if the backward that begins next ends the step's accumulation; may be set, as `set_model_auto_sync`
        does."""
        return self._parts.step.sync

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self.set_model_auto_sync(value)

    model_auto_sync = is_last_microbatch

    # -- gradients -----------------------------------------------------------------------------------------------

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """See `ShardedModel.finish_grad_sync`.

        Raises:
            NotImplementedError: `force_all_reduce`: which collective reduces follows from the strategy.
        """
        if force_all_reduce:
            raise NotImplementedError(
                "finish_grad_sync(force_all_reduce=True): what reduces gradients follows from the strategy; whole sums"
                " on every rank are zero_dp_strategy='no_shard', or model.full_gradients()"
            )
        super().finish_grad_sync()

    def start_grad_sync(self, *_: Any) -> None:
        """Does nothing but check: a backward issues its own reductions, unit by unit.

        Raises:
            StepError: a RuntimeError. A backward is running; or the last one ran inside `no_sync`, so that no reduction
                was issued.
        """
        self._outside_backward(Call.finish_grad_sync)

    def synchronize_gradient_reduce(self) -> None:
        """Wait for the reductions that backwards have issued. Sums are not scaled yet; `finish_grad_sync` scales them.

        Raises:
            StepError: as `start_grad_sync`.
        """
        self._outside_backward(Call.finish_grad_sync)
        self._parts.gradients.drain()

    def _outside_backward(self, call: Call) -> None:
        self._parts.hooks.recover()
        self._parts.step.check(call)

    def attach_grad_to_optimizer_state(self) -> None:
        """Finish the gradients, which parameters show as `.grad`; raises as `finish_grad_sync`."""
        self.finish_grad_sync()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Finish the gradients and multiply them by a factor, which must be the same on all ranks. Without a backward
        nothing happens.

        Raises:
            StepError: as `finish_grad_sync`.
        """
        if not self.has_gradients:
            return
        self.finish_grad_sync()
        norms.scale_gradients(self.buckets, float(scaling_factor))

    def zero_grad_buffer(self) -> None:
        """Forget gradients; see `zero_grad`."""
        self.zero_grad()

    # -- weights -------------------------------------------------------------------------------------------------

    def install_optimized_model_weights(self) -> None:
        """See `install_weights`. Call it after `step(install_optimized_model_weights=False)`."""
        self.install_weights()

    def start_param_sync(self, *_: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start the gathers that the next forward would start itself.

        Args:
            force_sync: must be False.
            force_dispatch: has no effect, because gathers are always dispatched.

        Raises:
            NotImplementedError: `force_sync` is set; it would gather the whole model on every rank.
            RuntimeError: inside the model's forward or backward.
        """
        if force_sync:
            raise NotImplementedError(
                "start_param_sync(force_sync=True) would leave the weights of all units whole on every rank: use `with"
                " model.unsharded():` to read or edit them; a forward gathers what it needs"
            )
        self._parts.whole.start()

    def synchronize_param_gather(self) -> None:
        """Wait until no gather of weights is in flight on this rank and on the ranks that read from it.

        Units that were gathered ahead are dropped, and gathered again when they are used.

        Raises:
            RuntimeError: inside the model's forward or backward.
        """
        self._parts.whole.settle()

    def broadcast_params(self) -> None:
        """Set weights that several ranks hold to the first rank's values, including its edits. This takes effect in the
        next forward. Weights that only one rank holds (its shard under `optim_grads_params`) do not change.

        Raises:
            RuntimeError: inside `gathered`.
        """
        self._parts.weights.refuse_held()
        self._parts.weights.bring_up_to_date()  # of rows that other ranks keep, the first one has no edits
        self._parts.weights.wait(writes=True)
        for comm, replicas in held_by_several(self.buckets, self._parts.meshes):
            for each in replicas:
                each.tensor.copy_(comm.from_first(each.tensor, f"weights of {each.name}"))
        self.install_weights()

    # -- dtypes --------------------------------------------------------------------------------------------------

    @contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Reduce in another `grad_comm_dtype` in the body, which is one step or several; see
        `reset_mixed_precision_policy`. Gradients that are not finished when it ends are finished then."""
        before = self.policy
        self.reset_mixed_precision_policy(mixed_precision_policy)
        try:
            yield
            if self.has_gradients:
                self.finish_grad_sync()
        except BaseException:
            self._parts.hooks.recover()
            if self.has_gradients:
                self._parts.step.fail()
            raise
        finally:
            self._set_policy(before)

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Use another policy's `grad_comm_dtype` from now on. Its other fields must be the model's or defaults. Call it
        between two steps.

        Raises:
            NotImplementedError: another field differs; or buffers of fixed size were made for the present dtype
                (`double_buffer`, `nccl_ub`).
            StepError: a RuntimeError. There are gradients that are not finished.
            ValueError: the dtypes do not go together.
        """
        if self.options.double_buffer or self.options.nccl_ub is not Registration.none:
            raise NotImplementedError(
                "a change of grad_comm_dtype with double_buffer or nccl_ub, whose buffers were made for one: leave both"
                " off, or give grad_comm_dtype to fully_shard_model"
            )
        self._parts.hooks.recover()
        if self._parts.step.state not in (StepState.IDLE, StepState.FINISHED):
            raise StepError(
                f"a change of grad_comm_dtype in the middle of a step ({self._parts.step.state.value}): change it after"
                " zero_grad(), before the step's first backward"
            )
        self._set_policy(with_wire_of(mixed_precision_policy, self.policy))

    def _set_policy(self, policy: MixedPrecisionPolicy) -> None:
        if policy != self.policy:
            set_wire(self._parts, policy, self.numerics)
            self.policy = policy

    # -- what is elsewhere ---------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ELSEWHERE:
                raise AttributeError(f"{name} is megatron-fsdp's own, and not here: {ELSEWHERE[name]}") from None
            raise
