"""NVIDIA's megatron-fsdp as released, behind the protocol.

[Note: Used as documented] `fully_shard_model` and `fully_shard_optimizer` over an explicit mesh, defaults elsewhere:
both overlap flags stay true (without them strategies `optim` and `optim_grads` train wrongly, docs/records/upstream/).
Not `fully_shard`, which puts all parameters into one optimizer group and so gives weight decay to vectors.

[Note: Microbatches] With `sync_model_each_microbatch=False` the caller says which microbatch is the last one. `no_sync`
is no help for k = 1: before it was left once, no microbatch is the last, and `no_shard` and `optim` never reduce. So
the attribute it sets, `is_last_microbatch`, is set here before every microbatch.

[Note: Main weights] The package copies main weights from the compute weights, which bf16 has rounded by then. It takes
an unrounded value from a parameter that offers `get_high_precision_init_val`, meant for FP8; every parameter offers it
here, so that main weights equal the initial values to the bit. Main weights are always a buffer of their own, even
where they have the compute dtype: that is what naming `main_params_dtype` means to the package.

[Note: The step before the first] `fully_shard_optimizer` takes an optimizer step on zero gradients to create state, and
leaves its traces: Adam's step count is 1 (the first updates are too small), and momentum holds the weight decay of a
gradient (SGD, Adam). That is how the release trains, so it is left alone. The one thing kept from it is the weights:
that step is taken with a learning rate of 0, because all engines start from the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from harness.capture.shards import flat_pieces
from harness.config.schema import Config, OptimizerName, OuterStrategy, Registration, Strategy
from harness.engines import optim
from harness.engines.adapters import megatron_on_cpu
from harness.engines.base import ShardedEngine
from harness.engines.protocol import TORCH_DTYPES, Ranks, Seen, State, Workload
from harness.probe.step_checks.pieces import Piece, local_part

OUTER, INNER, TENSOR = "dp_outer", "dp_shard", "tp"
"""Names of the mesh's axes; the package requires a tensor-parallel one, even of size 1."""


