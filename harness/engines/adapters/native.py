"""The adapter of our own engine: `harness.fsdp` behind the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.config.derived import engine_options, global_microbatches, loss_scale, wants_infiniband_sharp
from harness.config.schema import DTYPE_ROLES, Config, DtypeConfig, SharpAxis
from harness.engines import optim
from harness.engines.base.sharded import data_parallel_mesh, grid_mesh
from harness.engines.evaluating import evaluating
from harness.engines.loss_scale import LossScale
from harness.engines.protocol import Engine, Microbatch, Ranks, Scaled, Seen, State, Workload
from harness.engines.torch_dtypes import TORCH_DTYPES
from harness.fsdp import MixedPrecisionPolicy, create_state, fully_shard_model, fully_shard_optimizer

LOSS_SCALE = "loss_scale/"


class NativeEngine(Engine):
    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        self.workload = workload
        self.config, self.device = config, ranks.device
        dtype = config.dtype
        module = workload.build("meta", TORCH_DTYPES[dtype.compute])
        workload.quantize(module, ranks.device)
        workload.materialise_buffers(module, ranks.device)
        axes = _axes(config, ranks)
        if config.mesh.tp > 1:
            workload.cut(module, axes["device_mesh"]["tp"], sequence_parallel=config.mesh.sequence_parallel)
        self.model = fully_shard_model(
            module,
            **axes,
            fsdp_unit_modules=workload.unit_classes,
            zero_dp_strategy=config.sharding.strategy,
            outer_dp_sharding_strategy=config.sharding.outer,
            mixed_precision_policy=policy_of(dtype),
            device=ranks.device,
            grad_divisor=global_microbatches(config),
            initial_value=workload.initial_weight,
            exact_terms=global_microbatches(config),
            **engine_options(config),
        )
        params = dict(module.named_parameters())
        shapes = {name: param.shape for name, param in params.items()}
        groups = optim.groups_of(config.optimizer, workload, params, shapes)
        optimizer = optim.make_optimizer(config.optimizer, groups, fused=True)
        # what no microbatch used is updated like all else under every engine here: peers cannot tell the difference
        self.optimizer = fully_shard_optimizer(self.model, optimizer, steps_unused=True)
        create_state(self.optimizer)
        scale = loss_scale(config)
        self.loss_scale: LossScale | None = None
        if scale is not None:
            self.loss_scale = LossScale(self.model, self.optimizer, scale, dtype.loss_scale_growth_steps)
        self._scaled: Scaled | None = None

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        """Run one microbatch; `no_shard` and `optim` communicate only in the last one."""
        with nullcontext() if last else self.model.no_sync():
            loss = self.workload.loss(self.model, batch)
            (loss if self.loss_scale is None else self.loss_scale.scale(loss)).backward()
        return loss.detach()

    def evaluate(self, batches: Iterable[Microbatch]) -> list[float]:
        """Updated weights are installed before, and again in the next forward, so that a step sends what it does
        without an evaluation; only maxima of delayed FP8 scaling are exchanged here."""
        if self._scaled is None or not self._scaled.skipped:
            self.model.install_weights()
        with evaluating(self.model, self.device):
            losses = [self.workload.loss(self.model, batch).item() for batch in batches]
        torch.autograd.graph.increment_version(list(self.state_dict().values()))
        return losses

    def step(self, lr: float) -> float:
        """Norm before clipping; NaN where a loss scale overflowed."""
        clip = self.config.optimizer.clip_norm
        if self.loss_scale is not None:
            return self._scaled_step(self.loss_scale, lr, clip)
        norm = self.model.grad_norm() if clip is None else self.model.clip_grad_norm_(clip)
        optim.set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)  # here at the earliest the host waits for the device

    def _scaled_step(self, scale: LossScale, lr: float, clip: float | None) -> float:
        optim.set_lr(self.optimizer, lr)
        outcome = scale.step(clip)
        self._scaled = Scaled(outcome.scale, outcome.skipped)
        self.optimizer.zero_grad()
        return outcome.norm

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        if self.loss_scale is not None:
            self.loss_scale.unscale_()
        return self.model.full_gradients()

    def finish_gradients(self) -> None:
        self.model.finish_grad_sync()

    def local_gradients(self) -> Mapping[str, Tensor]:
        """This rank's main gradients, unscaled, sharing memory."""
        if self.loss_scale is not None:
            self.loss_scale.unscale_()
        return self.model.local_gradients()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded main weights on the CPU, gathered one bucket at a time; frozen ones in the compute dtype."""
        main = TORCH_DTYPES[self.config.dtype.main_params]
        return ((name, weight.to(main)) for name, weight in self.model.full_weights())

    def weight_norm(self) -> float:
        return self.model.weight_norm()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's rows of weights and optimizer state, and the loss scale where there is one."""
        return _rows_of(self.state())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        scale = {key.removeprefix(LOSS_SCALE): value for key, value in state.items() if key.startswith(LOSS_SCALE)}
        if self.loss_scale is not None:
            self.loss_scale.check_state(scale)
        elif scale:
            raise ValueError(f"state holds a loss scale, and dtype.loss_scale={self.config.dtype.loss_scale} has none")
        held = self.state()
        optim.load_state(_rows_of(held), state)
        held.adopt()

    def state(self) -> State:
        held, scale = self.model.sharded_state(), self.loss_scale
        scaling = {} if scale is None else {f"{LOSS_SCALE}{key}": value for key, value in scale.state_dict().items()}

        def adopt() -> None:
            self.model.zero_grad()
            if scale is not None:
                scale.load_state_dict({key.removeprefix(LOSS_SCALE): value for key, value in scaling.items()})

        return State(held | scaling, adopt)

    def accounted_bytes(self) -> dict[str, int]:
        """Persistent bytes by role; main weights that are the compute weights count once, as compute weights."""
        return self.model.persistent_bytes()

    def seen(self) -> Seen | None:
        """The user's module; its losses are unscaled, but for the loss scale of the step.

        None under tensor parallelism, where no rank has unsharded weights.
        """
        if self.config.mesh.tp > 1:
            return None
        factor = 1 if self.loss_scale is None else int(self.loss_scale.value)
        return Seen(self.model, factor * global_microbatches(self.config), TORCH_DTYPES[self.config.dtype.compute])

    def scaled(self) -> Scaled | None:
        return self._scaled

    def facts(self) -> dict[str, str]:
        """Transport between ranks, and spare cores for work beside the backward."""
        return self.model.transport()

    def counters(self) -> dict[str, int]:
        counted = self.model.counters()
        self.model.reset_counters()
        return counted

    def user_buffers(self) -> dict[str, str]:
        return self.model.user_buffers()

    def close(self) -> None:
        self.model.close()


