"""Dtypes of sharded weights and gradients: frozen, hashable, validated policies.

A policy is the key of a study as much as an argument of the engine, so it holds values only, compares by value, and
refuses what the engine does not honour instead of ignoring it.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, fields, replace

import torch

from harness.fsdp.options import Dtype

FORMATS: tuple[torch.dtype, ...] = tuple(getattr(torch, dtype.torch_name) for dtype in Dtype)  # of every role
BUCKET_ALIGN_BYTES = 256  # every parameter in a gathered bucket starts on a multiple: one alignment in every layout


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """True if every number of `other` is one of `dtype`: bf16 and fp16 do not hold each other."""
    return torch.promote_types(dtype, other) == dtype


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of weights and gradients between a forward and an update: torch.float32, bfloat16, float16 or float64.

    Args:
        main_params_dtype: weights that the optimizer updates; None: it updates the compute weights themselves.
        main_grads_dtype: stored and accumulated gradients; None: the main weights' dtype.
        grad_comm_dtype: gradients as a reduction sends them; None: the main gradients' dtype.
        grad_accum_dtype: the sum inside a reduction; None: fp32, or wider if grad_comm_dtype is wider.
        allow_low_precision_grads: permits main gradients below fp32, and sums in fewer bits than fp32 or than
            grad_comm_dtype.
        param_dtype: weights in forward and backward, whose floating-point inputs are cast to it; None: the module's.
        reduce_dtype: FSDP2's name of grad_comm_dtype.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    grad_accum_dtype: torch.dtype | None = None
    allow_low_precision_grads: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: InitVar[torch.dtype | None] = None

    def __post_init__(self, reduce_dtype: torch.dtype | None) -> None:
        if reduce_dtype is not None:
            if self.grad_comm_dtype not in (None, reduce_dtype):
                raise ValueError(f"reduce_dtype={reduce_dtype} is grad_comm_dtype={self.grad_comm_dtype}: give one")
            object.__setattr__(self, "grad_comm_dtype", reduce_dtype)

    def resolve(self, compute: torch.dtype) -> Dtypes:
        """Fill every None for trained parameters whose compute dtype is `compute`.

        Raises:
            ValueError: a dtype is none of `FORMATS`, or main weights cannot hold the compute weights, or gradients are
                stored or summed in fewer bits than fp32 or than what arrives without `allow_low_precision_grads`.
        """
        main = self.main_params_dtype or compute
        grads = self.main_grads_dtype or main
        wire = self.grad_comm_dtype or grads
        accum = self.grad_accum_dtype or (torch.promote_types(torch.float32, wire) if wire in FORMATS else wire)
        dtypes = Dtypes(compute=compute, main=main, grads=grads, wire=wire, accum=accum)
        dtypes.validate(allow_low_precision_grads=self.allow_low_precision_grads)
        return dtypes


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a policy for one compute dtype, with every None filled in.

    compute: weights in forward and backward. main: weights that the optimizer updates. grads: stored gradients. wire:
    gradients as a reduction sends them. accum: sums inside a reduction.
    """

    compute: torch.dtype
    main: torch.dtype
    grads: torch.dtype
    wire: torch.dtype
    accum: torch.dtype

    def validate(self, *, allow_low_precision_grads: bool) -> None:
        """Raise ValueError if the combination would silently lose updates or gradients."""
        for role in fields(self):
            dtype = getattr(self, role.name)
            if dtype not in FORMATS:
                raise ValueError(f"{role.name} dtype {dtype} is not supported; use {', '.join(map(str, FORMATS))}")
        if not holds(self.main, self.compute):
            raise ValueError(
                f"main_params_dtype={self.main} cannot hold the module's {self.compute}. Valid are"
                f" {', '.join(str(dtype) for dtype in FORMATS if holds(dtype, self.compute))}, and None"
            )
        if allow_low_precision_grads:
            return
        consent = "or allow_low_precision_grads=True to accept it"
        if self.grads.itemsize < 4:
            raise ValueError(
                f"main_grads_dtype resolves to {self.grads}, in which sums over microbatches lose small ones. Set"
                f" main_grads_dtype=torch.float32, {consent}"
            )
        if self.accum.itemsize < 4 or not holds(self.accum, self.wire):
            wide = torch.promote_types(torch.float32, self.wire)
            raise ValueError(
                f"grad_accum_dtype={self.accum} sums in fewer bits than fp32 or than what arrives (the wire has"
                f" {self.wire}). Set grad_accum_dtype={wide}, None for the same, {consent}"
            )

    def as_integers(self) -> Dtypes:
        """These dtypes, with gradients sent and summed as int64; see `harness.fsdp.comm.reduction`.

        Raises:
            ValueError: gradients are sent in another dtype than they are stored in, or in more bits than fp32.
        """
        if self.wire != self.grads or self.grads.itemsize > 4:
            raise ValueError(
                f"numerics=exact sends 64-bit integers and rounds once to main_grads_dtype={self.grads}: leave"
                f" grad_comm_dtype={self.wire} at None, and gradients at fp32 or narrower"
            )
        return replace(self, grads=torch.int64, wire=torch.int64, accum=torch.int64)

    @property
    def align_elements(self) -> int:
        """Elements between parameter starts: a multiple of 256 bytes in the narrowest buffer, and of 64 elements."""
        buffers = (self.compute, self.main, self.grads, self.wire)
        return BUCKET_ALIGN_BYTES // min(4, *(dtype.itemsize for dtype in buffers))