class MegatronEngine(ShardedEngine):
    """All four strategies, HSDP of the sharded ones, HFSDP of `optim_grads_params`."""

    model: Any
    optimizer: Any

    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        """Build on meta where possible, shard, and wrap the optimizer.

        Raises `ModuleNotFoundError`: megatron-fsdp is not installed.
        """
        if ranks.device.type == "cpu":
            megatron_on_cpu.install()
        package = import_module("megatron_fsdp")
        super().__init__(workload, config, ranks)
        self.shards_state = config.sharding.strategy is not Strategy.no_shard
        module = self._build()
        mesh, outer = self._mesh()
        self.model = self.wrapped = package.fully_shard_model(
            module,
            device_mesh=mesh,
            dp_shard_dim=INNER,
            tp_dim=TENSOR,
            **outer,
            expt_device_mesh=mesh,  # parameters with ".experts." in their names are experts to it; here no other axis
            fsdp_unit_modules=list(workload.unit_classes),
            zero_dp_strategy=config.sharding.strategy.name,
            device=ranks.device,
            init_model_with_meta_device=next(module.parameters()).is_meta,
            mixed_precision_policy=package.MixedPrecisionPolicy(
                main_params_dtype=TORCH_DTYPES[config.dtype.main_params],
                main_grads_dtype=TORCH_DTYPES[config.dtype.main_grads],
                grad_comm_dtype=TORCH_DTYPES[config.dtype.grad_comm],
            ),
            sync_model_each_microbatch=False,
            preproc_state_dict_for_dcp_ckpt=False,
            report_nan_in_param_grad=config.engine.report_nan_in_param_grad,
            **_user_buffers(config, ranks.device),
        )
        workload.materialise_buffers(module, ranks.device)  # emptied again where beside a parameter on meta
        self.weights = dict(module.named_parameters())
        self.trained = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        self.groups: list[Any] = list(self.model.param_and_grad_buffer.parameter_groups)
        if self.shards_state:
            over_all = config.mesh.dp_outer > 1 and config.sharding.outer is OuterStrategy.optim
            self.group = dist.group.WORLD if over_all else mesh[INNER].get_group()
        self.optimizer = self._optimizer(package)
        self.pieces = self._pieces()

    def _rhythm(self, last: bool) -> AbstractContextManager[object]:
        self.model.is_last_microbatch = last
        return nullcontext()

    def _after_backward(self, last: bool) -> None:
        if last:
            self.model.finish_grad_sync()

    def _update(self) -> None:
        self.optimizer.step(sync_grad_before_optimizer_step=False)  # again, it would take unclipped ones

    def _piece(self, tensor: Tensor) -> Tensor:
        return local_part(tensor)

    def seen(self) -> Seen:
        return Seen(self.model.module, self.ranks.world_size, TORCH_DTYPES[self.config.dtype.compute])

    def flat_pieces(self) -> dict[str, Piece]:
        return flat_pieces(self.model, self.optimizer, self.optimizer.state)

    def _gradients(self) -> dict[str, Tensor]:
        """Reduced gradients, of weights of which this rank has elements."""
        self._demand_reduced()
        return {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}

    def state(self) -> State:
        tensors = {f"weights/{name}": self._piece(weight) for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            for entry, value in self.optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{name}/{entry}"] = self._piece(value)
        return State(tensors, self.model.install_optimized_model_weights, self.portable)

    def user_buffers(self) -> dict[str, str]:
        """Settings passed to the package, which reports success of registration in its log only (see NCCL's log)."""
        asked = _user_buffers(self.config, self.ranks.device)
        if not asked:
            return {}
        kind = "local" if asked["disable_symmetric_registration"] else "symmetric"
        return {
            "effective": f"asked of megatron-fsdp ({kind})",
            "reason": "the package says only in its log if it failed",
        }

    def accounted_bytes(self) -> dict[str, int]:
        """Bytes by role, padding apart; modules outside units stay gathered, and count as compute weights."""
        total = dict.fromkeys(("compute_weights", "main_weights", "main_grads", "optimizer", "padding", "buffers"), 0)
        for group in self.groups:
            compute = group.hfsdp_helper_wbuf or group.model_weight_buffer
            for role, buffer in (
                ("compute_weights", compute),
                ("main_weights", group.main_weight_buffer),
                ("main_grads", group.hfsdp_helper_gbuf or group.main_grad_buffer),
            ):
                if buffer is not None:
                    spans = (buffer.locate_item_in_global_item(item) for item in range(len(buffer.params)))
                    used = sum(end - start for start, end in spans)
                    total[role] += used * buffer.dtype.itemsize
                    total["padding"] += (buffer.data_size - used) * buffer.dtype.itemsize
            if compute is None:  # no_shard: the parameters are what the module was built with
                total["compute_weights"] += sum(param.nbytes for param in group.params)
            elif compute.is_data_distributed and group.fsdp_unit_id is None:
                total["compute_weights"] += compute.bucket_index.size * compute.dtype.itemsize
        state = self.state().tensors
        total["optimizer"] = sum(value.nbytes for key, value in state.items() if key.startswith("optimizer/"))
        total["buffers"] = sum(buffer.nbytes for buffer in self.model.module.buffers())
        return total

    def _build(self) -> nn.Module:
        workload, device = self.workload, self.ranks.device
        dtype = TORCH_DTYPES[self.config.dtype.compute]
        module = workload.build("meta", dtype)
        slots = [*module.named_parameters(remove_duplicate=False)]
        if self.shards_state and len(slots) == len([*module.parameters()]):  # none is tied
            for name, part in module.named_modules():
                if part._parameters:
                    part.reset_parameters = partial(_fill, part, name, workload)
            return module
        module = workload.build(device, dtype)
        workload.materialise_buffers(module, device)
        _fill(module, "", workload, recurse=True)
        return module

    def _mesh(self) -> tuple[Any, dict[str, Any]]:
        outer = self.config.mesh.dp_outer
        inner, kind = self.ranks.world_size // outer, self.ranks.device.type
        if outer == 1:
            return init_device_mesh(kind, (inner, 1), mesh_dim_names=(INNER, TENSOR)), {}
        mesh = init_device_mesh(kind, (outer, inner, 1), mesh_dim_names=(OUTER, INNER, TENSOR))
        return mesh, {
            "dp_outer_dim": OUTER,
            "hybrid_fsdp_group": dist.group.WORLD,  # outer-major, as the mesh is
            "hybrid_fsdp_expt_group": dist.group.WORLD,
            "outer_dp_sharding_strategy": self.config.sharding.outer.name,
        }

    def _optimizer(self, package: Any) -> Any:
        shapes = {name: weight.shape for name, weight in self.trained.items()}
        config = self.config.optimizer
        groups = optim.groups_of(config, self.workload, self.trained, shapes)
        optimizer = optim.make_optimizer(config, groups, fused=config.name is not OptimizerName.sgd)  # DTensors lack it
        optim.set_lr(optimizer, 0.0)
        return package.fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)


def _user_buffers(config: Config, device: torch.device) -> dict[str, bool]:
    if config.nccl_ub.mode is Registration.none or device.type != "cuda":
        return {}
    return {"nccl_ub": True, "disable_symmetric_registration": not config.nccl_ub.symmetric}


@torch.no_grad()
def _fill(module: nn.Module, prefix: str, workload: Workload, *, recurse: bool = False) -> None:
    params: Iterator[tuple[str, Any]] = module.named_parameters(prefix, recurse)
    for name, param in params:
        param.copy_(workload.initial_weight(name, param.shape))
        param.get_high_precision_init_val = partial(workload.initial_weight, name, param.shape)
        param.clear_high_precision_init_val = lambda: None
