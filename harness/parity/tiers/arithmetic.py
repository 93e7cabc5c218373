"""Roundings of one run, their place and number, counted from its configuration; docs/verdicts.md derives each.

A sum *kept* in 16 bits has the worst case for its bound, n * u: small addends vanish against a large partial sum,
always downwards. The roundings of a user's own model (ext) are not counted: its bounds come from a perturbed reference
alone, and without one there is no verdict beyond equal bits (`Arithmetic.observed`). `SAFETY` times the
root-mean-square estimate is allowed; beyond `REFUTED` times that, rounding is refuted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.config.capabilities import ENGINES
from harness.config.derived import ODD_KERNEL, model_parameters, own_sum
from harness.config.roundoff import FP8_UNIT, RMS, SIXTEEN_BITS, UNIT, lost_in_integers
from harness.config.schema import Dtype, EngineName, ModelConfig, ModelFamily
from harness.parity.tiers.comparable import global_microbatches, microbatches_per_rank

Array = NDArray[Any]
Round = Callable[[Array], Array]


ADDENDS = ((0.0, 1.0), (1.0, 1.0), (0.9, 0.02))
"""Mean and standard deviation: independent, sharing a mean, nearly equal."""

ELEMENTS = 1 << 16
"""Numbers drawn a simulation, over all addends; 64 sums at least."""


@lru_cache(maxsize=256)
def noise(ranks: int, microbatches: int, wire: str, accumulate: str, main: str) -> float:
    """Root-mean-square relative error of a step's gradient by its sums alone, in the worst order.

    Args: ranks: N, summed in `accumulate` after the wire. microbatches: k, added on each rank in sequence. main: dtype
    of the result.
    """
    ranks, microbatches = max(1, ranks), max(1, microbatches)
    of_microbatches = _worst(microbatches, main, main, main, ("in order",))
    # Who adds in another dtype than the wire's adds whole contributions as they arrive; partial sums do not travel.
    orders = tuple(ORDERS) if accumulate == wire else ("in order",)
    of_ranks = _worst(ranks, wire, accumulate, main, orders) if ranks > 1 else 0.0
    return math.hypot(of_microbatches, of_ranks)


def _worst(count: int, wire: str, accumulate: str, main: str, orders: tuple[str, ...]) -> float:
    return max(error(order, count, wire, accumulate, main, *addends) for order in orders for addends in ADDENDS)


def error(order: str, count: int, wire: str, accumulate: str, main: str, mean: float, deviation: float) -> float:
    """Root-mean-square relative error of a mean of `count` addends in one of `ORDERS`.

    Args: wire: dtype of sent addends, and of partial sums in a ring or tree. accumulate: dtype of partial sums. main:
    dtype of addends and result. mean, deviation: of their normal distribution.
    """
    rng = np.random.default_rng(count)
    drawn = rng.standard_normal((count, max(64, ELEMENTS // count))) * deviation + mean
    addends = rounder(main)(drawn)
    exact = addends.astype(np.longdouble).sum(0) / count
    kept, sent = rounder(accumulate), rounder(wire)
    total = ORDERS[order](sent(addends), kept, sent) if count > 1 else addends[0]
    off = rounder(main)(total / count).astype(np.longdouble) - exact
    return math.sqrt(float((off * off).sum() / (exact * exact).sum()))


def _in_order(addends: Array, kept: Round, sent: Round) -> Array:
    total = kept(addends[0])
    for addend in addends[1:]:
        total = kept(total + addend)
    return total


def _ring(addends: Array, kept: Round, sent: Round) -> Array:
    count, size = addends.shape
    starts = np.arange(size) % count
    columns = np.arange(size)
    total = kept(addends[starts, columns])
    for hop in range(1, count):
        total = kept(sent(total) + addends[(starts + hop) % count, columns])
    return total


def _tree(addends: Array, kept: Round, sent: Round) -> Array:
    level = kept(addends)
    while len(level) > 1:
        even = level[: len(level) // 2 * 2]
        summed = kept(even[0::2] + sent(even[1::2]))
        level = np.concatenate([summed, level[len(even) :]])
    total: Array = level[0]
    return total


ORDERS: dict[str, Callable[[Array, Round, Round], Array]] = {"in order": _in_order, "ring": _ring, "tree": _tree}


def rounder(dtype: str) -> Round:
    """Rounding to a dtype, as float64."""
    if dtype == "bf16":
        return _bf16
    kind = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16}[dtype]
    return lambda values: values.astype(kind).astype(np.float64)


def _bf16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (nearest & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


SAFETY = 4.0
"""Allowed over expected.

