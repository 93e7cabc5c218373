"""The adapter of our own engine: `harness.fsdp` behind the protocol.

Losses of fp16 are multiplied by torch's `GradScaler`, so that gradients do not vanish. Factors are powers of two and
gradients are fp32 or wider, so unscaling is exact above 2^-126. It precedes norm and clipping, which see the true
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.config.derived import engine_options, global_microbatches, wants_infiniband_sharp
from harness.config.schema import DTYPE_ROLES, Config, DtypeConfig, SharpAxis
from harness.engines import optim
from harness.engines.base import evaluating, mesh_of
from harness.engines.protocol import TORCH_DTYPES, Engine, Microbatch, Ranks, Scaled, Seen, State, Workload
from harness.fsdp import MixedPrecisionPolicy, axis_groups, create_state, fully_shard_model, fully_shard_optimizer

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
        self.loss_scale: LossScale | None = None
        if dtype.loss_scale != "none":
            self.loss_scale = LossScale(self.model, self.optimizer, dtype.loss_scale_growth_steps)
        self._scaled: Scaled | None = None

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        """Run one microbatch; `no_shard` and `optim` communicate only in the last one."""
        with nullcontext() if last else self.model.no_sync():
            loss = self.workload.loss(self.model, batch)
            (loss if self.loss_scale is None else self.loss_scale.scale(loss)).backward()
        return loss.detach()

    def evaluate(self, batches: Iterable[Microbatch]) -> list[float]:
        """Updated weights are installed before, and again in the next forward, so that a step sends what it does
        without an evaluation."""
        if self._scaled is None or not self._scaled.skipped:
            self.model.install_weights()
        with evaluating(self.model, self.device):
            losses = [self.workload.loss(self.model, batch).item() for batch in batches]
        held = self.state().tensors.values()
        torch.autograd.graph.increment_version([t.to_local() if isinstance(t, DTensor) else t for t in held])
        return losses

    def step(self, lr: float) -> float:
        """Norm before clipping; NaN where a loss scale overflowed."""
        norm: float | Tensor
        clip = self.config.optimizer.clip_norm
        optim.set_lr(self.optimizer, lr)
        if self.loss_scale is not None:
            norm, self._scaled = self.loss_scale.step(clip)
        else:
            norm = self.model.grad_norm() if clip is None else self.model.clip_grad_norm_(clip)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)  # here at the earliest the host waits for the device

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
        return self.model.engine.local_gradients()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded main weights on the CPU, gathered one bucket at a time; frozen ones in the compute dtype."""
        main = TORCH_DTYPES[self.config.dtype.main_params]
        return ((name, weight.to(main)) for name, weight in self.model.full_weights())

    def weight_norm(self) -> float:
        return self.model.weight_norm()

    def expect(self, held: Mapping[str, Tensor]) -> None:
        optim.make_room(self.optimizer, dict(self.model.named_parameters()), held)

    def state(self) -> State:
        """This rank's rows of weights and optimizer state, and the loss scale where there is one."""
        held, scale = self.model.sharded_state(), self.loss_scale
        scaling = {} if scale is None else {f"{LOSS_SCALE}{key}": value for key, value in scale.state_dict().items()}

        def adopt() -> None:
            self.model.zero_grad()
            if scale is not None:
                scale.load_state_dict({key.removeprefix(LOSS_SCALE): value for key, value in scaling.items()})

        return State(held | scaling, adopt)

    def accounted_bytes(self) -> dict[str, int]:
        """Persistent bytes by role; main weights that are the compute weights count once, as compute weights."""
        return self.model.engine.persistent_bytes()

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
        return self.model.engine.meshes.dense.inner.facts()

    def counters(self) -> dict[str, int]:
        counted = self.model.engine.counters()
        self.model.engine.memory.reset_peak()
        return counted

    def user_buffers(self) -> dict[str, str]:
        return self.model.engine.user_buffers.facts()

    def close(self) -> None:
        self.model.close()


def policy_of(dtype: DtypeConfig) -> MixedPrecisionPolicy:
    asked = {role: getattr(dtype, role) for role in DTYPE_ROLES if role != "compute"}
    formats: dict[str, Any] = {f"{role}_dtype": format and TORCH_DTYPES[format] for role, format in asked.items()}
    return MixedPrecisionPolicy(**formats, allow_low_precision_grads=dtype.allow_low_precision_grads)


