"""Which trainings are recorded: every combination of what decides who waits for whom, and a few things beside."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from harness.fsdp import MixedPrecisionPolicy
from harness.fsdp.options import Fp8
from tests.fsdp import pairs
from tests.streams.cuda import MAIN
from tests.support.covering import covering

SOME = 1_000
"""Cases of the product among which those are that hold all pairs."""

POLICIES: dict[str, tuple[torch.dtype, MixedPrecisionPolicy, str]] = {
    "fp32": (torch.float32, MixedPrecisionPolicy(), "fast"),
    "bf16": (torch.bfloat16, MixedPrecisionPolicy(torch.float32, torch.float32), "fast"),
    "bf16_comm": (torch.bfloat16, MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16), "fast"),
    "exact": (torch.float32, MixedPrecisionPolicy(), "exact"),
}
"""dtype of the module, policy of the engine, promise about sums."""


@dataclass(frozen=True)
class Case:
    """outer: "" has no outer axis; else HSDP (no_shard) or HFSDP (optim). buffers: plain, double, user. recompute: "",
    or which of torch's two ways. backward_on: the stream current where `backward` is called."""

    strategy: str
    outer: str = ""
    k: int = 1
    prefetch: int = 1
    buffers: str = "plain"
    offload: bool = False
    recompute: str = ""
    clip: bool = False
    backward_on: str = MAIN
    policy: str = "fp32"
    more: str = ""
    """A key of `MORE`: what is not combined with everything."""

    @property
    def is_possible(self) -> bool:
        return self.prefetch <= 1 or self.buffers == "plain"

    @property
    def world(self) -> int:
        return self.inner * self.hosts

    @property
    def inner(self) -> int:
        return SIZES.get(self.more, (2, 2))[1]

    @property
    def hosts(self) -> int:
        """Ranks of the outer axis; 1 where there is none."""
        return SIZES.get(self.more, (2, 2))[0] if self.outer else 1

    def __str__(self) -> str:
        return "-".join(
            filter(
                None,
                (
                    self.strategy,
                    {"": "", "no_shard": "hsdp", "optim": "hfsdp"}[self.outer],
                    f"k{self.k}",
                    f"ahead{self.prefetch}",
                    self.buffers,
                    "offload" * self.offload,
                    self.recompute,
                    "clip" * self.clip,
                    self.backward_on,
                    self.policy,
                    self.more.replace(" ", "_"),
                ),
            )
        )


FACTORS: dict[str, tuple[Any, ...]] = {
    "strategy": pairs.STRATEGIES,
    "outer": ("", "no_shard", "optim"),
    "k": (1, 2),
    "prefetch": (0, 1, 2),
    "buffers": ("plain", "double", "user"),
    "offload": (False, True),
    "recompute": ("", "kept", "reentrant"),
    "clip": (False, True),
    "backward_on": (MAIN, "other"),
    "policy": tuple(POLICIES),
}


@cache
def product() -> tuple[Case, ...]:
    """All that is possible, in an order in which neighbours have little in common."""
    cases = [case for each in itertools.product(*FACTORS.values()) if (case := Case(*each)).is_possible]
    random.Random(0).shuffle(cases)
    return tuple(cases)


