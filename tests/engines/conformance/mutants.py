"""Engines that are wrong on purpose, each in one way that a user would not see in a loss curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.derived import global_microbatches
from harness.config.schema import Config
from harness.engines import optim
from harness.engines.protocol import Microbatch, Ranks, Workload
from tests.engines.adapter import Adapter


class CountedTwice(Adapter):
    """Adds the last microbatch's gradients twice."""

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        if last:
            super().forward_backward(batch, last=False)
        return super().forward_backward(batch, last=last)


class LastMicrobatchOnly(Adapter):
    """Forgets what was accumulated."""

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        for flat in self.flats.values():
            flat.gradients.zero_()
        return super().forward_backward(batch, last=last)


class NotDivided(Adapter):
    """Sums over microbatches where it should take their mean; Adam hides it, clipping too."""

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        loss = super().forward_backward(batch, last=last)
        for flat in self.flats.values():
            if last:
                flat.gradients.mul_(global_microbatches(self.config))
        return loss


class OneRankIgnored(Adapter):
    """The last rank adds nothing, and the others make up for its share."""

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        loss = super().forward_backward(batch, last=False)
        world_size = self.ranks.world_size
        for flat in self.flats.values():
            if self.ranks.rank == world_size - 1:
                flat.gradients.zero_()
            if last:
                dist.all_reduce(flat.gradients)
                flat.gradients.div_(global_microbatches(self.config) / world_size * (world_size - 1))
        return loss


class LocalNorm(Adapter):
    """Clips by the norm of this rank's part."""

    def step(self, lr: float) -> float:
        norm = super().step(lr)
        return norm / self.ranks.world_size**0.5


class ClipsByLocalNorm(Adapter):
    """Reports the right norm, and clips by that of this rank's part."""

    def step(self, lr: float) -> float:
        mine = optim.euclidean_norm([flat.gradients[flat.mine] for flat in self.flats.values()], self.ranks.device)
        norm = optim.euclidean_norm([flat.gradients for flat in self.flats.values()], self.ranks.device)
        clip, self.config.optimizer.clip_norm = self.config.optimizer.clip_norm, None
        for flat in self.flats.values():
            flat.gradients.mul_(optim.clip_coefficient(mine, clip))
        super().step(lr)
        self.config.optimizer.clip_norm = clip
        return norm


class DecaysAll(Adapter):
    """Weight decay on vectors too."""

    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        super().__init__(workload, config, ranks)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = config.optimizer.weight_decay


class RateIsKept(Adapter):
    """Takes the first learning rate for all steps."""

    def step(self, lr: float) -> float:
        self.first = getattr(self, "first", lr)
        return super().step(self.first)


class StaleAfterLoad(Adapter):
    """Loads the main weights, and goes on computing with the old ones until the next update."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        optim.load_state(self.state_dict(), state)
        for flat in self.flats.values():
            parts = list(flat.weights.chunk(self.ranks.world_size))
            dist.all_gather(parts, flat.main.detach())


class ForgetsMoments(Adapter):
    """Saves weights without the optimizer's state."""

    def state_dict(self) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in super().state_dict().items() if "exp_avg" not in key}


class LoadsHalf(Adapter):
    """Looks at a tensor when its turn comes, and has taken those before it."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for key, tensor in self.state_dict().items():
            optim.check_state({key: tensor}, {k: v for k, v in state.items() if k == key})
            tensor.copy_(state[key])
        super().load_state_dict(state)


class HandsOutItsOwn(Adapter):
    """Gradients are views, not copies."""

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        found = {name: view for flat in self.flats.values() for name, view in flat.views(flat.gradients).items()}
        return ((name, found[name]) for name in self.params if name in found)


class Drifts(Adapter):
    """One rank's weights are one rounding off."""

    def step(self, lr: float) -> float:
        norm = super().step(lr)
        if self.ranks.rank == 1:
            first = next(iter(self.flats.values())).weights
            first[:1] = torch.nextafter(first[:1], first[:1] + 1)
        return norm


class SkipsNonFinite(Adapter):
    """Leaves out a step whose gradients are no numbers, as loss scaling does."""

    def step(self, lr: float) -> float:
        norm = optim.euclidean_norm([flat.gradients for flat in self.flats.values()], self.ranks.device)
        if norm == norm:
            return super().step(lr)
        for flat in self.flats.values():
            flat.gradients.zero_()
        return norm


class OwnOrder(Adapter):
    """Names in the order of its buffers."""

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        return iter(sorted(super().named_gradients()))


class TrainsFrozen(Adapter):
    """Decays what is frozen."""

    def step(self, lr: float) -> float:
        for param in self.params.values():
            if not param.requires_grad:
                param.data.mul_(1 - lr * self.config.optimizer.weight_decay)
        return super().step(lr)


class SaysLess(Adapter):
    """Leaves the gathered weights out of its bill, and the optimizer's state."""

    def accounted_bytes(self) -> dict[str, int]:
        return super().accounted_bytes() | {"optimizer": 0}


class IgnoresSaving(Adapter):
    """Takes a state, and stays as it is."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        optim.check_state(self.state_dict(), state)


class WiderThanAsked(Adapter):
    """Computes in fp32 whatever is asked."""

    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        super().__init__(workload, config, ranks)
        self.model.to(torch.float32)
        for flat in self.flats.values():
            flat.publish()


MUTANTS: dict[type[Adapter], str] = {
    CountedTwice: "gradient",
    LastMicrobatchOnly: "gradient",
    NotDivided: "gradient scale",
    OneRankIgnored: "gradient",
    LocalNorm: "norm",
    ClipsByLocalNorm: "update",
    DecaysAll: "update",
    RateIsKept: "update",
    StaleAfterLoad: "resume",
    ForgetsMoments: "resume",
    LoadsHalf: "refused load",
    HandsOutItsOwn: "reads",
    Drifts: "replicas",
    SkipsNonFinite: "non-finite",
    OwnOrder: "names",
    TrainsFrozen: "frozen",
    SaysLess: "bytes",
    IgnoresSaving: "resume",
    WiderThanAsked: "dtype",
}
"""Each with the check that has to find it."""

NEEDS = {ClipsByLocalNorm: "sgd"}
"""The optimizer a mutant shows with; Adam does not ask how large all gradients are together."""

ALONE = MUTANTS.keys() - {OneRankIgnored, LocalNorm, ClipsByLocalNorm, StaleAfterLoad, Drifts}
"""Those that one rank shows; the others do wrong between ranks."""
