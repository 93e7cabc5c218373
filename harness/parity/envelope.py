"""How far rounding alone can drive two runs apart: T2's bounds, derived from the two configurations.

Nothing here is a tolerance somebody liked. Each bound is a count of roundings times the unit roundoff of the dtype in
which they happen; docs/verdicts.md gives the derivations at length and the measurements they were checked against.

Notation: u is the unit roundoff (half the gap between 1 and the next number). One rounding to nearest errs by at most
u, and by RMS * u in the mean square when mantissas are spread as they are in practice (log-uniformly).

Walks, not worst cases. n independent roundings in series make sqrt(n) * RMS * u. The worst case, n * u with all signs
conspiring, says nothing in bf16 (a four-layer decoder has n * u > 0.9) and is not what arithmetic does: round to
nearest has no preferred sign. The exception is a sum *kept* in 16 bits: small addends vanish against a large partial
sum, always downwards, so there the worst case n * u is the honest bound.

    forward    a signal meets FORWARD_BLOCK roundings in each block (two norms, seven products with weight and result
               rounded, rotation, attention, gating, two residual sums) and FORWARD_ENDS outside
    gradient   three times as many: the forward, the backward, and the forward's activations again where the backward
               multiplies by them
    products   an inner sum of K terms is made in fp32 (fp64 for fp64): sqrt(K) * RMS * u(fp32), for each product
    reduction  k microbatches are added in the main-gradient dtype, N ranks in the accumulate dtype: a walk over partial
               sums, sqrt(n / 2) * RMS * u; the wire rounds each contribution once, the result is rounded once

`SAFETY` times the root-mean-square estimate is allowed; beyond `REFUTED` times that, rounding is refuted. Between the
two the model is as likely to be off as the run, and the answer is UNDECIDED.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.config.capabilities import ENGINES
from harness.config.schema import EngineName
from harness.parity.admissible import global_microbatches, microbatches_per_rank

UNIT = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Unit roundoff by dtype: bf16 has 8 significant bits, fp16 11, fp32 24, fp64 53."""

RMS = math.sqrt(0.375 / math.log(2) / 3)
"""0.425: root-mean-square relative error of one rounding over u. Uniform within a gap (1/3), over a mantissa m whose
density is 1/(m ln 2) on [1, 2): the mean of 1/m^2 is 3/(8 ln 2)."""

SAFETY = 4.0
"""Allowed over expected. Tensors whose sums cancel (attention's queries and keys) and those that few values feed (rare
embedding rows) err more than the mean; the worst clean distance measured is 1.2 estimates (docs/verdicts.md)."""

REFUTED = 2.0
"""Refuted over allowed."""

SIGMAS = 4.0
"""Standard errors a signed bias may have."""

FORWARD_BLOCK = 19
FORWARD_ENDS = 8
PRODUCTS_BLOCK = 7
GRADIENT_FACTOR = 3

SIXTEEN_BITS = ("bf16", "fp16")


@dataclass(frozen=True)
class Arithmetic:
    """What one run rounds, where and how often. All errors are relative and root-mean-square unless said."""

    compute: str
    wire: str
    accumulate: str
    main: str
    layers: int
    ranks: int
    microbatches: int
    """k, on each rank."""
    global_microbatches: int
    tokens: int
    """Of one step, over all ranks."""
    inner: int
    """Longest inner sum of a matrix product, in terms."""
    parameters: int
    """Weights of the model, to within a per cent; only its square root is used."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Arithmetic:
        """Read it from a frozen configuration (flat, dotted keys)."""
        rows = int(config["train.microbatch_size"]) * int(config["data.seq_len"])
        return cls(
            compute=config["dtype.compute"],
            wire=config["dtype.grad_comm"],
            accumulate=_accumulate(config),
            main=config["dtype.main_grads"],
            layers=int(config["model.num_layers"]),
            ranks=int(config["mesh.world_size"]),
            microbatches=microbatches_per_rank(config),
            global_microbatches=global_microbatches(config),
            tokens=int(config["train.global_batch_size"]) * int(config["data.seq_len"]),
            inner=max(int(config["model.dim"]), int(config["model.ffn_dim"]), rows),
            parameters=_parameters(config),
        )

    @property
    def forward(self) -> float:
        """Of an activation at the model's end."""
        return self._compute(1)

    @property
    def gradient(self) -> float:
        """Of one averaged gradient, reduction included."""
        return math.hypot(self._compute(GRADIENT_FACTOR), self.reduction)

    def _compute(self, passes: int) -> float:
        inner_dtype = "fp64" if self.compute == "fp64" else "fp32"
        elementwise = passes * (FORWARD_BLOCK * self.layers + FORWARD_ENDS)
        products = passes * (PRODUCTS_BLOCK * self.layers + 1) * self.inner
        return RMS * math.hypot(UNIT[self.compute] * math.sqrt(elementwise), UNIT[inner_dtype] * math.sqrt(products))

    @property
    def reduction(self) -> float:
        """Of adding k microbatches and N ranks, and of the wire."""
        wire = UNIT[self.wire] if self.ranks > 1 else 0.0
        walk = math.hypot(
            wire,
            UNIT[self.accumulate] * math.sqrt(self.ranks / 2),
            UNIT[self.main] * math.sqrt(self.microbatches / 2 + 1),
        )
        return RMS * walk + self.stagnation

    @property
    def logged_norm(self) -> float:
        """Largest relative error of a norm whose squares are added in the main-gradient dtype."""
        return SAFETY * RMS * UNIT[self.main] * math.sqrt(self.parameters)

    @property
    def stagnation(self) -> float:
        """One-sided error of sums kept in 16 bits: the worst case, because it always has the same sign."""
        terms = 0.0
        if self.accumulate in SIXTEEN_BITS:
            terms += (self.ranks - 1) * UNIT[self.accumulate]
        if self.main in SIXTEEN_BITS:
            terms += (self.microbatches - 1) * UNIT[self.main]
        return terms

    @property
    def coherent(self) -> float:
        """Largest error that the whole gradient of one tensor can share: one rounding in the forward and one in the
        backward that all its elements pass through, which no averaging removes."""
        return 2 * UNIT[self.compute] + self.stagnation

    @property
    def global_coherent(self) -> float:
        """Largest error that all gradients can share: the one rounding where the loss enters the backward."""
        return UNIT[self.compute] + self.stagnation

    @property
    def scaling(self) -> float:
        """Error of dividing by M in one, two or three factors (1/k, 1/N), each rounded in the main-gradient dtype."""
        return 4 * UNIT[self.main]