def _axes(config: Config, ranks: Ranks) -> dict[str, Any]:
    """Arguments of `fully_shard_model` for several axes. Collective over all ranks."""
    outer = {"dp_outer_dim": "dp_outer"} if config.mesh.dp_outer > 1 else {}
    if config.mesh.tp > 1:
        return {"device_mesh": mesh_of(config, ranks), "dp_shard_dim": "dp_shard", "tp_dim": "tp"} | outer
    if not outer:
        return {}
    mesh = _sharp_mesh(config, ranks) if wants_infiniband_sharp(config) else mesh_of(config, ranks)
    return {"device_mesh": mesh, "dp_shard_dim": "dp_shard", "hybrid_fsdp_group": dist.group.WORLD} | outer


def _sharp_mesh(config: Config, ranks: Ranks) -> DeviceMesh:
    """Two-axis mesh, one of whose communicators owns InfiniBand SHARP. Collective over all ranks."""
    owner = "dp_outer" if config.sharp.group is SharpAxis.dp_outer else "dp"
    inner, outer = axis_groups(config.mesh.dp_outer, ranks.device, owner)
    grid = torch.arange(ranks.world_size).view(config.mesh.dp_outer, -1)
    return DeviceMesh.from_group([outer, inner], ranks.device.type, grid, mesh_dim_names=("dp_outer", "dp_shard"))


GROWING_FROM = 2.0**16
SCALE_KEY, GOOD_STEPS_KEY = "scale", "good_steps"


class LossScale:
    """A loss scale for one model and its optimizer.

    It is halved at an overflow, whose update all ranks skip, and doubled after `growth_interval` steps without one.
    Args: model: as `fully_shard` returns it.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, growth_interval: int) -> None:
        self.model = model
        self.optimizer = optimizer
        device = optimizer.param_groups[0]["params"][0].device.type
        self.scaler = torch.amp.GradScaler(device, init_scale=GROWING_FROM, growth_interval=growth_interval)
        self._is_unscaled = False

    @property
    def value(self) -> float:
        return float(self.scaler.get_scale())

    def scale(self, loss: Tensor) -> Tensor:
        """Loss times the factor, in fp32 or wider, so that the factor itself does not overflow."""
        return self.scaler.scale(loss.to(torch.promote_types(loss.dtype, torch.float32)))

    def unscale_(self) -> None:
        """Divide the step's gradients by the factor, once. Collective over all ranks."""
        if self._is_unscaled:
            return
        self._is_unscaled = True
        self.scaler.unscale_(self.optimizer)

    def step(self, max_norm: float | None) -> tuple[float, Scaled]:
        """Clip and update, unless gradients overflowed; then adapt the factor. Collective over all ranks.

        Returns the norm of the unscaled gradient before clipping, NaN if the update was skipped.

        Raises `FloatingPointError`: gradients are not finite at a factor of 1; no weight was changed.
        """
        self.unscale_()
        self._is_unscaled = False
        scale = self.value
        norm = float(self.model.grad_norm() if max_norm is None else self.model.clip_grad_norm_(max_norm))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.value < scale
        if skipped and scale <= 1.0:
            raise FloatingPointError(
                "gradients are not finite at a loss scale of 1, where no smaller one can help; no weight was changed."
                " engine.report_nan_in_param_grad=true with dtype.loss_scale=none names the tensor, the rank and the"
                " microbatch"
            )
        return math.nan if skipped else norm, Scaled(scale, skipped)

    def state_dict(self) -> dict[str, Tensor]:
        """Factor (fp64) and steps since it changed (int64), both of shape []."""
        held = self.scaler.state_dict()
        return {
            SCALE_KEY: torch.tensor(held["scale"], dtype=torch.float64),
            GOOD_STEPS_KEY: torch.tensor(held["_growth_tracker"], dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        saved = {"scale": float(state[SCALE_KEY]), "_growth_tracker": int(state[GOOD_STEPS_KEY])}
        self.scaler.load_state_dict(self.scaler.state_dict() | saved)
        self._is_unscaled = False
