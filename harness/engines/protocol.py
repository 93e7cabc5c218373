"""What an engine is: the one face the training loop, the probes and the conformance suite see.

An engine owns the model, its gradients and its optimizer. The loop hands it microbatches and a learning rate; it hands
back losses and the gradient norm. It never reads data, never logs, never saves: it only exposes its state by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config.schema import Config
from harness.fsdp import SharpOwnership


class Microbatch(NamedTuple):
    """Tokens of one forward and backward on one rank; both int64, shape [microbatch_size, seq_len]."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Ranks:
    """Where this process stands. The default process group spans all ranks and carries the engine's traffic."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    sharp: SharpOwnership | None = None
    """Gives InfiniBand SHARP to one communicator; engines that create the one of sharp.group use it first."""
    tp: int = 1
    """Neighbouring ranks that share every microbatch: the tensor-parallel axis."""

    @property
    def data_rank(self) -> int:
        """This rank's place among those with data of their own."""
        return self.rank // self.tp


class Seen(NamedTuple):
    """Where an engine can be looked at from outside; see `harness.probe.witness`."""

    module: nn.Module
    """Whose own parameters autograd hands local gradients to, and whose modules look their weights up."""
    divisor: int
    """What the sum of those gradients over all microbatches and ranks must be divided by to give the step's."""
    compute: torch.dtype
    """Dtype of the weights in the forward."""


class Scaled(NamedTuple):
    """What the loss of a step was multiplied with."""

    scale: float
    skipped: bool
    """Whether gradients overflowed and the update was left out, on all ranks."""


@dataclass(frozen=True)
class State:
    """All that an engine needs to go on: tensors to save, or to load into in place."""

    tensors: dict[str, Tensor]
    """Key -> tensor, over the engine's own memory where that is possible. Keys of a portable state are
    `weights/<parameter>` and `optimizer/<parameter>/<entry>`; a DTensor has this rank's part, any other tensor is whole
    and the same on every rank that has its key."""
    adopt: Callable[[], None]
    """Make what was written into the tensors effective in the very next forward. *Collective.*"""
    portable: bool = True
    """Whether any layout of any engine understands it; else only this layout of this engine."""


class Workload(Protocol):
    """What is trained, apart from how: all an engine may know of the model."""

    unit_classes: tuple[type[nn.Module], ...]
    """Modules whose parameters are gathered and released together."""

    may_leave_unused: bool
    """Whether a microbatch may leave trained parameters without a gradient, not the same ones on every rank."""

    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Make the module with uninitialised parameters; device "meta" allocates nothing, not even buffers."""

    def quantize(self, model: nn.Module, device: torch.device) -> None:
        """Have linear layers of a module that was built multiply 8-bit numbers, in place; nothing where no recipe is
        asked for. For engines that declare `fp8`."""

    def cut(self, model: nn.Module, axis: DeviceMesh, *, sequence_parallel: bool) -> None:
        """Cut a module that was built, in place, over the ranks of a tensor-parallel axis; names stay. *Collective.*"""

    def initial_weight(self, name: str, shape: torch.Size) -> Tensor:
        """Full initial value of the parameter with this name: fp32, CPU, a function of name and train.seed alone."""

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Give every buffer of a module built on meta its value."""

    def loss(self, model: nn.Module, batch: Microbatch) -> Tensor:
        """Mean loss over the tokens of one microbatch: a scalar, fp32 or wider, with a graph."""

    def decays(self, name: str, shape: torch.Size) -> bool:
        """Whether weight decay applies to this parameter (matrices yes, vectors no)."""


class Engine(ABC):
    """One engine on one rank. Every method marked *collective* is called by all ranks in the same order."""

    @abstractmethod
    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        """Build, initialise and shard the model, and its optimizer. *Collective.*"""

    @abstractmethod
    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        """Run one microbatch; `last` marks the step's last one on this rank. *Collective.*

        Returns the unscaled mean loss (detached scalar, fp32 or wider). The caller never scales a loss: the gradient of
        a step is the mean over the M global microbatches of all ranks.
        """

    @abstractmethod
    def step(self, lr: float) -> float:
        """Clip, update the weights with this learning rate and drop the gradients. *Collective.*

        Returns the global gradient norm before clipping. A step with a non-finite norm is still taken, and shows; a
        dynamic loss scale leaves it out, and `scaled` tells. Under numerics=exact all ranks raise OverflowError,
        with every weight as it was.
        """

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Full averaged gradients before clipping, by parameter name, in model order. *Collective.*

        Valid after the step's last microbatch and before `step`. CPU, in the main-gradient dtype. Changes nothing.
        """

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full main weights by name, in model order, tied ones once; CPU, main dtype. *Collective.* Changes nothing."""

    def weight_norm(self) -> float:
        """Euclidean norm of the main weights, squares summed in fp64. *Collective.*

        Gathers every weight; an engine that owns shards sums their squares instead.
        """
        squares = [torch.linalg.vector_norm(weight, dtype=torch.float64).square() for _, weight in self.named_weights()]
        return torch.stack(squares).sum().sqrt().item()

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """This rank's main weights, optimizer state and step counts as tensors on any device, for the same layout."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_dict` gave on the same layout, effective in the very next forward. *Collective.*

        Raises:
            ValueError: a key is missing, unexpected or of another shape or dtype; nothing was loaded.
        """

    def state(self) -> State:
        """All state by key, to save or to load into; see `State`. *Collective* where an engine's own `state_dict` is.

        As it stands here: what `state_dict` gives, copied, for the same layout alone. Engines whose state has names
        and places of its own say so.
        """
        tensors = {key: tensor.detach().clone() for key, tensor in self.state_dict().items()}
        return State(tensors, lambda: self.load_state_dict(tensors), portable=False)

    @abstractmethod
    def accounted_bytes(self) -> dict[str, int]:
        """Bytes kept on this rank by role: compute_weights, main_weights, main_grads, optimizer, padding, buffers; and
        gradient_sums, where sums lie apart from the main gradients."""

    def finish_gradients(self) -> None:  # noqa: B027 # most engines have nothing left to do
        """Do now what is left of the step's reductions, so that looking at gradients before `step` moves none of it
        into the harness's own time and traffic. *Collective* where an engine reduces after the last backward."""

    def seen(self) -> Seen | None:
        """Where local gradients and the weights of the forward can be seen; None where they cannot."""
        return None

    def local_gradients(self) -> Mapping[str, Tensor] | None:
        """This rank's averaged gradients before clipping, by parameter name, of the elements that it has of
        `state()`'s weights: plain tensors over the engine's own memory, not to be written to.

        Valid where `named_gradients` is; gathers nothing. None where they cannot be seen so.
        """
        return None

    def scaled(self) -> Scaled | None:
        """The loss scale of the step taken last; None where losses are not scaled."""
        return None

    def facts(self) -> dict[str, str]:
        """What the record should tell that no setting does: choices that depend on the machine, with their reasons."""
        return {}

    def counters(self) -> dict[str, int]:
        """What the engine counted of itself on this rank since the last call, by the name that `metrics.jsonl` gives it
        (`harness.store.fields`); empty for engines that count nothing. Called once a step, after `step`."""
        return {}

    def user_buffers(self) -> dict[str, str]:
        """What became of nccl_ub: requested, effective, reason; empty for engines that register nothing."""
        return {}

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Release what outlives the object (hooks, threads)."""
