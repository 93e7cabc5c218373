"""The public class of a sharded module. `harness.fsdp.construction` builds its components.

[Note: Two entries] `harness.fsdp.api.fully_shard` is for plain loops. `ShardedModel`, constructed directly, is for
frameworks that control the optimizer: they call `finish_grad_sync`, `clip_grad_norm_` and `install_weights` themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp.binding import own
from harness.fsdp.comm.device import usual_device
from harness.fsdp.comm.mesh import Groups
from harness.fsdp.construction import Ranks, Request, Values, build
from harness.fsdp.copying import bare_copy
from harness.fsdp.megatron_arguments import resolve_classes
from harness.fsdp.options import OptionKeywords, Options
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.preconditions import check_request
from harness.fsdp.state.access import StateAccess
from harness.fsdp.stateful import StatefulModule
from harness.fsdp.storage.bucket_context import InitialValue
from harness.fsdp.storage.placement import Placements
from harness.fsdp.update import norms
from harness.fsdp.update.flat_step import FlatStep
from harness.fsdp.vocabulary import OuterStrategy, Strategy
from harness.fsdp.wrapper import FORWARD_METHODS, mark_sharded, register_forward_method

if not hasattr(torch.Tensor, "grad_dtype"):
    raise ImportError(f"harness.fsdp needs torch 2.11 or newer (Tensor.grad_dtype); this is torch {torch.__version__}")


class ShardedModel(StatefulModule):
    """A module whose weights, gradients and optimizer state are split over the ranks of one or two axes.

    Args:
        module: sharded in place; on the "meta" device if `initial_value` or `init_on_meta` is given.
        group: process group of the data-parallel ranks; None is the default group. Use `groups` for two axes.
        groups: process groups of both axes; see `harness.fsdp.comm.mesh.Groups`.
        expert_groups: the same for parameters with `allreduce = False` (experts); None: the same as for the others.
        unit_modules: classes (or dotted paths) whose outermost instances are gathered and reduced together; without
            any, the whole module is one unit.
        strategy: ZeRO stage along the inner axis: a `Strategy`, its name, or 0-3.
        outer_strategy: what the outer axis splits: an `OuterStrategy`, its name, or 0-1.
        mixed_precision_policy: dtypes of main weights, main gradients, gradients in collectives, and sums.
        device: device of the buckets; None is that of the parameters, or the group's if they are on meta.
        grad_divisor: summed gradients, those of experts too, are divided by it once per step. None is the number of
            ranks (of both axes, experts or not), so that a loss averaged on each rank gives the averaged gradient; a
            loop over k microbatches then scales its loss by 1/k. If it is the number of global microbatches (or
            tokens), the loop does not scale the loss.
        initial_value: returns each parameter's full value by name, the same on all ranks; None takes the parameters and
            buffers of the group's first rank, as DDP does.
        init_on_meta: parameters on the meta device get their values from `reset_parameters()` of each module.
        chosen: options by name, each described in `harness.fsdp.options.Options`.

    Raises:
        TypeError: an unknown option.
        ValueError: an argument's value, with what would be valid.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        groups: Groups | None = None,
        expert_groups: Groups | None = None,
        unit_modules: Sequence[type[nn.Module] | str] | None = None,
        strategy: Strategy | str | int = Strategy.optim_grads_params,
        outer_strategy: OuterStrategy | str | int = OuterStrategy.no_shard,
        mixed_precision_policy: MixedPrecisionPolicy | None = None,
        device: torch.device | None = None,
        grad_divisor: float | None = None,
        initial_value: InitialValue | None = None,
        init_on_meta: bool = False,
        **chosen: Unpack[OptionKeywords],
    ) -> None:
        super().__init__(module)
        self.options = Options.of(chosen, type(self).__name__, ShardedModel.__init__.__kwdefaults__ or ())
        classes = resolve_classes(unit_modules or ())
        check_request(module, classes, grad_divisor)
        self.strategy = Strategy.parse(strategy, "strategy")
        self.outer_strategy = OuterStrategy.parse(outer_strategy, "outer_strategy")
        self.options.check_against(reduces_each=not Placements.of(self.strategy, None).accumulates_locally)
        self.numerics = self.options.numerics
        self.policy = mixed_precision_policy or MixedPrecisionPolicy()
        device = device or usual_device(next(module.parameters()).device, groups.inner if groups else group)
        ranks = Ranks(groups or Groups(group), expert_groups, device)
        choices = (self.strategy, self.outer_strategy, self.policy, self.options)
        request = Request(module, classes, ranks, Values(initial_value, init_on_meta), grad_divisor, *choices)
        self._parts = parts = build(request)
        self._copied_as = replace(request, values=Values(lambda _, shape: torch.zeros(shape), init_on_meta=False))
        self.grad_divisor, self.buckets = parts.divisor, parts.buckets
        self._state = StateAccess(module, parts.buckets, parts.weights, parts.gradients, parts.everyone)
        self._flat_steps, self._methods = list[FlatStep](), list[str]()
        mark_sharded(module, parts)
        self.register_forward_methods(*(name for name in FORWARD_METHODS if hasattr(type(module), name)))
        own(self)
        self._built()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        """A model that is sharded alike, has equal weights and buffers, trains apart and shares nothing; gradients and
        optimizers are not copied. *Collective.*

        Raises:
            NotImplementedError: see `harness.fsdp.copying.bare_copy`.
        """
        self._state.settle()
        module = bare_copy(self.module, self.buckets, self._parts.hooks.of_forward.handles, memo)
        asked = self._copied_as
        made = type(self)(
            module,
            groups=asked.ranks.groups,
            expert_groups=asked.ranks.expert_groups,
            unit_modules=asked.unit_classes,
            strategy=asked.strategy,
            outer_strategy=asked.outer_strategy,
            mixed_precision_policy=asked.policy,
            device=asked.ranks.device,
            grad_divisor=asked.grad_divisor,
            initial_value=asked.values.initial,
            **{each.name: getattr(asked.options, each.name) for each in fields(asked.options)},
        )
        made.adopt_weights(self)
        made.register_forward_methods(*self._methods)
        memo[id(self)] = made
        return made

    def adopt_weights(self, other: ShardedModel) -> None:
        """Have the weights, and what is trained of them, of a model that is sharded alike. *Collective.*"""
        for mine, theirs in zip(self.buckets, other.buckets, strict=True):
            for param, flag in zip(mine.views.at_rest, theirs.views.flags(), strict=True):
                param.requires_grad_(flag)
        self._parts.hooks.of_forward.before_gradients()
        for mine, theirs in zip(self.buckets, other.buckets, strict=True):
            for shard, values in zip(mine.main_shards, theirs.main_shards, strict=True):
                shard.detach().copy_(values.detach())
        self._parts.weights.install()
        self._parts.step.sync = other._parts.step.sync

    def _interrupted(self) -> None:
        self._parts.hooks.of_forward.break_off()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters under its own names; after a backward that raised, the sharded ones."""
        self._parts.hooks.recover()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    # -- microbatches --------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside it accumulate gradients; the first backward outside ends the step's accumulation.

        `no_shard` and `optim` then communicate once per step. `optim_grads` and `optim_grads_params` still reduce every
        microbatch over the inner axis, unless `accumulate_unsharded` is on; they reduce over the outer axis once per
        step.
        """
        with self._syncing(False):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """A backward inside it ends the step's accumulation, whatever `set_model_auto_sync` was set to."""
        with self._syncing(True):
            yield

    @contextmanager
    def _syncing(self, value: bool) -> Iterator[None]:
        step = self._parts.step
        before, step.sync = step.sync, value
        try:
            yield
        finally:
            step.sync = before

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Whether a backward outside `no_sync` and `sync` ends the step's accumulation."""
        self._parts.step.sync = sync_model

    # -- a step --------------------------------------------------------------------------------------------------

    def finish_grad_sync(self) -> None:
        """Wait for the step's reductions and scale the gradients. A second call does nothing. *Collective.*

        Raises:
            StepError: a RuntimeError. The step's last backward ran inside no_sync(), so gradients were never reduced;
                or it raised, so they are incomplete; or this is called inside a backward.
            FloatingPointError: with `report_nan_in_param_grad`, a gradient of any rank is not finite.
            OverflowError: under numerics=exact, a gradient of any rank is beyond the range.
        """
        self._parts.gradients.finish()

    @property
    def has_gradients(self) -> bool:
        """Whether a backward ran since `zero_grad`; without one, a step changes nothing."""
        return self._parts.step.has_gradients

    def grad_norm(self, norm_type: float = 2.0) -> float:
        """Norm of the step's gradient over all ranks, each parameter counted once: Euclidean, or of another order.
        *Collective.*

        Raises:
            ValueError: `norm_type` is neither positive nor inf; or this norm cannot keep the bits that `numerics`
                promises.
        """
        return float(self._gradient_norm(norm_type))

    def _gradient_norm(self, norm_type: float) -> Tensor:
        self.finish_grad_sync()
        self._parts.gradients.collect()
        if norm_type == 2.0:
            return norms.gradient_norm(self.buckets, self._parts.everyone, self.numerics)
        return norms.gradient_p_norm(self.buckets, self._parts.everyone, self.numerics, float(norm_type))

    def weight_norm(self) -> float:
        """Euclidean norm of all main weights over all ranks, each parameter counted once. *Collective.*"""
        self._parts.weights.wait()
        return float(norms.weight_norm(self.buckets, self._parts.everyone, self.numerics))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale gradients down to `max_norm` if their norm exceeds it. Returns the norm before clipping, as torch's
        function does: an fp64 tensor of shape [] on the model's device. On CUDA the host waits when the norm is read,
        not here, unless `numerics` or `error_if_nonfinite` require it or the gradients are on the host. *Collective.*

        Raises:
            ValueError: as `grad_norm`.
            RuntimeError: `error_if_nonfinite` is set and the norm is not finite; gradients are unchanged.
        """
        norm = self._gradient_norm(norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient's norm of order {norm_type} is {float(norm)}: nothing was clipped. zero_grad() forgets"
                " the step; report_nan_in_param_grad=True names the tensor; error_if_nonfinite=False scales by it"
                " anyway"
            )
        norms.clip_gradients(self.buckets, norm, float(max_norm))
        return norm

    def install_weights(self) -> None:
        """Copy updated main weights into the compute weights; gathered weights are dropped. *Collective.*

        After this call, a backward of an earlier forward is refused.

        Raises:
            RuntimeError: compute weights were edited in place, which the main weights would overwrite.
        """
        self._parts.weights.install(step_ended=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop main and local gradients. Storage does not depend on `set_to_none`. With False, a parameter that had a
        gradient in the step then has a gradient of zeros, so that decay and momentum keep changing it.

        Raises:
            StepError: a RuntimeError: inside a backward.
        """
        self._parts.gradients.forget(set_to_none=set_to_none)

    def register_forward_methods(self, *names: str) -> None:
        """Gather weights for methods of the module other than `forward`; "encoder.embed" names one of a submodule.
        `generate` is registered by default.

        Each call is *collective*: all ranks must call it, and must run the same units in it equally often.

        Raises:
            ValueError: the module has no such method.
        """
        self._methods += names
        for name in names:
            register_forward_method(self.module, name, self._parts.hooks.of_forward.run_as_forward)

    def close(self) -> None:
        """Remove hooks and end threads. The module keeps the weights that it holds now."""
        self._parts.close()
