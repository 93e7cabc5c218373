"""Torch's FSDP2 (`torch.distributed.fsdp.fully_shard`), used as its documentation recommends.

`optim_grads_params` gathers a unit's weights for its forward and again for its backward, except the root's, which torch
keeps from one to the other. `optim_grads` gathers them once a step: they stay after the forward
(`reshard_after_forward=False`) and, while microbatches follow, after the backward
(`set_reshard_after_backward(False)`), which is what ZeRO-2 keeps; after the last backward they are freed, since the
optimizer is about to change them. Both reduce-scatter every microbatch's gradients and add them to the shard in the
main dtype. With an outer axis the mesh is (Replicate, Shard), and the outer all-reduce runs once a step
(`set_requires_all_reduce`).

Dtypes: the sharded parameters are the main weights; a unit is gathered in the compute dtype (`param_dtype`) and its
gradients travel in the wire dtype (`reduce_dtype`), where the backend sums them. Inputs are not cast at unit borders
(`cast_forward_inputs=False`): activations have the weights' dtype already, and a cast would reach what a model keeps
wider on purpose, such as rotary tables.

Limits, on torch 2.13:

- Parameters of shape [] are refused by `fully_shard` (`ValueError`).
- With an outer axis, several microbatches and a wire narrower than the main gradients, what each microbatch's
  reduce-scatter gives is summed in the *wire's* dtype until the outer all-reduce. A rule refuses that pair unless
  dtype.allow_low_precision_grads=true accepts it.
- All ranks run the same units in the same order in each microbatch: a unit's all-gather and reduce-scatter are
  collective. A parameter that some ranks do not use inside a unit they do run is handled from torch 2.13 on
  (`set_reduce_scatter_unused_params`); before, ranks would reduce buckets of different sizes, and a model that may
  leave parameters unused is refused on more than one rank. Ranks that run *different units* disagree about their
  collectives: gloo raises or waits until its timeout, or, where two units have the same shapes and trade places,
  exchanges the wrong buffers without a word. No shipped model does that.
- fp16 gets no loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from harness.config.schema import Config, OptimizerName, Strategy
from harness.engines import optim
from harness.engines.base import ShardedEngine, mesh_of, units_of
from harness.engines.protocol import Microbatch, Ranks, Seen, State, Workload
from harness.fsdp import TpShard

AGREES_ON_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""True if ranks with an unused parameter send zeros for it: from torch 2.13 on."""

TOO_OLD = (
    "engine=fsdp2 on torch {version} reduces only the parameters that this rank used, and the model may leave others"
    " out: ranks would wait for each other forever; set model.skip_idle=false, or use torch 2.13, or engine=native"
)


