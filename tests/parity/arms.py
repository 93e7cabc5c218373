"""Runs of the laboratory as they are asked for: what is trained on how many ranks, and what is broken on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from omegaconf import OmegaConf

from harness.config.schema import Config

if TYPE_CHECKING:
    from tests.parity.network import Optimizer


Array = NDArray[Any]
Params = dict[str, Array]
DIM, HIDDEN, FEATURES, CLASSES, LAYERS = 32, 64, 24, 12, 2


def nothing(*_: Any) -> None:
    """Does nothing."""


def unchanged(step: int, values: Params) -> Params:
    """As they are."""
    return values


@dataclass
class Fault:
    """Hooks into the simulated engine; each default does nothing."""

    reduced: Callable[[Params, list[Params], Arm], Params] | None = None
    """Changes the averaged gradients; is given each rank's own, averaged over its microbatches."""
    reduced_from: int = 1
    """First step at which `reduced` acts."""
    microbatches: Callable[[list[Params]], list[Params]] | None = None
    """Changes one rank's list of microbatch gradients before they are added."""
    adam_steps_ahead: int = 0
    """Steps Adam's bias correction is ahead."""
    no_decay: bool = False
    frozen: str = ""
    """Prefix of parameters whose compute weights are never refreshed after an update."""
    norm_factor: float = 1.0
    """What the norm is multiplied with before it is logged and clipped by."""
    logged_norm_factor: float = 1.0
    """What only the logged norm is multiplied with."""
    same_data: bool = False
    """Every rank is fed rank 0's sequences."""
    nan_at: int | None = None
    """Step at which the loss is not a number."""
    lr_factor: float = 1.0
    """What the optimizer, not the record, multiplies the learning rate with."""
    ahead_from: int = 1
    """First step at which `adam_steps_ahead` acts."""
    skipped: int | None = None
    """Step whose update is left out."""
    between: Callable[[int, Params, Optimizer], None] = nothing
    """Changes weights or moments before a step, by something that is no optimizer; after the last one too."""
    moments: Callable[[int, Optimizer], None] = nothing
    """Changes the moments as an update leaves them."""
    updated: Callable[[int, Params, Params], None] = nothing
    """Changes the weights as an update leaves them; is given those before it as well."""
    used: Callable[[int, Params], Params] = unchanged
    """Changes the weights that the last rank computes a step with."""
    local: Callable[[int, Params], Params] = unchanged
    """Changes a microbatch's gradients as the backward hands them out."""


@dataclass
class Arm:
    """One run to make."""

    ranks: int = 2
    k: int = 2
    strategy: str = "optim_grads_params"
    compute: str = "fp32"
    wire: str = "fp32"
    main: str = "fp32"
    optimizer: str = "adamw"
    numerics: str = "fast"
    engine: str = "native"
    lr: float = 3e-3
    clip: float | None = 1.0
    steps: int = 12
    seed: int = 0
    replicate: int = 0
    captures: tuple[int, ...] = (1,)
    updates: tuple[int, ...] = (1, 2, 3)
    witnessed: bool = False
    """Whether local gradients are seen beside the engine in captured steps."""
    checked: bool = False
    """Whether a stream says of every step that it was right (`tests.parity.streams`)."""
    batch: int = 16
    seq_len: int = 16
    fault: Fault = field(default_factory=Fault)

    def config(self) -> dict[str, Any]:
        """The frozen configuration such a run would have."""
        plain: Any = OmegaConf.to_container(OmegaConf.structured(Config), enum_to_str=True)
        accumulate = "fp64" if self.main == "fp64" else "fp32"
        plain["model"].update(
            dim=DIM, ffn_dim=HIDDEN, num_layers=LAYERS, vocab_size=CLASSES, num_heads=2, num_kv_heads=2
        )
        plain["data"].update(kind="synthetic", seq_len=self.seq_len)
        plain["train"].update(
            steps=self.steps,
            seed=self.seed,
            replicate=self.replicate,
            global_batch_size=self.batch,
            microbatch_size=self.batch // (self.ranks * self.k),
            param_norm_every=5,
        )
        plain["dtype"].update(
            name=f"{self.compute}-{self.wire}",
            compute=self.compute,
            main_params=self.main,
            main_grads=self.main,
            grad_comm=self.main if self.main == "fp64" else self.wire,
            grad_accum=accumulate,
        )
        plain["optimizer"].update(name=self.optimizer, lr=self.lr, clip_norm=self.clip)
        if self.optimizer == "sgd":
            plain["optimizer"].update(momentum=0.0, weight_decay=0.0)
        plain["sharding"]["strategy"] = self.strategy
        plain["numerics"]["mode"] = self.numerics
        plain["engine"]["name"] = self.engine
        plain["mesh"]["world_size"] = self.ranks
        plain["measure"]["capture_steps"] = list(self.captures)
        plain["measure"]["update_steps"] = [step for step in self.updates if step <= self.steps]
        plain["study"]["name"] = "lab"
        result: dict[str, Any] = plain
        return result


def broken(arm: Arm, **changes: Any) -> Arm:
    """The same arm with a fault."""
    baseline = copy.copy(arm)
    baseline.fault = Fault(**changes)
    return baseline
