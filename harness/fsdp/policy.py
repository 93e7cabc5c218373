"""What is sharded and in which dtype: frozen, hashable, validated policies.

A policy is the key of a study as much as an argument of the engine, so it holds values only, compares by value, and
refuses what the engine does not honour instead of ignoring it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Strategy(Enum):
    """ZeRO stage by name. A member knows what it splits over the ranks of the data-parallel group."""

    no_shard = 0
    optim = 1
    optim_grads = 2
    optim_grads_params = 3

    @property
    def shards_optimizer(self) -> bool:
        """Main weights and optimizer state are split."""
        return self is not Strategy.no_shard

    @property
    def shards_grads(self) -> bool:
        """Gradients are reduced every microbatch and only this rank's shard is kept."""
        return self in (Strategy.optim_grads, Strategy.optim_grads_params)

    @property
    def shards_params(self) -> bool:
        """Compute weights exist only while a unit is in use."""
        return self is Strategy.optim_grads_params

    @classmethod
    def parse(cls, value: Strategy | str | int) -> Strategy:
        """Read a stage given as a member, its name, or its number 0-3.

        Raises:
            ValueError: the value names no stage.
        """
        if isinstance(value, Strategy):
            return value
        if isinstance(value, str) and value in cls.__members__:
            return cls[value]
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 3:
            return cls(value)
        names = ", ".join(f"{member.value} or '{member.name}'" for member in cls)
        raise ValueError(f"zero_dp_strategy={value!r} names no strategy; valid are {names}")


class Numerics(Enum):
    """How much order of arithmetic the engine promises.

    fast: none. deterministic: the same run gives the same bits. ordered: sums run in rank order and the norm is
    order-free, so that all strategies agree bit for bit where the microbatches are summed in the same order.
    """

    fast = "fast"
    deterministic = "deterministic"
    ordered = "ordered"

    @property
    def bitwise(self) -> bool:
        """Bits may not depend on how the buckets were cut."""
        return self is Numerics.ordered


_ITEMSIZE_FLOOR = 2  # bytes; the narrowest compute dtype there is (8-bit weights are not built)
BUCKET_ALIGN_BYTES = 256
"""Every parameter in a gathered bucket starts on a multiple of this: kernels see one alignment in every layout."""


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of the four roles a number plays between a forward and an update.

    main_params_dtype: weights the optimizer updates; None means the compute weights themselves.
    main_grads_dtype: stored and accumulated gradients; None means the main weights' dtype.
    grad_comm_dtype: what a reduction sends; None means the main gradients' dtype.
    grad_accum_dtype: the sum inside a reduction; None means fp32, or wider if the wire is wider.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    grad_accum_dtype: torch.dtype | None = None
    allow_low_precision_grads: bool = False

    def resolve(self, compute: torch.dtype) -> Dtypes:
        """Fill every None for parameters whose compute dtype is `compute`.

        Raises:
            ValueError: a dtype is no floating-point dtype, or gradients are kept below fp32 without
                `allow_low_precision_grads`, or a sum would run in fewer bits than it is sent in.
        """
        main = self.main_params_dtype or compute
        grads = self.main_grads_dtype or main
        wire = self.grad_comm_dtype or grads
        accum = self.grad_accum_dtype or torch.promote_types(torch.float32, wire)
        dtypes = Dtypes(compute=compute, main=main, grads=grads, wire=wire, accum=accum)
        dtypes.validate(allow_low_precision_grads=self.allow_low_precision_grads)
        return dtypes


@dataclass(frozen=True)
class Dtypes:
    """A policy resolved for one compute dtype."""

    compute: torch.dtype
    main: torch.dtype
    grads: torch.dtype
    wire: torch.dtype
    accum: torch.dtype

    def validate(self, *, allow_low_precision_grads: bool) -> None:
        """Raise ValueError for combinations that lose gradients silently."""
        for role in ("compute", "main", "grads", "wire", "accum"):
            dtype = getattr(self, role)
            if not dtype.is_floating_point or dtype.itemsize < _ITEMSIZE_FLOOR:
                raise ValueError(f"{role} dtype {dtype} is not supported; use bfloat16, float16, float32 or float64")
        if self.grads.itemsize < 4 and not allow_low_precision_grads:
            raise ValueError(
                f"main_grads_dtype resolves to {self.grads}: gradients summed over microbatches in 16 bits lose small"
                " contributions. Set main_grads_dtype=torch.float32, or allow_low_precision_grads=True to accept it"
            )
        if self.main.itemsize < self.compute.itemsize:
            raise ValueError(
                f"main_params_dtype={self.main} is narrower than the module's {self.compute}: updates lose bits that"
                f" the forward uses. Set main_params_dtype={self.compute} or None, or cast the module"
            )
        if self.accum.itemsize < self.wire.itemsize:
            raise ValueError(
                f"grad_accum_dtype={self.accum} is narrower than the wire ({self.wire}); use {self.wire} or wider"
            )

    @property
    def align_elements(self) -> int:
        """Elements between parameter starts: a multiple of 256 bytes in the narrowest buffer, and of 64 elements."""
        return BUCKET_ALIGN_BYTES // min(self.compute.itemsize, self.wire.itemsize, 4)