def _accumulate(config: Mapping[str, Any]) -> str:
    """The dtype of sums over ranks: as configured, or the engine's own where that is null."""
    wire = str(config["dtype.grad_comm"])
    if config["dtype.grad_accum"] is not None:
        return str(config["dtype.grad_accum"])
    sums_itself = ENGINES[EngineName[config["engine.name"]]].sums_itself
    return "fp32" if sums_itself and wire in SIXTEEN_BITS else wire


def _parameters(config: Mapping[str, Any]) -> int:
    dim = int(config["model.dim"])
    attention = 2 * dim * dim * (1 + int(config["model.num_kv_heads"]) / int(config["model.num_heads"]))
    block = attention + 3 * dim * int(config["model.ffn_dim"])
    return round(int(config["model.num_layers"]) * block) + 2 * dim * int(config["model.vocab_size"])


@dataclass(frozen=True)
class Envelope:
    """What rounding allows between two runs that start from the same weights and are fed the same tokens."""

    arm: Arithmetic
    control: Arithmetic

    @property
    def distance(self) -> float:
        """Largest relative distance of one tensor's gradient at step 1."""
        return SAFETY * math.hypot(self.arm.gradient, self.control.gradient)

    @property
    def floor(self) -> float:
        """Distance that reductions alone explain, of a single element too: what tells kernels that agree from equal
        bits."""
        return SAFETY * SIGMAS * math.hypot(self.arm.reduction, self.control.reduction)

    def piece(self, numel: int) -> float:
        """Largest distance of a piece of a tensor: over a half of its own mean square it may lie sqrt(2) farther off,
        and the mean square of n independent errors scatters by a factor 1 + sqrt(2 / n) a standard deviation."""
        return math.sqrt(2) * self.distance * math.sqrt(1 + SIGMAS * math.sqrt(2 / numel))

    @property
    def loss(self) -> float:
        """Largest relative difference of the loss at step 1: the logits' errors, which are independent from token to
        token, averaged over the tokens; and the loss itself, rounded in fp32 or wider (microbatch means, their sum)."""
        logits = math.hypot(self.arm.forward, self.control.forward) / math.sqrt(self.arm.tokens)
        return SAFETY * logits + 4 * UNIT[self._wide]

    @property
    def _wide(self) -> str:
        return "fp64" if self.arm.compute == self.control.compute == "fp64" else "fp32"

    def scale(self, standard_error: float, residual: float) -> float:
        """Largest |b| of one tensor in g_arm = (1 + b) g_control + r.

        A pure factor leaves no residual, and rounding always does. So what rounding may contribute coherently is
        bounded by the residual it left as well as by `coherent`: two bf16 runs with equal bits but a factor
        1 + 1/1024 differ.
        """
        shared = min(self.arm.coherent + self.control.coherent, residual)
        return SIGMAS * standard_error + shared + self._scaling

    def global_scale(self, standard_error: float, residual: float) -> float:
        """Largest pooled b over all tensors, from the spread of the tensors' own."""
        shared = min(self.arm.global_coherent + self.control.global_coherent, residual)
        return SIGMAS * standard_error + shared + self._scaling

    @property
    def _scaling(self) -> float:
        return self.arm.scaling + self.control.scaling

    @property
    def norm(self) -> float:
        """Largest relative difference of the gradient norm at step 1, by the model alone: a scale error, and the
        second-order share of a distance that has no direction."""
        error = self.distance
        coherent = self.arm.global_coherent + self.control.global_coherent
        return error / math.sqrt(self.arm.tokens) + coherent + self._scaling + error**2 / 2

    @property
    def smallest_fault(self) -> float:
        """Relative size of the smallest structural fault: one of N ranks or k microbatches counted twice, or not."""
        return 1.0 / max(self.arm.ranks, self.control.ranks, self.arm.microbatches, self.control.microbatches, 2)

    @property
    def is_low_precision(self) -> bool:
        """Whether a change of a main weight by one unit can flip a compute weight by a much larger one."""
        return any(run.compute in SIXTEEN_BITS for run in (self.arm, self.control))
