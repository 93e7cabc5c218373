"""Gradients that another optimizer's `zero_grad` forgot.

[Note: Disjoint] Several optimizers may have parts of one model, as the two of a GAN. Gradients of a model are reduced
and forgotten together; so when one of them calls `zero_grad`, the others lose theirs. One that calls its own before its
next step never notices, as it would have forgotten them itself; one that steps without doing so is told, on all ranks
if any rank had a gradient for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from harness.fsdp.comm.crossed import Everyone


@dataclass(frozen=True)
class LostGradients:
    """Optimizers of one model that lost gradients to another one: the same on all ranks.

    had: each, and whether this rank had a gradient of its parameters.
    """

    had: Sequence[tuple[Optimizer, bool]] = ()

    def to(self, forgetting: Optimizer, others: Sequence[tuple[Optimizer, bool]]) -> LostGradients:
        """What is lost when an optimizer forgets the gradients of a step that has begun, and so those of others."""
        before = {id(each) for each, had in self.had if had}
        return LostGradients([(each, had or id(each) in before) for each, had in others if each is not forgetting])

    def without(self, optimizer: Optimizer) -> LostGradients:
        """What is lost when an optimizer has forgotten its gradients itself."""
        return LostGradients([each for each in self.had if each[0] is not optimizer])

    def check(self, optimizer: Optimizer, everyone: Everyone) -> None:
        """Refuse a step without gradients that another optimizer forgot. *Collective* where that may be.

        Raises:
            RuntimeError: on all ranks, if there were any on one.
        """
        found = next((had for each, had in self.had if each is optimizer), None)
        if found is None:
            return
        told = torch.tensor([int(found)], dtype=torch.int64, device=everyone.runtime.device)
        if int(everyone.sum_scalars(told, "gradients that were forgotten")):
            raise RuntimeError(
                f"gradients that {type(optimizer).__name__} was to step with were forgotten by the zero_grad() of"
                " another optimizer of this model: they are reduced together, and forgotten together. Call zero_grad()"
                " of each optimizer before the backward it steps with, or shard each network by itself"
            )