def _rows_of(state: State) -> dict[str, Tensor]:
    return {key: each.to_local() if isinstance(each, DTensor) else each for key, each in state.tensors.items()}


def policy_of(dtype: DtypeConfig) -> MixedPrecisionPolicy:
    asked = {role: getattr(dtype, role) for role in DTYPE_ROLES if role != "compute"}
    formats: dict[str, Any] = {f"{role}_dtype": format and TORCH_DTYPES[format] for role, format in asked.items()}
    return MixedPrecisionPolicy(**formats, allow_low_precision_grads=dtype.allow_low_precision_grads)


def _axes(config: Config, ranks: Ranks) -> dict[str, Any]:
    """Arguments of `fully_shard_model` for several axes. Collective over all ranks."""
    outer = {"dp_outer_dim": "dp_outer"} if config.mesh.dp_outer > 1 else {}
    if config.mesh.tp > 1:
        return {"device_mesh": grid_mesh(config, ranks), "dp_shard_dim": "dp_shard", "tp_dim": "tp"} | outer
    if not outer:
        return {}
    mesh = _sharp_mesh(config, ranks) if wants_infiniband_sharp(config) else data_parallel_mesh(config, ranks)
    return {"device_mesh": mesh, "dp_shard_dim": "dp_shard", "hybrid_fsdp_group": dist.group.WORLD} | outer


def _sharp_mesh(config: Config, ranks: Ranks) -> DeviceMesh:
    """Two-axis mesh, one of whose communicators owns InfiniBand SHARP. Collective over all ranks."""
    assert ranks.sharp is not None
    owner = "dp_outer" if config.sharp.group is SharpAxis.dp_outer else "dp"
    inner, outer = ranks.sharp.axis_groups(config.mesh.dp_outer, owner)
    grid = torch.arange(ranks.world_size).view(config.mesh.dp_outer, -1)
    return DeviceMesh.from_group([outer, inner], ranks.device.type, grid, mesh_dim_names=("dp_outer", "dp_shard"))
