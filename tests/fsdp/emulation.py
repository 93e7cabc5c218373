"""A training under a dtype policy on one process, written out in plain torch: what every rounding must be.

The emulation holds no bucket, no shard and no thread. It computes the gradient of every global microbatch in the
compute dtype and then makes the sums of `Case.strategy` one by one: who adds what to what, in which dtype and order.
The engine makes the same roundings in the same order, so its numbers must have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.engines import optim
from harness.engines.torch_dtypes import TORCH_DTYPES
from harness.fsdp import Dtypes, create_state
from harness.fsdp.comm import fixed_point
from harness.models.workload import LlamaWorkload
from tests.fsdp.trial import KEPT, Case, Record, batches

torch.set_num_threads(1)  # as on the ranks: some kernels' bits depend on the number of threads


def dtypes_of(case: Case) -> Dtypes:
    """The dtypes of a case, nothing left open."""
    dtype = case.config().dtype
    roles = (dtype.compute, dtype.main_params, dtype.main_grads, dtype.grad_comm, dtype.grad_accum)
    return Dtypes(*(TORCH_DTYPES[each] for each in roles if each is not None))


def sum_in_order(contributions: list[Tensor], accum: torch.dtype) -> Tensor:
    """((a + b) + c) + ..., every partial sum rounded to `accum`."""
    total = contributions[0].to(accum)
    for each in contributions[1:]:
        total = (total + each.to(accum)).to(accum)
    return total


def summed_per_step(gradients: list[list[Tensor]], dtypes: Dtypes) -> Tensor:
    """`no_shard`, `optim`: each rank adds its microbatches up as main gradients; one sum over ranks.

    gradients[rank][microbatch], in the compute dtype; returns the sum in the main gradients' dtype.
    """
    per_rank = []
    for microbatches in gradients:
        held = torch.zeros_like(microbatches[0], dtype=dtypes.grads)
        for each in microbatches:
            held = (held + each.to(dtypes.grads)).to(dtypes.grads)
        per_rank.append(held.to(dtypes.wire))
    return sum_in_order(per_rank, dtypes.accum).to(dtypes.grads)


def summed_per_microbatch(gradients: list[list[Tensor]], dtypes: Dtypes) -> Tensor:
    """`optim_grads`, `optim_grads_params`: one sum over ranks a microbatch, added to a shard of main gradients."""
    held: Tensor | None = None
    for contributions in zip(*gradients, strict=True):
        total = sum_in_order([each.to(dtypes.wire) for each in contributions], dtypes.accum)
        if held is None:
            held = total.to(dtypes.grads)
        else:  # one rounding, to the main gradients' dtype
            wide = torch.promote_types(dtypes.grads, dtypes.accum)
            held = (held.to(wide) + total.to(wide)).to(dtypes.grads)
    assert held is not None
    return held


Summing = Callable[[list[list[Tensor]], Dtypes], Tensor]


def summing_of(case: Case) -> Summing:
    """How a case's strategy orders its sums."""
    return summed_per_step if case.strategy in ("no_shard", "optim") else summed_per_microbatch


@dataclass
class Emulation:
    """One case: main weights, the optimizer over them, and a module in the compute dtype."""

    case: Case
    dtypes: Dtypes
    summing: Summing

    def __post_init__(self) -> None:
        config = self.case.config()
        self.workload = LlamaWorkload(config)
        self.module = self.workload.build("cpu", self.dtypes.compute)
        self.clip = config.optimizer.clip_norm
        self.lr = config.optimizer.lr
        self.main = {
            name: nn.Parameter(self.workload.initial_weight(name, param.shape).to(self.dtypes.main))
            for name, param in self.module.named_parameters()
        }
        groups = [
            optim.Group([p for n, p in self.main.items() if self.workload.decays(n, p.shape) is decays], decays)
            for decays in (True, False)
        ]
        self.optimizer = optim.make_optimizer(config.optimizer, groups)
        create_state(self.optimizer)

    @torch.no_grad()
    def install(self) -> None:
        """Main weights to compute weights."""
        for name, param in self.module.named_parameters():
            param.copy_(self.main[name])

    def microbatch_gradients(self, step: int) -> tuple[list[list[float]], dict[str, list[list[Tensor]]]]:
        """Losses by rank, and of every parameter the gradients by rank and microbatch, in the compute dtype."""
        named = dict(self.module.named_parameters())
        losses: list[list[float]] = []
        found: dict[str, list[list[Tensor]]] = {name: [] for name in named}
        for rank in range(self.case.world_size):
            losses.append([])
            for name in found:
                found[name].append([])
            for batch in batches(self.case, rank, step):
                loss = self.workload.loss(self.module, batch)
                losses[-1].append(loss.item())
                gradients = torch.autograd.grad(loss, list(named.values()))
                for name, gradient in zip(named, gradients, strict=True):
                    found[name][-1].append(gradient)
        return losses, found

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor]) -> float:
        """Clip, update; returns the norm before."""
        counters = fixed_point.square_counters(gradients.values(), torch.device("cpu"))
        norm = fixed_point.norm_from_counters(counters)
        coefficient = 1.0 if self.clip is None else self.clip / (norm + 1e-6)
        for name, weight in self.main.items():
            gradient = gradients[name]
            clipped = gradient * coefficient if coefficient < 1.0 or math.isnan(coefficient) else gradient
            weight.grad = clipped.to(weight.dtype)
        optim.set_lr(self.optimizer, self.lr)
        self.optimizer.step()
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Copies of the main weights."""
        return {name: weight.detach().clone() for name, weight in self.main.items()}


def emulate(case: Case, dtypes: Dtypes | None = None, summing: Summing | None = None) -> Record:
    """Train a case without the engine; `dtypes` and `summing` may be wrong on purpose."""
    emulation = Emulation(case, dtypes or dtypes_of(case), summing or summing_of(case))
    record = Record(case)
    record.weights[0] = emulation.weights()
    for step in range(1, case.steps + 1):
        emulation.install()
        losses, found = emulation.microbatch_gradients(step)
        divisor = case.num_microbatches
        gradients = {
            name: emulation.summing(each, emulation.dtypes) * (1.0 / divisor) if divisor != 1 else
            emulation.summing(each, emulation.dtypes)
            for name, each in found.items()
        }  # fmt: skip
        if step == 1:
            record.gradients = gradients
        record.norms.append(emulation.step(gradients))
        record.losses.append(losses[0])
        if step in KEPT:
            record.weights[step] = emulation.weights()
    return record