Tensors whose sums cancel (attention's queries and keys) and those that few values feed (rare embedding rows) err more
than the mean; the worst clean distance measured is 1.2 estimates (docs/verdicts.md).
"""

SIGMAS = 4.0
"""Standard errors that a signed bias may have."""

FORWARD_BLOCK = 19
FORWARD_ENDS = 8
PRODUCTS_BLOCK = 7
PRODUCTS_ENDS = 1
GRADIENT_FACTOR = 3

FP8_BLOCK = 4
"""FP8 products in series in a block: into attention, out of it, into the feed-forward, out of it."""

RARE = 1e-4
"""Probability that a gradient of fewer elements is smaller than its terms."""


MANY = 32
"""Elements from which on SAFETY covers the few draws of the perturbed reference."""


ODD_DEPTH = (31, 18, 8, 2)
"""Roundings of a block of the odd model and beside its blocks, products of a block and beside them."""


@dataclass(frozen=True)
class Arithmetic:
    """Roundings of one run. All errors are relative and root-mean-square unless stated."""

    compute: str
    wire: str
    accumulate: str
    main: str
    layers: int
    ranks: int
    microbatches: int
    global_microbatches: int
    tokens: int
    inner: int
    parameters: int
    """Weights of the model; only its square root is used."""
    family: ModelFamily = ModelFamily.llama
    num_experts: int = 1
    """Experts a token chooses among; 1 without routing."""
    experts_per_token: int = 1
    reused: str = ""
    """Pattern of parameters used more than once in a forward; may be empty."""
    fp8: str = ""
    """FP8 recipe; may be empty."""
    casts_first: bool = False
    """True if weights are cast to the compute dtype before they are quantized, as FSDP2 gathers them."""
    exact_bits: int | None = None
    """Resolution of integer gradients under `numerics=exact`; else None."""
    seen: tuple[float, float] | None = None
    """Observed errors in place of the counts behind `forward` and `gradient`, for a user's own model."""
    counted: tuple[int, int] | None = None
    """Roundings and products in series through a watched program's model, on its graph; else None."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Arithmetic:
        known = {each.name: config.get(f"model.{each.name}", each.default) for each in fields(ModelConfig)}
        family = known["family"]
        known["family"] = family if isinstance(family, ModelFamily) else ModelFamily[family]
        model = ModelConfig(**known)
        rows = int(config["train.microbatch_size"]) * int(config["data.seq_len"])
        routed, cast = model.family is ModelFamily.moe, config["dtype.compute"] != config["dtype.main_params"]
        return cls(
            compute=config["dtype.compute"],
            wire=config["dtype.grad_comm"],
            accumulate=_accumulate(config),
            main=config["dtype.main_grads"],
            layers=model.num_layers + int(model.family is ModelFamily.odd and model.repeat_unit),
            ranks=int(config["mesh.world_size"]),
            microbatches=microbatches_per_rank(config),
            global_microbatches=global_microbatches(config),
            tokens=int(config["train.global_batch_size"]) * int(config["data.seq_len"]),
            inner=int(config.get("watched.inner", 0))
            or max(model.dim * (ODD_KERNEL if model.family is ModelFamily.odd else 1), model.ffn_dim, rows),
            parameters=model_parameters(model),
            family=model.family,
            num_experts=model.num_experts if routed else 1,
            experts_per_token=model.experts_per_token if routed else 1,
            reused=_reused(model),
            fp8=str(config.get("dtype.fp8") or ""),
            casts_first=cast and bool(config.get("dtype.fp8")) and config["engine.name"] == "fsdp2",
            exact_bits=int(config["numerics.exact_bits"]) if config.get("numerics.mode") == "exact" else None,
            counted=(int(config["watched.roundings"]), int(config["watched.products"]))
            if "watched.version" in config
            else None,
        )

    @cached_property
    def forward(self) -> float:
        """Relative rounding error of an activation at the model's end."""
        return math.hypot(self._compute(1), self.quantized(1))

    @cached_property
    def gradient(self) -> float:
        """Relative rounding error of one averaged gradient, reduction included."""
        return math.hypot(self.local, self.reduction)

    @property
    def local(self) -> float:
        """Relative rounding error of one rank's gradient after its backward."""
        return math.hypot(self._compute(GRADIENT_FACTOR), self.quantized(GRADIENT_FACTOR))

    def quantized(self, passes: int = GRADIENT_FACTOR) -> float:
        """Relative error of FP8 operands: two roundings a product.

        Passes are the forward alone, or the forward, its activations again, the backward, and the product of the
        weight's gradient.
        """
        if not self.fp8 or self.family is ModelFamily.ext:  # what is observed has them in it
            return 0.0
        if self.fp8 not in FP8_UNIT:  # a recipe of an earlier version
            return 1.0
        unit, of_gradients = FP8_UNIT[self.fp8]
        products = FP8_BLOCK * self.layers
        squares = 2 * products * unit**2
        if passes > 1:
            squares = 2 * squares + (products + 1) * (unit**2 + of_gradients**2)
        return RMS * math.sqrt(squares)

    def observed(self, reach: Mapping[str, Mapping[str, Mapping[str, float]]], draws: int) -> Arithmetic:
        """Observed errors in place of missing counts; `reach` as in `Envelope`.

        The loss is one number of few draws and gets their margin. In fp64, first-order errors are those of fp32 times
        the ratio of units.
        """
        seen = reach.get("fp32" if self.compute == "fp64" else self.compute, {}).get("", {})
        if self.family is not ModelFamily.ext or "distance" not in seen:
            return self
        factor = UNIT["fp64"] / UNIT["fp32"] if self.compute == "fp64" else 1.0
        forward = seen.get("loss", 0.0) * math.sqrt(self.tokens) * margin(1, draws) / SAFETY
        return replace(self, seen=(factor * forward, factor * seen["distance"]))

    @property
    def is_bounded(self) -> bool:
        return self.family is not ModelFamily.ext or self.seen is not None or self.counted is not None

    def _compute(self, passes: int) -> float:
        if self.family is ModelFamily.ext and self.counted is None:
            return math.inf if self.seen is None else self.seen[passes > 1]
        inner_dtype = "fp64" if self.compute == "fp64" else "fp32"
        roundings, products = self.counted or self._depth()
        elementwise, sums = passes * roundings, passes * products * self.inner
        return RMS * math.hypot(UNIT[self.compute] * math.sqrt(elementwise), UNIT[inner_dtype] * math.sqrt(sums))

    def _depth(self) -> tuple[int, int]:
        """Roundings and products in series through a model; parallel branches count once."""
        moe = self.family is ModelFamily.moe  # the gate, the product with it, the sum over experts; and the router
        block = FORWARD_BLOCK + moe * (1 + self.experts_per_token), FORWARD_ENDS, PRODUCTS_BLOCK + moe, PRODUCTS_ENDS
        roundings, ends, products, outer = ODD_DEPTH if self.family is ModelFamily.odd else block
        return roundings * self.layers + ends, products * self.layers + outer

    @property
    def reordered(self) -> float:
        """Relative error of a product in 16 bits whose inner sum is made in another order: roundings that flip.

        A sum that errs by e crosses the edge between two numbers with probability e / u, and is 2 u off then.
        """
        inner = RMS * UNIT["fp32"] * math.sqrt(self.inner)
        return 2 * math.sqrt(UNIT[self.compute] * inner)

    @cached_property
    def reduction(self) -> float:
        """Relative rounding error of adding k microbatches and N ranks, wire and division included, in the worst order
        (`orders`)."""
        return noise(self.ranks, self.microbatches, self.wire, self.accumulate, self.main)

    def lost(self, numel: int) -> float:
        """Norm of an averaged gradient's part below the integers' resolution, for `numel` elements."""
        terms = self.global_microbatches
        return 0.0 if self.exact_bits is None else lost_in_integers(self.exact_bits, terms, numel)

    def swapped(self, error: float, tokens: float) -> float:
        """Expected routes of so many tokens, over all blocks, that scores with this error send to another expert.

        Among N scores drawn alike, the last chosen and the first rejected lie within x standard deviations of each
        other with density N * phi(z), z the quantile that K of N exceed. Scores that err by e in the mean square swap
        across a gap with probability e / sqrt(pi) times that density.
        """
        n, k = self.num_experts, self.experts_per_token
        if k >= n:
            return 0.0
        density = n * NormalDist().pdf(NormalDist().inv_cdf(1 - k / n))
        return tokens * self.layers * min(1.0, density * error / math.sqrt(math.pi))

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
        """Largest error common to a tensor's whole gradient: one shared rounding in the forward and one in the
        backward."""
        return UNIT[self.compute] + self.global_coherent

    @property
    def global_coherent(self) -> float:
        """Largest error common to all gradients: the one rounding where the loss enters the backward, and that of FP8
        operands, which is unbiased in first order only."""
        return UNIT[self.compute] + self.stagnation + 2 * self.quantized() ** 2

    @property
    def scaling(self) -> float:
        """Error of dividing by M in one, two or three factors (1/k, 1/N), each rounded in the main-gradient dtype."""
        return 4 * UNIT[self.main]


def of_piece(whole: float, numel: int) -> float:
    """Largest distance of a piece of so many elements of a tensor with bound `whole`.

    Over a half of its own mean square it may be sqrt(2) larger, and the mean square of n independent errors scatters by
    a factor 1 + sqrt(2 / n) a standard deviation.
    """
    return math.sqrt(2) * whole * math.sqrt(1 + SIGMAS * math.sqrt(2 / max(1, numel)))


def _accumulate(config: Mapping[str, Any]) -> str:
    if config["dtype.grad_accum"] is not None:
        return str(config["dtype.grad_accum"])
    return own_sum(Dtype[config["dtype.grad_comm"]], ENGINES[EngineName[config["engine.name"]]].sums_itself).name


def _reused(model: ModelConfig) -> str:
    if model.family is ModelFamily.ext:  # any may be
        return ".*"
    if model.family is ModelFamily.odd:
        return r"embedding\.weight|blocks\.\d+\.ffn\..*" + (r"|blocks\.0\..*" if model.repeat_unit else "")
    return r"embedding\.weight" if model.tie_embeddings else ""


def margin(numel: int, draws: int) -> float:
    """SAFETY, and more for few elements, because one error's square is compared with few draws of it.

    Twice the root of the quantile that F with n and n * draws degrees of freedom exceeds once in 10^5.
    """
    if numel >= MANY:
        return SAFETY
    from scipy.special import fdtri

    return max(SAFETY, 2.0 * math.sqrt(float(fdtri(numel, numel * draws, 1 - RARE / 10))))