class Fsdp2Engine(ShardedEngine):
    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        """Raises `ValueError`: this torch's FSDP2 cannot handle parameters unused on some ranks."""
        super().__init__(workload, config, ranks)
        model = workload.build("meta", self.main_dtype)
        workload.quantize(model, ranks.device)
        workload.materialise_buffers(model, ranks.device)
        shapes = {name: param.shape for name, param in model.named_parameters()}
        mesh, self.tensor = self._meshes(model)
        self.tp_shards = {name: TpShard.of(name, param, self.tensor) for name, param in model.named_parameters()}
        policy = MixedPrecisionPolicy(
            param_dtype=self.compute_dtype,
            reduce_dtype=self.wire_dtype,
            output_dtype=None,  # the loss widens what it needs wide
            cast_forward_inputs=False,
        )
        self.keeps_weights = config.sharding.strategy is Strategy.optim_grads
        shard: Any = partial(fully_shard, mesh=mesh, mp_policy=policy)
        for unit in units_of(model, workload.unit_classes):
            shard(unit, reshard_after_forward=not self.keeps_weights)
        # None: torch keeps the root's weights from forward to backward, where they are needed first.
        root = shard(model, reshard_after_forward=False if self.keeps_weights else None)
        if AGREES_ON_UNUSED:
            root.set_reduce_scatter_unused_params(True)
        elif workload.may_leave_unused and mesh.size() > 1:
            raise ValueError(TOO_OLD.format(version=torch.__version__))
        self.model, self.root, self.mesh = model, root, mesh
        give_memory(model, ranks.device)
        weights = dict(model.named_parameters())
        for name, weight in weights.items():
            self._fill(weight, self.tp_shards[name].cut(workload.initial_weight(name, shapes[name])))
        shard_group = mesh.get_group("dp_shard")
        is_fused = config.optimizer.name is not OptimizerName.sgd  # DTensor has no rule for aten._fused_sgd_
        self.group = shard_group if shard_group.size() > 1 else None
        self._finish(weights, shapes, fused=is_fused)
        if not is_fused:
            for table in self.optimizer.param_groups:
                table["foreach"] = True

    def _meshes(self, model: nn.Module) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
        """Data-parallel mesh, and tensor-parallel ranks after cutting the model. Collective over all ranks."""
        config, grid = self.config, mesh_of(self.config, self.ranks)
        if config.mesh.tp == 1:
            return grid, None
        self.workload.cut(model, grid["tp"], sequence_parallel=config.mesh.sequence_parallel)
        data = grid["dp_shard"] if config.mesh.dp_outer == 1 else grid["dp_outer", "dp_shard"]
        return data, grid.get_group("tp")

    @torch.no_grad()
    def _fill(self, weight: nn.Parameter, value: Tensor) -> None:
        assert isinstance(weight, DTensor)
        local = weight.to_local()
        begin = self.mesh.get_local_rank("dp_shard") * -(-value.shape[0] // self.mesh["dp_shard"].size())
        local.copy_(value[begin : begin + local.shape[0]])

    def _piece(self, tensor: Tensor) -> Tensor:
        # Asked for each time: torch replaces the local tensor once, in the first forward, to pad it.
        tensor = tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def seen(self) -> Seen | None:
        """The wrapped module, with losses scaled by 1 / k, so that the divisor is the number of ranks.

        Weights are gathered in the compute dtype, also those that layers quantize. None under tensor parallelism, where
        no rank has unsharded weights.
        """
        if self.tensor is not None:
            return None
        return Seen(self.model, self.ranks.world_size, self.compute_dtype, rounded=self.compute_dtype)

    def state(self) -> State:
        """Sharded parameters and their moments: DTensors, cut as by `torch.chunk`.

        Not detached: torch modifies them in the first forward.
        """
        tensors: dict[str, Tensor] = {f"weights/{name}": weight for name, weight in self.weights.items()}
        moments = optim.optimizer_state(self.optimizer, self.names)
        tensors |= {f"optimizer/{key}": value for key, value in moments.items()}
        return State(tensors, lambda: None)

    def _rhythm(self, last: bool) -> AbstractContextManager[object]:
        # Not set_is_last_backward(last): the order of units would then be kept from one microbatch to the next, and the
        # last unit of a backward would prefetch the weights of the one before its forward, which nobody uses.
        self.root.set_requires_all_reduce(last)  # acts only with an outer axis
        if self.keeps_weights:
            self.root.set_reshard_after_backward(last)
        return nullcontext()

    def evaluate(self, batches: Iterable[Microbatch]) -> list[float]:
        """As the base; what torch keeps for a backward, the root's weights and the order of units, is dropped."""
        losses = super().evaluate(batches)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                state: Any = module._get_fsdp_state()
                for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                    if group is not None:
                        group.comm_ctx.post_forward_order.clear()
                        group._post_forward_indices.clear()
        return losses

    def _padding_elements(self) -> tuple[int, int]:
        ranks, unused = self.mesh["dp_shard"].size(), dict[str, int]()
        for name, weight in self.weights.items():
            rows, *others = self.tp_shards[name].here
            unused[name] = -(-rows // ranks) * math.prod(others) - self._piece(weight).numel()
        return sum(unused.values()), sum(unused[name] for name in self.trained)


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Replace meta parameters by uninitialised ones; unlike `to_empty`, it keeps ties."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if param not in made:
                made[param] = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
            module._parameters[name] = made[param]
