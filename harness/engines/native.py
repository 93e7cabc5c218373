"""The adapter of our own engine: `harness.fsdp` behind the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext

from torch import Tensor

from harness.config.derived import accumulate_dtype, global_microbatches
from harness.config.schema import Config
from harness.engines import optim
from harness.engines.protocol import Engine, Microbatch, Ranks, Seen, Workload
from harness.engines.replicated import TORCH_DTYPES
from harness.fsdp.api import fully_shard_optimizer
from harness.fsdp.model import ShardedModel
from harness.fsdp.policy import MixedPrecisionPolicy, Numerics


class NativeEngine(Engine):
    """Built on meta, initialised by name, sharded over the default process group."""

    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        self.workload = workload
        self.config = config
        dtype = config.dtype
        module = workload.build("meta", TORCH_DTYPES[dtype.compute])
        workload.materialise_buffers(module, ranks.device)
        self.model = ShardedModel(
            module,
            unit_modules=workload.unit_classes,
            strategy=config.sharding.strategy.name,
            mixed_precision_policy=MixedPrecisionPolicy(
                main_params_dtype=TORCH_DTYPES[dtype.main_params],
                main_grads_dtype=TORCH_DTYPES[dtype.main_grads],
                grad_comm_dtype=TORCH_DTYPES[dtype.grad_comm],
                grad_accum_dtype=TORCH_DTYPES[accumulate_dtype(config)],
                allow_low_precision_grads=dtype.allow_low_precision_grads,
            ),
            device=ranks.device,
            grad_divisor=global_microbatches(config),
            numerics=Numerics(config.numerics.mode.value),
            prefetch=config.engine.prefetch,
            initial_value=workload.initial_weight,
            eager_limit_bytes=config.engine.eager_limit_bytes,
            report_nan_in_param_grad=config.engine.report_nan_in_param_grad,
            watchdog_timeout_s=config.engine.watchdog_timeout_s,
            check_collectives=config.engine.check_collectives,
            check_replicas_every=config.engine.check_replicas_every,
        )
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, param in module.named_parameters():
            groups[workload.decays(name, param.shape)].append(param)
        optimizer = optim.make_optimizer(
            config.optimizer, [optim.Group(params, decays) for decays, params in groups.items()], fused=True
        )
        self.optimizer = fully_shard_optimizer(self.model, optimizer)
        optim.create_state(self.optimizer)

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        """Run one microbatch; only the last one lets `no_shard` and `optim` communicate."""
        with nullcontext() if last else self.model.no_sync():
            loss = self.workload.loss(self.model, batch)
            loss.backward()
        return loss.detach()

    def step(self, lr: float) -> float:
        """Clip, update, drop the gradients; returns the norm before clipping."""
        clip = self.config.optimizer.clip_norm
        norm = self.model.grad_norm() if clip is None else self.model.clip_grad_norm_(clip)
        optim.set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Whole main gradients on the CPU, gathered one bucket at a time."""
        return self.model.full_gradients()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole main weights on the CPU, gathered one bucket at a time; frozen ones are kept in the compute dtype."""
        main = TORCH_DTYPES[self.config.dtype.main_params]
        return ((name, weight.to(main)) for name, weight in self.model.full_weights())

    def weight_norm(self) -> float:
        """Norm of the main weights, without gathering them."""
        return self.model.weight_norm()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's flat weights and optimizer state."""
        return self.model.local_state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_dict` gave."""
        self.model.load_local_state(state)

    def accounted_bytes(self) -> dict[str, int]:
        """Persistent bytes by role; main weights that are the compute weights are counted once, as compute weights."""
        return self.model.persistent_bytes()

    def seen(self) -> Seen:
        """The user's module; its losses are unscaled."""
        return Seen(self.model.module, global_microbatches(self.config), TORCH_DTYPES[self.config.dtype.compute])

    def facts(self) -> dict[str, str]:
        """How data moves between ranks, and whether work beside the backward has cores of its own."""
        return self.model.transport()

    def close(self) -> None:
        """Take hooks off and end threads."""
        self.model.close()
