"""The least face that three engines share, so that one check can be put to all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.fsdp.behaviours.models import Make

INNER, OUTER, TENSOR = "dp_shard", "dp_outer", "tp"

Optimize = Callable[[nn.Module], torch.optim.Optimizer]


class NotOffered(Exception):
    """The engine cannot be asked for this; the message says why."""


def sgd(lr: float = 0.1, **settings: Any) -> Optimize:
    """Plain SGD over everything that is trained."""
    return lambda module: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=lr, **settings)


def adamw(lr: float = 0.01, **settings: Any) -> Optimize:
    """AdamW over everything that is trained."""
    return lambda module: torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr, **settings)


@dataclass(frozen=True)
class Setup:
    """What a check asks an engine for.

    rhythm: how microbatches are told apart: "cycle" as the engine recommends for accumulation, "contexts" by `no_sync`,
    "auto" not at all, so that every backward ends a step. overlap=False: nothing is fetched or reduced ahead.
    as_it_is: the module's dtypes are not changed to `compute`. options: further keywords under megatron-fsdp's names;
    FSDP2 offers next to none of them.
    """

    strategy: str = "optim_grads_params"
    units: tuple[type[nn.Module], ...] | None = None
    outer: int = 1
    outer_strategy: str = "no_shard"
    expert_parallel: int = 1
    compute: torch.dtype = torch.float32
    main_params: torch.dtype | None = torch.float32
    main_grads: torch.dtype | None = torch.float32
    comm: torch.dtype | None = torch.float32
    rhythm: str = "cycle"
    overlap: bool = True
    as_it_is: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class Subject(ABC):
    """A module and its optimizer, sharded by one engine over the default process group.

    Args:
        make: builds the module in fp32, the same on all ranks (experts apart).
        optimize: builds the optimizer over a module's parameters.
        setup: how it is sharded.

    Raises:
        NotOffered: this engine has no such thing.
    """

    name: ClassVar[str]

    model: Any
    optimizer: Any
    module: Any

    def __init__(self, make: Make, optimize: Optimize, setup: Setup) -> None:
        self.setup = setup
        self._build(make, optimize)
        self.model.input_dtype = setup.compute

    @abstractmethod
    def _build(self, make: Make, optimize: Optimize) -> None:
        """Shard."""

    @abstractmethod
    def microbatch(self, loss: Callable[[Callable[..., Any]], Tensor], *, last: bool = True) -> Tensor:
        """A forward and a backward of what `loss` makes of the model; returns the loss."""

    @abstractmethod
    def finish(self) -> None:
        """See to it that the step's gradients are reduced."""

    def step(self) -> None:
        """Update, and forget the gradients."""
        self.update()
        self.optimizer.zero_grad()

    @abstractmethod
    def update(self) -> None:
        """Update."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Whole reduced gradients by name, on every rank. *Collective.*"""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Whole main weights by name, on every rank. *Collective.*"""

    @abstractmethod
    def held(self) -> dict[str, int]:
        """Elements of each parameter's main weights that this rank holds."""

    @abstractmethod
    def groups(self) -> list[list[str]]:
        """Names of the parameters that share a buffer or travel in one collective."""

    @abstractmethod
    def has_gradient_storage(self, name: str) -> bool:
        """Whether this rank keeps anything for the gradient of a parameter."""

    @abstractmethod
    def clip(self, max_norm: float) -> float:
        """Clip by the global norm; returns the norm before."""

    @abstractmethod
    def save(self) -> Any:
        """A copy of weights and optimizer state, for `load` on the same layout."""

    @abstractmethod
    def load(self, state: Any) -> None:
        """Take back what `save` gave."""

    @abstractmethod
    def tampered(self, state: Any, *, missing: bool) -> Any:
        """A state that lacks one weight, or that has one too many."""

    def state_tensors(self) -> dict[str, Tensor]:
        """What the engine's `state_dict` has for each parameter, by the model's own names."""
        raise NotOffered("its state_dict is not put to this check")

    def dcp_state(self) -> dict[str, Any]:
        """Weights and optimizer state as distributed checkpoint saves and, in place, loads them."""
        raise NotOffered("its checkpoints are not put to this check")

    def adopt(self, state: dict[str, Any]) -> None:
        """Make what DCP wrote into `dcp_state` effective."""
        raise NotOffered("its checkpoints are not put to this check")

    def gathered(self) -> list[str]:
        """Names of the parameters whose whole compute weights are in memory now."""
        raise NotOffered("cannot be looked at from outside")

    def optimizer_gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """Each tensor the optimizer steps, and its gradient now."""
        return [(p, p.grad) for group in self.optimizer.param_groups for p in group["params"]]

    def close(self) -> None:  # noqa: B027 (most engines start nothing)
        """End what the engine started."""


def meshes(setup: Setup, *, tensor_axis: bool) -> dict[str, Any]:
    """What says where ranks stand, under megatron-fsdp's names. *Collective.*"""
    mesh = dense_mesh(setup.outer, tensor_axis=tensor_axis)
    arguments: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": INNER}
    if tensor_axis:
        arguments["tp_dim"] = TENSOR
    if setup.outer > 1:
        arguments |= {
            "dp_outer_dim": OUTER,
            "hybrid_fsdp_group": dist.group.WORLD,
            "outer_dp_sharding_strategy": setup.outer_strategy,
        }
    if setup.expert_parallel > 1:
        arguments["expt_device_mesh"] = expert_mesh(setup.expert_parallel, tensor_axis=tensor_axis)
    return arguments


def dense_mesh(outer: int, *, tensor_axis: bool) -> DeviceMesh:
    """All ranks: inner, or outer by inner in outer-major order. *Collective.*"""
    world = dist.get_world_size()
    shape, names = ((world,), (INNER,)) if outer == 1 else ((outer, world // outer), (OUTER, INNER))
    if tensor_axis:
        shape, names = (*shape, 1), (*names, TENSOR)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def expert_mesh(expert_parallel: int, *, tensor_axis: bool) -> DeviceMesh:
    """Ranks that hold the same experts along `dp_shard`, different ones along `ep`. *Collective.*"""
    shape: Sequence[int] = (dist.get_world_size() // expert_parallel, expert_parallel)
    names: Sequence[str] = (INNER, "ep")
    if tensor_axis:
        shape, names = (*shape, 1), (*names, TENSOR)
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
