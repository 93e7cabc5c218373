"""Base of engines with the entire model on every rank: `single` and `ddp`.

Main weights are the module's ordinary parameters: gradients, norm and optimizer are plain torch in the main dtype. For
another compute dtype, every forward casts all weights to copies that shadow the parameters; autograd casts each
gradient to the main dtype before it accumulates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from harness.config.schema import Config
from harness.engines import norms, optim
from harness.engines.base.eight_bits import end_step, scales_of, uncast
from harness.engines.base.planned import shadow_weights, take_plan
from harness.engines.base.sharded import grid_mesh
from harness.engines.evaluating import evaluating
from harness.engines.protocol import Engine, Microbatch, Ranks, Seen, State, Workload
from harness.engines.torch_dtypes import TORCH_DTYPES
from harness.fsdp import create_state


class ReplicatedEngine(Engine):
    def __init__(self, workload: Workload, config: Config, ranks: Ranks, *, fused: bool) -> None:
        """Raises `ValueError`: main gradients and main weights differ in dtype, which plain torch does not support."""
        if config.dtype.main_grads is not config.dtype.main_params:
            raise ValueError(
                f"engine={config.engine.name.name} keeps gradients in the dtype of the main weights: "
                f"dtype.main_grads={config.dtype.main_grads.name}, dtype.main_params={config.dtype.main_params.name}; "
                "make them equal or use engine=native"
            )
        self.workload = workload
        self.config = config
        self.ranks = ranks
        self.main_dtype = TORCH_DTYPES[config.dtype.main_params]
        self.compute_dtype = TORCH_DTYPES[config.dtype.compute]
        self.model = workload.build(ranks.device, self.main_dtype)
        workload.quantize(self.model, ranks.device)  # before they are cut: a plan replaces what a layer looks at
        self.grid = grid_mesh(config, ranks) if config.mesh.tp > 1 else None
        if self.grid is not None:
            workload.cut(self.model, self.grid["tp"], sequence_parallel=config.mesh.sequence_parallel)
        self.planned = take_plan(self.model, None if self.grid is None else self.grid["tp"])
        shapes = {name: torch.Size(tp_shard.shape) for name, tp_shard in self.planned.tp_shards.items()}
        self.weights: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in self.weights.items():
                whole = workload.initial_weight(name, shapes[name])
                weight.copy_(self.planned.tp_shards[name].cut(whole))
        if self.compute_dtype is not self.main_dtype or self.grid is not None:
            shadow_weights(self.model, self.compute_dtype, self.planned.specs, uncast(self.model))
        self.names: dict[Tensor, str] = {weight: name for name, weight in self.weights.items()}
        self.trained = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        self.reduced = False
        groups = optim.groups_of(config.optimizer, workload, self.trained, shapes)
        made = optim.make_optimizer(config.optimizer, groups, fused=fused)
        self.optimizer, self.local_optimizer = self._place_optimizer(made)
        create_state(self.local_optimizer)

    def _place_optimizer(self, whole: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return whole, whole

    def evaluate(self, batches: Iterable[Microbatch]) -> list[float]:
        with evaluating(self.model, self.ranks.device):
            return [self.workload.loss(self.model, batch).item() for batch in batches]

    def step(self, lr: float) -> float:
        gradients = dict(self._gradients())
        norm = self._norm(gradients)
        coefficient = optim.clip_coefficient(norm, self.config.optimizer.clip_norm)
        norms.scale(list(gradients.values()), coefficient)
        optim.set_lr(self.optimizer, lr)
        self.optimizer.step()
        end_step(self.model, self.ranks)
        self.optimizer.zero_grad(set_to_none=True)
        self.reduced = False
        return norm

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, gradient in self._gradients():
            yield name, self.planned.whole(name, gradient).to("cpu", copy=True)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            yield name, self.planned.whole(name, weight).to("cpu", copy=True)

    def weight_norm(self) -> float:
        return self._norm(self.weights)

    def _norm(self, tensors: Mapping[str, Tensor]) -> float:
        counted = [tensor for name, tensor in tensors.items() if self.planned.is_counted(name)]
        return norms.euclidean_norm(counted, self.ranks.device, self.planned.total)

    def seen(self) -> Seen | None:
        """The user's module; losses are scaled by 1 / k, so that the divisor is the number of ranks.

        None under tensor parallelism, where no rank has unsharded weights.
        """
        if self.grid is not None:
            return None
        return Seen(self.model, self.ranks.world_size, self.compute_dtype)

    def local_gradients(self) -> Mapping[str, Tensor]:
        return dict(self._gradients())

    def state_dict(self) -> dict[str, Tensor]:
        """Main weights and optimizer state by parameter name; not copied."""
        state = {f"weights/{name}": weight.detach() for name, weight in self.weights.items()}
        moments = optim.optimizer_state(self.local_optimizer, self.names)
        return state | {f"optimizer/{key}": value for key, value in moments.items()} | scales_of(self.model)

    def state(self) -> State:
        """State itself: plain tensors, DTensors of parts; moments only where this rank updates them."""
        held = {f"weights/{name}": self.planned.described(name, w.detach()) for name, w in self.weights.items()}
        moments = optim.optimizer_state(self.local_optimizer, self.names)
        named = ((key, key.rpartition("/")[0], value) for key, value in moments.items())
        held |= {f"optimizer/{k}": self.planned.described(n, v) for k, n, v in named}
        return State(held | scales_of(self.model), lambda: None)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        optim.load_state(self.state_dict(), state)

    def accounted_bytes(self) -> dict[str, int]:
        """Bytes by role; gradients count, though they are freed between steps."""
        elements = sum(weight.numel() for weight in self.weights.values())
        kept = uncast(self.model)
        cast = sum(weight.numel() for weight in self.weights.values() if id(weight) not in kept)
        shadowed = self.compute_dtype is not self.main_dtype
        moments = optim.optimizer_state(self.local_optimizer, self.names).values()
        return {
            "compute_weights": cast * self.compute_dtype.itemsize if shadowed else 0,
            "main_weights": elements * self.main_dtype.itemsize,
            "main_grads": sum(weight.numel() for weight in self.trained.values()) * self.main_dtype.itemsize,
            "optimizer": sum(value.numel() * value.element_size() for value in moments),
            "padding": 0,
            "buffers": sum(buffer.numel() * buffer.element_size() for buffer in self.model.buffers()),
        }

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.trained.items():
            if not self.reduced:
                raise RuntimeError(f"no gradient for {name}: no microbatch was marked as the step's last one")
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            yield name, weight.grad
