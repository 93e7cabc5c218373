"""Torch's FSDP2, wrapped from the innermost unit out, as its documentation does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.fsdp.behaviours.models import Experts, Make
from tests.fsdp.behaviours.subject import INNER, NotOffered, Optimize, Subject, dense_mesh, expert_mesh


class Fsdp2(Subject):
    """`torch.distributed.fsdp.fully_shard`. Its optimizer is made over the sharded parameters."""

    name: ClassVar[str] = "fsdp2"

    def _build(self, make: Make, optimize: Optimize) -> None:
        setup = self.setup
        self._refuse()
        wide = setup.main_params or setup.compute
        self.module = self.model = make() if setup.as_it_is else make().to(wide)
        policy = MixedPrecisionPolicy(
            param_dtype=None if setup.as_it_is or setup.compute == wide else setup.compute,
            reduce_dtype=setup.comm,
            cast_forward_inputs=False,
        )
        self.keeps = setup.strategy == "optim_grads"
        mesh = dense_mesh(setup.outer, tensor_axis=False)
        if setup.expert_parallel > 1:
            self._shard_experts(policy)
        units = [m for m in self.module.modules() if isinstance(m, setup.units or ()) and m is not self.module]
        for unit in reversed(units):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not self.keeps)
        self.root = fully_shard(
            self.module, mesh=mesh, mp_policy=policy, reshard_after_forward=False if self.keeps else None
        )
        self.root.set_reduce_scatter_unused_params(True)
        if setup.options.get("calculate_per_token_loss"):
            for each in self._wrapped():
                each.set_force_sum_reduction_for_comms(True)  # gloo lacks PREMUL_SUM
                each.set_gradient_divide_factor(1.0)
        self.optimizer = optimize(self.module)

    def _refuse(self) -> None:
        setup = self.setup
        if setup.strategy in ("no_shard", "optim"):
            raise NotOffered(f"it has no {setup.strategy}")
        if setup.outer > 1 and setup.outer_strategy != "no_shard":
            raise NotOffered("its outer axis only replicates")
        known = {"calculate_per_token_loss"}
        if foreign := [name for name in setup.options if name not in known]:
            raise NotOffered(f"it has nothing like {', '.join(foreign)}")
        if not setup.overlap:
            raise NotOffered("it has no switch that takes its overlap away")
        if setup.main_grads not in (None, setup.main_params):
            raise NotOffered("gradients are kept in the dtype of the main weights")

    def _shard_experts(self, policy: MixedPrecisionPolicy) -> None:
        """Experts over their own mesh, averaged over all ranks, as torchtitan does it."""
        mesh = expert_mesh(self.setup.expert_parallel, tensor_axis=False)[INNER]
        for layer in [m for m in self.module.modules() if isinstance(m, Experts)]:
            for expert in layer.experts:
                wrapped = fully_shard(expert, mesh=mesh, mp_policy=policy)
                # gloo lacks PREMUL_SUM; on a group of one, where nothing is sent, a forced sum is divided twice.
                wrapped.set_force_sum_reduction_for_comms(mesh.size() > 1)
                wrapped.set_gradient_divide_factor(float(torch.distributed.get_world_size()))

    def _wrapped(self) -> list[FSDPModule]:
        return [m for m in self.module.modules() if isinstance(m, FSDPModule)]

    def microbatch(self, loss: Callable[[Callable[..., Any]], Tensor], *, last: bool = True) -> Tensor:
        if self.setup.rhythm == "contexts":
            self.root.set_requires_gradient_sync(last)
        elif self.setup.rhythm == "cycle":
            self.root.set_requires_all_reduce(last)
            if self.keeps:
                self.root.set_reshard_after_backward(last)
        value = loss(self.model)
        value.backward()
        return value.detach()

    def state_tensors(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())

    def dcp_state(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": weights, "optimizer": optimizer}

    def adopt(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def finish(self) -> None:
        """Its backward has seen to it."""

    def update(self) -> None:
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros(param.shape) if param.grad is None else _whole(param.grad)
            for name, param in self.module.named_parameters()
            if param.requires_grad
        }

    def weights(self) -> dict[str, Tensor]:
        return {name: _whole(param) for name, param in self.module.named_parameters()}

    def held(self) -> dict[str, int]:
        return {name: _local(param).numel() for name, param in self.module.named_parameters()}

    def groups(self) -> list[list[str]]:
        names = {param: name for name, param in self.module.named_parameters()}
        states = [module._get_fsdp_state() for module in self._wrapped()]
        held = [group for state in states for group in state._fsdp_param_groups]
        return [[names[p.sharded_param] for p in group.fsdp_params] for group in held]

    def has_gradient_storage(self, name: str) -> bool:
        return dict(self.module.named_parameters())[name].grad is not None

    def clip(self, max_norm: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def gathered(self) -> list[str]:
        return [
            name
            for name, param in self.module.named_parameters()
            if not isinstance(param, DTensor) and param.untyped_storage().nbytes()
        ]

    def save(self) -> Any:
        return {key: value.detach().clone() for key, value in self.module.state_dict().items()}

    def load(self, state: Any) -> None:
        self.module.load_state_dict(state)

    def tampered(self, state: Any, *, missing: bool) -> Any:
        key = next(iter(state))
        rest = {name: value for name, value in state.items() if name != key}
        return rest if missing else {**state, "nobody": state[key]}


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
