"""Every dtype policy against an emulation of the same roundings, bit for bit; no tolerance is chosen by hand.

The emulation holds no bucket, no shard and no thread. It computes the gradient of every global microbatch in the
compute dtype and then makes the sums of `Case.strategy` one by one: who adds what to what, in which dtype and order.
The engine makes the same roundings in the same order, so its numbers must have the same bits.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from harness.config.schema import Dtype
from harness.engines import optim
from harness.engines.protocol import TORCH_DTYPES
from harness.fsdp import Dtypes, create_state
from harness.fsdp.comm import reduction
from harness.models.workload import LlamaWorkload
from tests.engines.conformance.trial import Evidence
from tests.fsdp.trial import Case, batches, differences, records, run_cases
from tests.support.covering import covering
from tests.support.spawn import run_ranks

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
        counters = reduction.square_counters(gradients.values(), torch.device("cpu"))
        norm = reduction.norm_from_counters(counters)
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


def emulate(case: Case, dtypes: Dtypes | None = None, summing: Summing | None = None) -> Evidence:
    """Train a case without the engine; `dtypes` and `summing` may be wrong on purpose."""
    emulation = Emulation(case, dtypes or dtypes_of(case), summing or summing_of(case))
    record = Evidence()
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
        record.weights[step] = emulation.weights()
    return record


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FORMATS = ("fp32", "bf16", "fp16", "fp64")
WEIGHTS = [(f, f) for f in FORMATS] + [("bf16", "fp32"), ("fp16", "fp32")] + [(f, "fp64") for f in FORMATS[:3]]
"""(compute, main) for every pair where main holds compute."""
FACTORS = {
    "weights": WEIGHTS,
    "grads": FORMATS,
    "wire": FORMATS,
    "accum": FORMATS,
    "strategy": STRATEGIES,
    "k": (1, 2, 3),
    "world_size": (1, 2, 3, 4),
}
NAMES = tuple(FACTORS)
STEPS = 2
CLIP = 0.5  # below the norms that occur, so that it acts

Point = tuple[object, ...]
"""A value of each factor, in the order of `NAMES`."""


REDUCTION = tuple(map(NAMES.index, ("grads", "wire", "accum", "strategy")))
"""Of these every triple of values has a case."""
SAMPLE = random.Random(0).sample(list(itertools.product(*FACTORS.values())), 1_000)
"""Points among which those are that hold every pair and triple."""


@cache
def covering_points(triples: bool) -> tuple[Point, ...]:
    """Few points of every pair of values, or of every triple of a reduction's."""
    values = [tuple(point[place] for place in REDUCTION) for point in SAMPLE] if triples else SAMPLE
    return tuple(SAMPLE[place] for place in covering(values, 3 if triples else 2))


def case_of(point: Point) -> Case:
    weights, grads, wire, accum, strategy, k, world_size = point
    assert isinstance(weights, tuple)
    assert isinstance(k, int)
    assert isinstance(world_size, int)
    dtype = "/".join(map(str, (*weights, grads, wire, accum)))
    return Case("native", str(strategy), world_size, k, 0, "adamw", CLIP, dtype, "ordered", STEPS)


PAIRS, TRIPLES = ([case_of(point) for point in covering_points(triples)] for triples in (False, True))


def record(case: Case, among: list[Case]) -> Evidence:
    return records(tuple(each for each in among if each.world_size == case.world_size))[case][0]


def name_of(case: Case) -> str:
    return f"{case.dtype}-{case.strategy}-k{case.k}-{case.world_size}ranks"


@pytest.mark.parametrize("case", PAIRS, ids=name_of)
def test_every_policy_makes_exactly_its_own_roundings(case: Case) -> None:
    check(case, record(case, PAIRS))


@pytest.mark.full
@pytest.mark.parametrize("case", TRIPLES, ids=name_of)
def test_every_triple_of_a_reduction_makes_exactly_its_own_roundings(case: Case) -> None:
    check(case, record(case, TRIPLES))


def check(case: Case, found: Evidence) -> None:
    right = emulate(case)
    assert all(gradient.dtype == dtypes_of(case).grads for gradient in found.gradients.values())
    assert all(weight.dtype == dtypes_of(case).main for weight in found.weights[1].values())
    assert differences(found, right) == []
    assert min(found.norms) > CLIP, "clipping must act"


ROLES = {
    "fp32/fp32/fp32/bf16/fp32": {"grads": "bf16", "wire": "fp32", "accum": "bf16", "main": "fp64"},
    "bf16/fp32/bf16/fp32/fp64": {"compute": "fp32", "grads": "fp32", "wire": "fp16"},
    "fp16/fp16/fp32/fp32/fp16": {"compute": "bf16", "main": "fp32", "grads": "fp16", "accum": "fp32"},
    "fp64/fp64/fp64/fp64/fp64": {"compute": "fp32", "grads": "fp32", "wire": "fp32", "accum": "fp32", "main": "fp32"},
}
"""Policy -> role -> a dtype that is wrong for it."""


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@pytest.mark.parametrize(("policy", "role"), [(p, r) for p, wrong in ROLES.items() for r in wrong])
def test_one_wrong_dtype_in_one_role_shows(policy: str, role: str, strategy: str) -> None:
    """The comparison above can fail: each role leaves its mark on the bits."""
    case = Case("native", strategy, 3, 2, 0, "adamw", CLIP, policy, "ordered", 1)
    wrong = replace(dtypes_of(case), **{role: TORCH_DTYPES[Dtype[ROLES[policy][role]]]})
    assert differences(emulate(case, wrong), emulate(case))


@pytest.mark.parametrize("case_strategy", ["optim", "optim_grads"])
def test_summing_microbatches_and_ranks_in_the_other_order_shows(case_strategy: str) -> None:
    case = Case("native", case_strategy, 3, 2, 0, "adamw", CLIP, "bf16/fp32/fp32/bf16/fp32", "ordered", 1)
    other = summed_per_microbatch if summing_of(case) is summed_per_step else summed_per_step
    assert differences(emulate(case, summing=other), emulate(case))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ordered_refuses_updates_of_16_bit_weights_that_see_where_shards_are_cut(optimizer: str) -> None:
    case = Case("native", "optim", 1, 1, 0, optimizer, None, "bf16/bf16/fp32/fp32/fp32", "ordered", 1)
    with pytest.raises(ValueError, match="needs AdamW"):
        run_ranks(run_cases, 1, [case])
    run_ranks(run_cases, 1, [replace(case, numerics="fast")])
