"""A sharded module: its buckets, its two pipelines, and what a step asks of them.

[Note: Two entries] `harness.fsdp.api.fully_shard` is for plain loops. `ShardedModel`, constructed directly, is for
frameworks that own the optimizer's calls: they call `finish_grad_sync`, `clip_grad_norm_`, `install_weights`
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import labels, state
from harness.fsdp import optimizer as optim
from harness.fsdp.arguments import resolve_classes
from harness.fsdp.buffer import Bucket, BucketContext, InitialValue
from harness.fsdp.collectives import make_reduction
from harness.fsdp.communicator import EAGER_LIMIT_BYTES, Communicator, Pending
from harness.fsdp.device import DeviceRuntime
from harness.fsdp.drift import ReplicaCheck, whole_weights
from harness.fsdp.gather import GatherPipeline
from harness.fsdp.guards import GradientGuard
from harness.fsdp.hooks import HookDriver
from harness.fsdp.memory import BucketMemory, placeholder
from harness.fsdp.policy import Dtypes, MixedPrecisionPolicy, Numerics, Strategy
from harness.fsdp.reduce import ReducePipeline
from harness.fsdp.units import Unit, plan_units
from harness.fsdp.watchdog import watch_groups

if not hasattr(torch.Tensor, "grad_dtype"):
    raise ImportError(f"harness.fsdp needs torch 2.11 or newer (Tensor.grad_dtype); this is torch {torch.__version__}")

_MARK = "_sharded_by_harness"


class ShardedModel(nn.Module):
    """A module whose weights, gradients and optimizer state are split over the ranks of one group.

    Args:
        module: sharded in place; on the "meta" device if `initial_value` is given.
        group: process group of the data-parallel ranks; None is the default group.
        unit_modules: classes (or dotted paths) whose outermost instances are gathered and reduced together; none makes
            the whole module one unit.
        strategy: ZeRO stage: a `Strategy`, its name, or 0-3.
        mixed_precision_policy: dtypes of main weights, main gradients, wire and sum.
        device: where buckets live; None is the device of the parameters.
        grad_divisor: what the summed gradients are divided by, once a step. None is the number of ranks, so that a
            loss averaged on each rank gives the averaged gradient; a loop over k microbatches then scales its loss by
            1/k. Given the number of global microbatches (or tokens), no loss is ever scaled.
        numerics: promise about the order of sums.
        prefetch: units gathered ahead of the one in use.
        initial_value: gives each parameter's full value by name, the same on all ranks; None takes what parameters and
            buffers hold on the group's first rank, as DDP does.
        report_nan_in_param_grad: look for NaN and infinity in every gradient before it is reduced; finishing the step's
            gradients then raises FloatingPointError on all ranks (see `harness.fsdp.guards`). Off costs nothing.
        eager_limit_bytes: on gloo, bytes a peer up to which data is sent in messages; what is longer is read from the
            sender's memory where all ranks share a host that allows it. None always sends.
        watchdog_timeout_s: seconds a wait for a collective may last before every rank raises one error that names
            ranks, units and collectives (see `harness.fsdp.watchdog`); None waits as long as the backend does.
        check_collectives: compare every collective over all ranks before its data moves; slow.
        check_replicas_every: steps after which ranks compare a hash of the weights that all of them hold; 0 never.

    Raises:
        ValueError: an argument's value, with what would be valid.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        unit_modules: Sequence[type[nn.Module] | str] | None = None,
        strategy: Strategy | str | int = Strategy.optim_grads_params,
        mixed_precision_policy: MixedPrecisionPolicy | None = None,
        device: torch.device | None = None,
        grad_divisor: float | None = None,
        numerics: Numerics | str = Numerics.fast,
        prefetch: int = 1,
        initial_value: InitialValue | None = None,
        report_nan_in_param_grad: bool = False,
        eager_limit_bytes: int | None = EAGER_LIMIT_BYTES,
        watchdog_timeout_s: float | None = None,
        check_collectives: bool = False,
        check_replicas_every: int = 0,
    ) -> None:
        super().__init__()
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch} must be 0 or more")
        if eager_limit_bytes is not None and eager_limit_bytes < 0:
            raise ValueError(f"eager_limit_bytes={eager_limit_bytes} must be 0 or more, or None")
        if grad_divisor is not None and not grad_divisor > 0:
            raise ValueError(f"grad_divisor={grad_divisor} must be positive")
        if module.__dict__.get(_MARK, False):
            raise ValueError(f"{type(module).__name__} is sharded already; shard a module once")
        self.module = module
        self.strategy = Strategy.parse(strategy)
        self.numerics = Numerics(numerics)
        self.policy = mixed_precision_policy or MixedPrecisionPolicy()
        device = device or next(module.parameters()).device
        _leave_meta(module, device, initial_value)
        self._runtime = DeviceRuntime(device)
        self._memory = BucketMemory(device)
        self._comm = Communicator(group, self._runtime, eager_limit_bytes)
        self.grad_divisor = float(grad_divisor if grad_divisor is not None else self._comm.size)
        self._units = self._build_units(resolve_classes(unit_modules or ()), initial_value)
        self.buckets: list[Bucket] = [bucket for unit in self._units for bucket in unit.buckets]
        self._trainable = {bucket.name: bucket for bucket in self.buckets if bucket.trainable}
        self._reductions = {
            name: make_reduction(self._comm, bucket.dtypes, self.numerics) for name, bucket in self._trainable.items()
        }
        self._gather = GatherPipeline(self._units, self._comm, self._runtime, prefetch)
        self._guard = GradientGuard(list(self._trainable.values()), self._comm) if report_nan_in_param_grad else None
        self._reduce = ReducePipeline(
            self._units,
            self._reductions,
            self._comm,
            self._runtime,
            self._memory,
            factor=1.0 / self.grad_divisor,
            guard=self._guard,
            before_wait=self._gather.pass_turn,
        )
        self._driver = HookDriver(
            self._units,
            self._gather,
            self._reduce,
            before_backward=self._before_backward,
            should_reduce=lambda: self.strategy.shards_grads or self._sync,
        )
        self._watchdog = watch_groups(
            [self._comm.group], self._runtime, watchdog_timeout_s, check_collectives, self._driver.where
        )
        self._drift = ReplicaCheck(lambda: whole_weights(self.buckets), self._comm, check_replicas_every)
        self._installing: list[Pending] = []
        self._sync = True
        self._reduced = self._unreduced = self._finished = False
        self._sharded_optimizer: optim.ShardedOptimizer | None = None
        module.__dict__[_MARK] = True
        for each in module.modules():
            each.register_state_dict_pre_hook(refuse_state_dict)
            each.register_load_state_dict_pre_hook(refuse_state_dict)

    def _build_units(self, classes: Sequence[type[nn.Module]], initial_value: InitialValue | None) -> list[Unit]:
        context = BucketContext(self.strategy, self._comm.rank, self._comm.size, self._memory)
        params = dict(self.module.named_parameters())
        initial = initial_value or (lambda name, shape: self._comm.from_first(params[name], f"initial {name}"))
        if initial_value is None:
            self._take_buffers_from_first()
        units = []
        for plan in plan_units(self.module, classes):
            buckets = []
            for key, members in plan.buckets.items():
                name = f"{plan.name}/{str(key.dtype).removeprefix('torch.')}" + ("" if key.trainable else "/frozen")
                dtypes = self.policy.resolve(key.dtype) if key.trainable else Dtypes.frozen(key.dtype)
                buckets.append(Bucket(name, key, members, dtypes, context, initial))
            units.append(Unit(plan.name, plan.module, buckets))
        return units

    def _take_buffers_from_first(self) -> None:
        for name, buffer in self.module.named_buffers():
            value = self._comm.from_first(buffer, f"initial {name}")
            if not torch.equal(value, buffer.to(value.device)):
                buffer.copy_(value)

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedModel:
        raise NotImplementedError("a sharded model cannot be cast or moved; give it its dtype and device before")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    # -- microbatches --------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate; the first one outside ends the step's accumulation.

        `no_shard` and `optim` then communicate once a step; `optim_grads` and above reduce every microbatch all the
        same.
        """
        with self._syncing(False):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Backwards inside end the step's accumulation, whatever `set_model_auto_sync` said."""
        with self._syncing(True):
            yield

    @contextmanager
    def _syncing(self, value: bool) -> Iterator[None]:
        before, self._sync = self._sync, value
        try:
            yield
        finally:
            self._sync = before

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Whether a backward outside `no_sync` and `sync` ends the step's accumulation."""
        self._sync = sync_model

    def _before_backward(self) -> None:
        self._check_may_accumulate()
        if self._guard is not None:
            self._guard.begin_backward()

    def _check_may_accumulate(self) -> None:
        if self._finished:
            raise RuntimeError(
                "a backward after this step's gradients were finished would add unscaled gradients to scaled ones; call"
                " zero_grad() first, or wrap all microbatches but the last in no_sync()"
            )
        if self._reduced and not self.strategy.shards_grads:
            raise RuntimeError(
                "a second backward with synchronisation would reduce already reduced gradients again; wrap all"
                " microbatches but the last in no_sync(), or call zero_grad() between them"
            )
        self._reduced = self.strategy.shards_grads or self._sync
        self._unreduced = not self._reduced

    # -- a step --------------------------------------------------------------------------------------------------

    def finish_grad_sync(self) -> None:
        """Wait for the step's reductions and scale the gradients, once. Further calls do nothing. *Collective.*

        Raises:
            RuntimeError: the step's last backward ran inside no_sync(), so gradients were never reduced.
            FloatingPointError: with `report_nan_in_param_grad`, a gradient of any rank is not finite.
        """
        self._wait_until_installed()
        self._driver.recover()
        if self._driver.failed:
            raise RuntimeError(
                "the last backward raised, or a reduction of it; its gradients are incomplete: call zero_grad() and try"
                " again"
            )
        if self._unreduced:
            raise RuntimeError(
                "gradients were never reduced: the step's last backward ran inside no_sync(); run the last one outside"
            )
        if self._finished:
            return
        if not self.has_gradients:
            for bucket in self._trainable.values():
                bucket.settle_main_grads()
            return
        self._drain()
        if self._guard is not None:
            self._guard.report()
        self._reduce.finish()
        self._finished = True

    def _drain(self) -> None:
        try:
            self._reduce.drain()
        except BaseException:
            self._driver.failed = True
            raise

    @property
    def has_gradients(self) -> bool:
        """Whether a backward ran since gradients were last forgotten; without one, a step changes nothing."""
        return self._reduced or self._unreduced

    def grad_norm(self) -> float:
        """Euclidean norm of the step's gradient over all ranks, each parameter counted once. *Collective.*"""
        self.finish_grad_sync()
        return optim.gradient_norm(self.buckets, self._comm, self.numerics)

    def weight_norm(self) -> float:
        """Euclidean norm of all main weights over all ranks, each parameter counted once. *Collective.*"""
        return optim.weight_norm(self.buckets, self._comm, self.numerics)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients down to `max_norm` where their norm exceeds it; returns the norm before. *Collective.*"""
        norm = self.grad_norm()
        optim.clip_gradients(self.buckets, norm, float(max_norm))
        return norm

    def install_weights(self) -> None:
        """Bring updated main weights into the compute weights; what was gathered before is dropped. *Collective.*

        Raises:
            RuntimeError: compute weights were edited in place, which the main weights would overwrite.
        """
        for bucket in self.buckets:
            bucket.check_unedited()
        self._gather.release_all()
        self._wait_until_installed()
        self._installing = optim.install_weights(self.buckets, self._comm)
        self._drift.after_step()

    def _wait_until_installed(self) -> None:
        """Wait until the other ranks have taken this rank's weights too, so that they may change."""
        with labels.waiting():
            for each in self._installing:
                each.wait()
        self._installing = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, main and local. `set_to_none` makes no difference: storage is flat and stays."""
        self._driver.recover()
        self._driver.failed = False
        self._reduce.discard()
        for bucket in self.buckets:
            bucket.zero_gradients()
        self._reduced = self._unreduced = self._finished = False
        if self._guard is not None:
            self._guard.forget()

    # -- state ---------------------------------------------------------------------------------------------------

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Main weights by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        return self._in_model_order(state.full_weights(self.buckets, self._comm), self.buckets)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Finished gradients by parameter name, whole, on the CPU. *Collective*; run it to its end on all ranks."""
        self.finish_grad_sync()
        return self._in_model_order(state.full_gradients(self.buckets, self._comm), list(self._trainable.values()))

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

    def local_state(self) -> dict[str, Tensor]:
        """This rank's flat state, for resuming on the same layout."""
        return state.local_state(self.buckets, self._require_optimizer())

    def load_local_state(self, values: Mapping[str, Tensor]) -> None:
        """Take `local_state` back, effective in the very next forward. *Collective.*

        Raises:
            ValueError: it does not fit; nothing was loaded.
        """
        self._wait_until_installed()
        state.load_local_state(self.buckets, self._require_optimizer(), values)
        self.install_weights()
        self.zero_grad()

    def _require_optimizer(self) -> optim.ShardedOptimizer:
        if self._sharded_optimizer is None:
            raise RuntimeError("no optimizer is attached; call fully_shard_optimizer(model, optimizer) first")
        return self._sharded_optimizer

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes this rank keeps, by role: weights (compute, main), main_grads, optimizer, padding, buffers.

        Between steps, from `zero_grad` to the next reduction, shards of main_grads are not there.
        """
        total = {"compute_weights": 0, "main_weights": 0, "main_grads": 0, "padding": 0, "optimizer": 0}
        for bucket in self.buckets:
            for role, num_bytes in bucket.persistent_bytes().items():
                total[role] += num_bytes
        if self._sharded_optimizer is not None:
            used, padding = self._sharded_optimizer.state_bytes()
            total["optimizer"] += used
            total["padding"] += padding
        total["buffers"] = sum(buffer.nbytes for buffer in self.module.buffers())
        return total

    def transport(self) -> dict[str, str]:
        """How data moves between ranks here, with the reason where the faster way was asked for and not found."""
        return self._comm.transport()

    @property
    def transient_peak_bytes(self) -> int:
        """Most bytes of temporary buckets (gathered weights, unreduced gradients) alive at once so far."""
        return self._memory.peak_bytes

    def close(self) -> None:
        """Take hooks off and end threads. The module keeps whatever weights it holds."""
        self._watchdog.close()
        self._reduce.drain()
        self._wait_until_installed()
        self._driver.remove()
        self._reduce.close()
        self._comm.close()


def _leave_meta(module: nn.Module, device: torch.device, initial_value: InitialValue | None) -> None:
    """Give meta parameters a device without memory; the objects stay the same, for optimizers that hold them."""
    for name, param in list(module.named_parameters()):
        if not param.is_meta:
            continue
        if device.type == "meta" or initial_value is None:
            raise ValueError(f"parameter {name} is on the meta device: give `device` and `initial_value`")
        real = nn.Parameter(placeholder(param.shape, param.dtype, device), requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, real)


def refuse_state_dict(*_: Any) -> None:
    """Raise NotImplementedError: a hook of modules and optimizers whose tensors are pieces."""
    raise NotImplementedError(
        "state_dict() and load_state_dict() of what is sharded are not built;"
        " use ShardedModel.full_weights() for whole tensors by name, or"
        " ShardedModel.local_state() to resume on the same layout"
    )
