"""The interface of an engine, as the training loop, the probes and the conformance suite use it.

An engine owns the model, its gradients and its optimizer. The loop passes it microbatches and a learning rate, and it
returns losses and the gradient norm. It never reads data, logs or saves; it only exposes its state by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor

from harness.config import capabilities
from harness.config.schema import Config, Dtype, EngineName
from harness.models.workload import TokenWorkload
from harness.probe.step_checks.pieces import Piece
from harness.probe.witness import Seen as Seen


class Microbatch(NamedTuple):
    """Tokens of one forward and backward on one rank; both int64, shape [microbatch_size, seq_len]."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks. The default process group spans all ranks and carries the engine's traffic."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    tp: int = 1
    """Neighbouring ranks that share every microbatch: the tensor-parallel axis."""

    @property
    def data_rank(self) -> int:
        """This rank's index among the ranks that read different data."""
        return self.rank // self.tp


class Scaled(NamedTuple):
    """The factor with which the loss of a step was multiplied."""

    scale: float
    skipped: bool
    """True if gradients overflowed and the update was skipped, on all ranks."""


@dataclass(frozen=True)
class State:
    """Everything an engine needs to resume: tensors to save, or to load into in place."""

    tensors: dict[str, Tensor]
    """Key -> tensor, over the engine's own memory where that is possible. Keys of a portable state are
    `weights/<parameter>` and `optimizer/<parameter>/<entry>`; a DTensor has this rank's part, any other tensor is whole
    and the same on every rank that has its key."""
    adopt: Callable[[], None]
    """Use what was written into the tensors from the next forward on. *Collective.*"""
    portable: bool = True
    """True if any layout of any engine can load it; otherwise only this layout of this engine can."""


Workload = TokenWorkload
"""Everything that an engine may know about the model."""


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

    def evaluate(self, batches: Iterable[Microbatch]) -> list[float]:
        """Mean loss of each microbatch without gradients, in `eval` mode, after a step. *Collective.*

        Changes nothing that a step uses or sends.
        """
        raise NotImplementedError(
            f"{type(self).__name__} evaluates no held-out data: give it a method evaluate(batches), or"
            " measure.validate_every=0"
        )

    @abstractmethod
    def step(self, lr: float) -> float:
        """Clip, update the weights with this learning rate and drop the gradients. *Collective.*

        Returns the global gradient norm before clipping. A step with a non-finite norm is still taken, so that it
        shows; with a dynamic loss scale it is skipped, and `scaled` says so. Under numerics=exact all ranks raise
        OverflowError, and no weight has changed.
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

        This version gathers every weight; an engine with shards should sum their squares instead.
        """
        squares = [torch.linalg.vector_norm(weight, dtype=torch.float64).square() for _, weight in self.named_weights()]
        return torch.stack(squares).sum().sqrt().item()

    def expect(self, held: Mapping[str, Tensor]) -> None:  # noqa: B027 - most engines have all from the beginning
        """Make room for entries of a state that is to be loaded, which a step would make. held: on meta, by key."""

    @abstractmethod
    def state(self) -> State:
        """Main weights, optimizer state and step counts by key, to save or to load into; see `State`."""

    @abstractmethod
    def accounted_bytes(self) -> dict[str, int]:
        """Bytes kept on this rank by role: compute_weights, main_weights, main_grads, optimizer, padding, buffers; and
        gradient_sums, if sums are stored apart from the main gradients."""

    def finish_gradients(self) -> None:  # noqa: B027 # most engines have nothing left to do
        """Finish the step's reductions now, so that reading gradients before `step` does not move them into the
        harness's own time and traffic. *Collective* if an engine reduces after the last backward."""

    def seen(self) -> Seen | None:
        """Where local gradients and the weights of the forward can be observed; None if they cannot."""
        return None

    def flat_pieces(self) -> Mapping[str, Piece] | None:
        """This rank's weights and moments by the keys of a portable state, frozen weights too, of an engine that cuts
        flattened tensors without regard to rows; None where `state` says it or nothing can."""
        return None

    def local_gradients(self) -> Mapping[str, Tensor] | None:
        """This rank's averaged gradients before clipping, by parameter name, for its elements of `state()`'s weights:
        plain tensors over the engine's own memory, which must not be written to.

        Valid when `named_gradients` is; gathers nothing. None if the engine cannot provide them.
        """
        return None

    def scaled(self) -> Scaled | None:
        """The loss scale of the last step; None if losses are not scaled."""
        return None

    def facts(self) -> dict[str, str]:
        """Facts for the record that no setting has: choices that depend on the machine, with their reasons."""
        return {}

    def counters(self) -> dict[str, int]:
        """The engine's own counters on this rank since the last call, by their names in `metrics.jsonl`
        (`harness.store.fields`); empty for engines without any. Called once per step, after `step`."""
        return {}

    def user_buffers(self) -> dict[str, str]:
        """The outcome of nccl_ub: requested, effective, reason; empty for engines that register nothing."""
        return {}

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Remove hooks and end threads."""


TORCH_DTYPES: dict[Dtype, torch.dtype] = {each: getattr(torch, each.torch_name) for each in Dtype}


ENGINES: dict[EngineName, str] = {name: can.adapter for name, can in capabilities.ENGINES.items() if can.adapter}


def engine_class(name: EngineName, adapter: str | None = None) -> type[Engine]:
    found: type[Engine] = resolve_name(str(adapter) if name is EngineName.ext else ENGINES[name])
    return found