LATE = "8 bits, block, recomputed late"
"""Blocks are recomputed from the second forward on, when ranks have agreed that none is."""
EIGHT_BITS = {f"8 bits, {recipe.value}": recipe for recipe in Fp8} | {LATE: Fp8.block}
"""The blocks' matrices multiply 8 bits under a recipe, and are gathered so."""
SIZES = {"inner axis of one rank": (2, 1), "inner axis of three ranks": (2, 3), "outer axis of three ranks": (3, 1)}
"""Ranks of the outer axis and of the inner one, where they are not two and two. Three divide no bucket."""
MORE: dict[str, dict[str, Any]] = {
    "one communicator": {"separate_gather_group": False},
    "registered at once": {"nccl_ub": "auto"},
    "concatenated": {"grad_buffer": "concat"},
    "looked at": {"report_nan_in_param_grad": True},
    "compared": {"check_replicas_every": 1},
    "ordered": {"numerics": "ordered"},
    **{sizes: {} for sizes in SIZES},
    "two optimizers": {},
    "evaluated": {},
    "experts": {},
    "read": {},
    "loaded": {},
    **{recipe: {} for recipe in EIGHT_BITS},
}
"""Options that are not combined with everything, and what programs do that few do."""
EVALUATING = "evaluated"
"""Between a forward and its backward another one runs without gradients, on a stream that waits and is waited for."""
EXPERTS = "experts"
"""The last block has communicators of its own, over the same ranks."""
APART = "two optimizers"
"""Every other weight has an optimizer of its own, which steps after the other one."""
LOADING = "loaded"
"""What the engine has is put back where it is, from copies, after an update."""
READING = "read"
"""Weights are read after an update, on a stream that waits for the program's."""
OTHERS = (
    Case("optim_grads_params", more="one communicator"),
    Case("optim_grads_params", more="registered at once", policy="bf16_comm"),
    Case("optim_grads_params", "no_shard", more="registered at once"),
    Case("no_shard", k=2, more="concatenated"),
    Case("optim_grads", k=2, more="unsharded", policy="bf16_comm"),
    Case("optim_grads_params", k=2, clip=True, more="looked at", policy="bf16_comm"),
    Case("optim", "no_shard", more="compared"),
    Case("optim_grads_params", "optim", k=2, clip=True, more="ordered"),
    Case("optim_grads_params", more="inner axis of one rank", policy="bf16"),
    Case("optim_grads_params", "optim", more="inner axis of one rank", policy="bf16"),
    Case("optim", "no_shard", more="inner axis of one rank", k=2),
    Case("no_shard", more="inner axis of three ranks", policy="bf16_comm"),
    Case("no_shard", "no_shard", more="inner axis of three ranks", k=2),
    Case("no_shard", "optim", more="outer axis of three ranks", policy="bf16_comm"),
    Case("optim_grads", "no_shard", more="outer axis of three ranks", policy="bf16_comm", k=2),
    Case("optim_grads", more=APART, offload=True, policy="bf16"),
    Case("optim", "optim", more=APART, k=2),
    Case("optim_grads_params", more=EVALUATING, k=2),
    Case("optim_grads", "optim", more=EVALUATING, buffers="double"),
    Case("optim_grads_params", "no_shard", more=EXPERTS, k=2),
    Case("optim", more=EXPERTS, policy="bf16_comm"),
    Case("optim_grads", more=READING, policy="bf16"),
    Case("optim", more=LOADING, offload=True, policy="bf16"),
    Case("optim_grads_params", more="8 bits, current", k=2, clip=True),
    Case("optim_grads_params", "optim", more="8 bits, current", policy="bf16"),
    Case("optim_grads", "no_shard", more="8 bits, block", recompute="kept"),
    Case("optim_grads_params", more="8 bits, block", buffers="user", policy="bf16_comm"),
    Case("optim", more="8 bits, mx", offload=True),
    Case("optim_grads_params", more="8 bits, mx", policy="bf16"),
    Case("optim_grads_params", "optim", more="8 bits, mx", recompute="kept", buffers="double"),
    Case("optim_grads_params", "no_shard", more=LATE, k=1),
    Case("no_shard", "no_shard", more="8 bits, current", buffers="double", policy="bf16"),
    Case("no_shard", more="8 bits, current", k=2, backward_on="other"),
)
"""Cases with them."""


@cache
def cover() -> tuple[Case, ...]:
    """Few cases that hold every possible pair of values."""
    some = product()[:SOME]
    return tuple(some[place] for place in covering([values_of(case) for case in some]))


def pairs_of(cases: Iterable[Case]) -> set[Any]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(values_of(case)), 2)}


def values_of(case: Case) -> tuple[Any, ...]:
    return tuple(vars(case).values())
