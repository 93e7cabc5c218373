"""Facts about torch 2.13 that the adapters or the rules rely on: when one changes, so should they."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from harness.config.errors import BadRequest
from harness.engines.adapters.fsdp1 import KNOWN_WARNINGS
from harness.engines.protocol import Ranks, engine_class
from harness.models.workload import workload_for
from tests.engines.conformance.trial import Evidence
from tests.fsdp.trial import Case, run_case, run_cases
from tests.support.composing import compose
from tests.support.spawn import run_ranks

SHARDED = (
    ("fsdp2", "optim_grads"),
    ("fsdp2", "optim_grads_params"),
    ("fsdp1", "optim_grads"),
    ("fsdp1", "optim_grads_params"),
)
PEERS = (*SHARDED, ("fsdp1", "no_shard"), ("ddp", "no_shard"))
"""Torch's own engines, each with the strategies it has."""


def in_16_bits(record: Evidence) -> bool:
    return all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in record.gradients.values())


def test_where_sums_over_microbatches_have_16_bits() -> None:
    """FSDP1 adds in the compute dtype under no_sync, FSDP2 in the wire's before the outer all-reduce; no others do."""
    one = [
        Case(*peer, 1, 3, optimizer="sgd", dtype="bf16", model="odd", steps=1) for peer in PEERS
    ]  # with a tied weight
    assert [
        (c.engine, c.strategy) for c, r in zip(one, run_ranks(run_cases, 1, one)[0], strict=True) if in_16_bits(r)
    ] == [("fsdp1", "no_shard")]
    two = [Case(*peer, 2, 3, optimizer="sgd", dtype="bf16_comm", outer=o, steps=1) for peer in SHARDED for o in (1, 2)]
    found = run_ranks(run_cases, 2, two)[0]
    assert {(c.engine, c.outer) for c, r in zip(two, found, strict=True) if in_16_bits(r)} == {("fsdp2", 2)}


def violated(*overrides: str) -> list[str]:
    with pytest.raises(BadRequest) as caught:
        compose(["launch.dry_run=true", *overrides])
    return [str(violation) for violation in caught.value.violations]


HYBRID = "sharding=hsdp mesh=two_by_two train.global_batch_size=32"


@pytest.mark.parametrize(
    ("common", "refused", "clean"),
    [
        ("engine=fsdp1 dtype=bf16", "sharding=no_shard", "sharding=optim_grads"),
        ("engine=fsdp1 dtype=bf16 sharding=no_shard", "", "train.global_batch_size=8"),
        ("engine=fsdp1 dtype=bf16 sharding=no_shard", "", "dtype.allow_low_precision_grads=true"),
        ("engine=fsdp1 sharding=no_shard", "dtype=bf16", "dtype=fp32"),
        (f"engine=fsdp2 {HYBRID}", "dtype=bf16_comm", "dtype=bf16"),
        (f"engine=fsdp2 dtype=bf16_comm {HYBRID}", "", "dtype.allow_low_precision_grads=true"),
        (f"dtype=bf16_comm {HYBRID}", "engine=fsdp2", "engine=fsdp1"),
        ("engine=ddp dtype=fp64", "dtype.grad_comm=fp32", "dtype.grad_comm=bf16"),
        ("engine=ddp", "sharding=optim_grads", "sharding=no_shard"),
        ("engine=fsdp2", "sharding=optim", "sharding=optim_grads"),
    ],
)
def test_what_an_engine_does_not_do_is_refused_before_ranks_start(common: str, refused: str, clean: str) -> None:
    assert len(violated(*common.split(), *refused.split())) == 1
    compose(["launch.dry_run=true", *common.split(), *clean.split()])


def test_the_refusals_say_what_to_do() -> None:
    (waits,) = violated("engine=fsdp1", "sharding=no_shard", "dtype=bf16")
    assert "dtype.compute=bf16" in waits
    assert "allow_low_precision_grads=true" in waits
    (wire,) = violated(
        "engine=fsdp2", "sharding=hsdp", "mesh=two_by_two", "dtype=bf16_comm", "train.global_batch_size=32"
    )
    assert "dtype.grad_comm=bf16" in wire
    assert "outer axis" in wire


def _warnings(rank: int, cases: list[Case]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # as outside tests: torch.distributed.optim's own import
        for case in cases:
            run_case(rank, case)
    return sorted({str(warning.message) for warning in caught})


def test_nothing_warns() -> None:
    """What torch says of choices made on purpose is silenced by its exact words; anything new comes through."""
    kinds = itertools.product(PEERS, (("tiny", "deterministic"), ("odd", "fast")))
    cases = [Case(*peer, 2, 2, model=model, numerics=numerics, steps=3) for peer, (model, numerics) in kinds]
    assert run_ranks(_warnings, 2, cases) == [[], []]
    assert len(KNOWN_WARNINGS) == 2


def _steps_at_once(rank: int, case: Case) -> None:
    config = case.config()
    engine = engine_class(config.engine.name)(workload_for(config), config, Ranks(rank, 1, rank, torch.device("cpu")))
    with pytest.raises(RuntimeError, match=r"no gradient for .*: no microbatch was marked as the step's last one"):
        engine.step(0.1)


@pytest.mark.parametrize("peer", PEERS, ids="-".join)
def test_a_step_before_the_last_microbatch_is_an_error(peer: tuple[str, str]) -> None:
    run_ranks(_steps_at_once, 1, Case(*peer))
