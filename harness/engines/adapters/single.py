"""One process with the entire global batch; in fp64, the reference of every other engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.config.derived import global_microbatches
from harness.config.schema import Config, Numerics
from harness.engines.base import ReplicatedEngine
from harness.engines.protocol import Microbatch, Ranks, Seen, Workload
from harness.fsdp import FixedPoint


class SingleEngine(ReplicatedEngine):
    """Plain torch: backward of each microbatch in global order, sums in the main dtype, one division by M."""

    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        super().__init__(workload, config, ranks, fused=False)
        self.num_microbatches = 0
        self.sums = IntegerSums(config, self.trained) if config.numerics.mode is Numerics.exact else None

    def seen(self) -> Seen:
        return Seen(self.model, global_microbatches(self.config), self.compute_dtype)

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        """Add one microbatch's gradients; after the step's last one they are the mean."""
        loss = self.workload.loss(self.model, batch)
        loss.backward()
        self.num_microbatches += 1
        self.reduced = last
        if self.sums is not None:
            self.sums.absorb()
        if last and self.sums is not None:
            self.sums.finish(self.num_microbatches)
        elif last:
            for gradient in self._gradients().values():
                gradient.div_(self.num_microbatches)
        if last:
            self.num_microbatches = 0
        return loss.detach()

    def step(self, lr: float) -> float:
        """Norm before clipping. Raises `OverflowError`: under numerics=exact, a gradient exceeded the integers; no
        weight changed."""
        if self.sums is not None:
            self.sums.refuse()
        return super().step(lr)

    def _norm(self, pieces: Mapping[str, Tensor]) -> float:
        if self.sums is None:
            return super()._norm(pieces)
        return FixedPoint.norm(self._counted(pieces), self.ranks.device, self._total)


class IntegerSums:
    """Gradients of a step in integers, equal to numerics=exact on any number of ranks."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        self.fixed = FixedPoint(config.numerics.exact_bits, global_microbatches(config))
        self.weights = list(weights.values())
        device = self.weights[0].device
        self.sums = [torch.zeros(weight.numel(), dtype=torch.int64, device=device) for weight in self.weights]
        self.beyond = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def absorb(self) -> None:
        for weight, total in zip(self.weights, self.sums, strict=True):
            if weight.grad is not None:
                self.fixed.encode(weight.grad.reshape(-1), total, self.beyond, add=True)
                weight.grad = None

    @torch.no_grad()
    def finish(self, divisor: float) -> None:
        for weight, total in zip(self.weights, self.sums, strict=True):
            weight.grad = torch.empty_like(weight)
            self.fixed.decode(total, divisor, weight.grad.view(-1))
            total.zero_()

    def refuse(self) -> None:
        count = int(self.beyond)
        self.beyond.zero_()
        if count:
            for weight in self.weights:
                weight.grad = None
            raise self.fixed.overflow(count)
