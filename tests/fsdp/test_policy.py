"""Dtype policies before anything runs: what None means, what is refused and what it says, and the same rules of the
configuration."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.distributed import fsdp as fsdp2

from harness.config.derived import accumulate_dtype
from harness.config.rules.engine import gradients_keep_their_precision, main_weights_are_no_narrower
from harness.config.rules.request import Request
from harness.config.schema import Config, Dtype
from harness.fsdp import Dtypes, MixedPrecisionPolicy, fully_shard
from harness.fsdp.policy import FORMATS
from tests.support.mutants import each_found_by

TORCH = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp64: torch.float64}


def engine_takes(compute: Dtype, main: Dtype, grads: Dtype, wire: Dtype, accum: Dtype | None, allow: bool) -> bool:
    policy = MixedPrecisionPolicy(
        TORCH[main], TORCH[grads], TORCH[wire], None if accum is None else TORCH[accum], allow
    )
    try:
        policy.resolve(TORCH[compute])
    except ValueError:
        return False
    return True


def desk_takes(compute: Dtype, main: Dtype, grads: Dtype, wire: Dtype, accum: Dtype | None, allow: bool) -> bool:
    config = Config()
    dtype = config.dtype
    dtype.compute, dtype.main_params, dtype.main_grads, dtype.grad_comm, dtype.grad_accum = (
        compute, main, grads, wire, accum,
    )  # fmt: skip
    dtype.allow_low_precision_grads = allow
    request = Request(config)
    broken = [*gradients_keep_their_precision.apply(request), *main_weights_are_no_narrower.apply(request)]
    return not broken


def test_engine_and_desk_take_the_same_policies() -> None:
    """Every combination of four dtypes in every role, sums unset included."""
    taken = 0
    for case in itertools.product(Dtype, Dtype, Dtype, Dtype, (None, *Dtype), (False, True)):
        assert engine_takes(*case) == desk_takes(*case), case
        taken += engine_takes(*case)
    # pairs (compute, main) that hold: each itself, 16 bits in fp32, 16 and 32 bits in fp64: 4 + 2 + 3 = 9. With
    # consent 4 x 4 x 5 gradient policies each. Without: 2 main-gradient dtypes; sums that hold the wire's numbers:
    # None always (4), fp32 of 3 wires, fp64 of 4.
    assert taken == 9 * (4 * 4 * 5 + 2 * (4 + 3 + 4))


def test_what_a_null_sum_means_is_the_same_at_the_desk() -> None:
    for wire in Dtype:
        config = Config()
        config.dtype.main_grads = config.dtype.grad_comm = wire
        policy = MixedPrecisionPolicy(torch.float64, TORCH[wire], allow_low_precision_grads=True)
        assert policy.resolve(torch.float32).accum is TORCH[accumulate_dtype(config)]


@pytest.mark.parametrize("compute", FORMATS)
def test_none_follows_the_chain(compute: torch.dtype) -> None:
    def resolved(**fields: torch.dtype | None) -> Dtypes:
        return MixedPrecisionPolicy(**fields, allow_low_precision_grads=True).resolve(compute)

    wide = torch.promote_types(compute, torch.float32)
    assert resolved(main_params_dtype=None) == Dtypes(compute, compute, compute, compute, wide)
    assert resolved(main_params_dtype=torch.float64) == Dtypes(compute, *(torch.float64,) * 4)
    half = resolved(main_params_dtype=None, main_grads_dtype=torch.float16)
    assert half == Dtypes(compute, compute, torch.float16, torch.float16, torch.float32)
    sent = resolved(main_params_dtype=None, main_grads_dtype=torch.float32, grad_comm_dtype=torch.float64)
    assert sent == Dtypes(compute, compute, torch.float32, torch.float64, torch.float64)


def test_bf16_and_fp16_do_not_hold_each_other() -> None:
    with pytest.raises(ValueError, match=r"float16 cannot hold the module's torch.bfloat16.*Valid are .*bfloat16"):
        MixedPrecisionPolicy(torch.float16, allow_low_precision_grads=True).resolve(torch.bfloat16)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"main_grads_dtype": torch.float16}, "main_grads_dtype resolves to torch.float16"),
        ({"main_params_dtype": None}, "main_grads_dtype resolves to torch.bfloat16"),
        ({"grad_comm_dtype": torch.bfloat16, "grad_accum_dtype": torch.bfloat16}, "grad_accum_dtype=torch.bfloat16"),
        ({"grad_accum_dtype": torch.float16}, "grad_accum_dtype=torch.float16"),
        (
            {"grad_comm_dtype": torch.float64, "grad_accum_dtype": torch.float32},
            r"torch.float64\). Set grad_accum_dtype=torch.float64",
        ),
    ],
)
def test_low_precision_is_one_error_that_consent_lifts(fields: dict[str, torch.dtype | None], says: str) -> None:
    with pytest.raises(ValueError, match=f"{says}.*allow_low_precision_grads=True"):
        MixedPrecisionPolicy(**fields).resolve(torch.bfloat16)
    MixedPrecisionPolicy(**fields, allow_low_precision_grads=True).resolve(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_in_every_role(dtype: torch.dtype) -> None:
    for role in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype", "grad_accum_dtype"):
        with pytest.raises(ValueError, match=r"use torch\.float32, torch\.bfloat16, torch\.float16, torch\.float64"):
            MixedPrecisionPolicy(**{role: dtype}, allow_low_precision_grads=True).resolve(torch.float32)


def test_names_of_fsdp2_are_understood() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert (policy.param_dtype, policy.grad_comm_dtype) == (torch.bfloat16, torch.bfloat16)
    assert replace(policy, main_grads_dtype=torch.float32).grad_comm_dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"reduce_dtype=torch\.bfloat16 is grad_comm_dtype=torch\.float32: give one"):
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16, grad_comm_dtype=torch.float32)


def test_a_policy_of_fsdp2_is_refused() -> None:
    with pytest.raises(TypeError, match=r"give harness\.fsdp\.MixedPrecisionPolicy"):
        fully_shard(torch.nn.Linear(2, 2), mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def test_buckets_are_aligned_in_their_narrowest_buffer() -> None:
    for dtypes in itertools.product(FORMATS, repeat=4):
        align = Dtypes(*dtypes, torch.float64).align_elements
        assert align % 64 == 0
        assert all(align * dtype.itemsize % 256 == 0 for dtype in dtypes)


test_a_mutant_is_found = each_found_by(
    "The engine, by its dtypes",
    """
    gradients of the forward: Main gradients follow the compute dtype
        fsdp.policy.MixedPrecisionPolicy.resolve: self.main_grads_dtype or main => self.main_grads_dtype or compute
    wire of the weights: Gradients are sent in the dtype of the main weights
        fsdp.policy.MixedPrecisionPolicy.resolve: self.grad_comm_dtype or grads => self.grad_comm_dtype or main
    fp32 sums: What is sent in fp64 is summed in fp32
        fsdp.policy.MixedPrecisionPolicy.resolve: (torch.promote_types(torch.float32, wire) => (torch.float32
    two names: FSDP2's name of the wire's dtype wins over ours
        fsdp.policy.MixedPrecisionPolicy.__post_init__: self.grad_comm_dtype not in (None, reduce_dtype) => False
    16-bit gradients: Gradients are accumulated in 16 bits without consent
        fsdp.policy.Dtypes.validate: self.grads.itemsize < 4 => self.grads.itemsize < 2
    narrow sums: Sums may have fewer bits than what arrives
        fsdp.policy.Dtypes.validate: or not holds(self.accum, self.wire): => :
    narrow main weights: Main weights may be narrower than the forward's, and not wider
        fsdp.policy.Dtypes.validate: holds(self.main, self.compute): => holds(self.compute, self.main):
    as many bits: Formats of one size hold each other
        fsdp.policy.holds: torch.promote_types(dtype, other) == dtype => dtype.itemsize >= other.itemsize
    widest buffer: Parameters are aligned in the widest buffer alone
        fsdp.policy.Dtypes.align_elements: min(4, => max(4,
    """,
    test_engine_and_desk_take_the_same_policies,
    test_names_of_fsdp2_are_understood,
    test_buckets_are_aligned_in_their_narrowest_buffer,
    test_none_follows_the_chain,
)
