"""Base of engines with the entire model on every rank: `single` and `ddp`.

Main weights are the module's ordinary parameters: gradients, norm and optimizer are plain torch in the main dtype. For
another compute dtype, every forward casts all weights to copies that shadow the parameters; autograd casts each
gradient to the main dtype before it accumulates.
"""

from __future__ import annotations

import torch

from harness.config.schema import Config
from harness.engines import optim
from harness.engines.base.planned import scales_of, shadow_weights, take_plan, uncast
from harness.engines.base.sharded import ShardedEngine, grid_mesh
from harness.engines.protocol import Ranks, Seen, State, Workload


class ReplicatedEngine(ShardedEngine):
    def __init__(self, workload: Workload, config: Config, ranks: Ranks, *, fused: bool) -> None:
        """Raises `ValueError`: main gradients and main weights differ in dtype, which plain torch does not support."""
        if config.dtype.main_grads is not config.dtype.main_params:
            raise ValueError(
                f"engine={config.engine.name.name} keeps gradients in the dtype of the main weights: "
                f"dtype.main_grads={config.dtype.main_grads.name}, dtype.main_params={config.dtype.main_params.name}; "
                "make them equal or use engine=native"
            )
        super().__init__(workload, config, ranks)
        self.model = workload.build(ranks.device, self.main_dtype)
        workload.quantize(self.model, ranks.device)  # before they are cut: a plan replaces what a layer looks at
        self.grid = grid_mesh(config, ranks) if config.mesh.tp > 1 else None
        if self.grid is not None:
            workload.cut(self.model, self.grid["tp"], sequence_parallel=config.mesh.sequence_parallel)
        self.planned = take_plan(self.model, None if self.grid is None else self.grid["tp"])
        tp_shards, tensor = self.planned.tp_shards, self.planned.group
        shapes = {name: torch.Size(tp_shard.shape) for name, tp_shard in tp_shards.items()}
        weights = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(tp_shards[name].cut(workload.initial_weight(name, shapes[name])))
        if self.compute_dtype is not self.main_dtype or self.grid is not None:
            shadow_weights(self.model, self.compute_dtype, self.planned.specs, uncast(self.model))
        self._finish(weights, shapes, None, fused=fused, tp_shards=tp_shards, tensor=tensor)

    def seen(self) -> Seen | None:
        """The user's module; losses are scaled by 1 / k, so that the divisor is the number of ranks.

        None under tensor parallelism, where no rank has unsharded weights.
        """
        if self.grid is not None:
            return None
        return Seen(self.model, self.ranks.world_size, self.compute_dtype)

    def state(self) -> State:
        """State itself: plain tensors, DTensors of parts; moments only where this rank updates them."""
        held = {f"weights/{name}": self.planned.described(name, w.detach()) for name, w in self.weights.items()}
        moments = optim.optimizer_state(self.local_optimizer, self.names)
        named = ((key, key.rpartition("/")[0], value) for key, value in moments.items())
        held |= {f"optimizer/{k}": self.planned.described(n, v) for k, n, v in named}
        return State(held | scales_of(self.model), lambda: None)

    def accounted_bytes(self) -> dict[str, int]:
        """Bytes by role; gradients count, though they are freed between steps."""
        if self.compute_dtype is self.main_dtype:
            return super().accounted_bytes()
        kept = uncast(self.model)
        cast = sum(weight.numel() for weight in self.weights.values() if id(weight) not in kept)
        return super().accounted_bytes() | {"compute_weights": cast * self.compute_dtype.itemsize}
