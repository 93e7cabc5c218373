"""Facts about torch 2.13 that the adapters or the rules rely on: when one changes, so should they."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from harness.engines.adapters.fsdp1 import KNOWN_WARNINGS
from harness.engines.protocol import Ranks, engine_class
from harness.models.workload import workload_for
from tests.engines.conformance.trial import Evidence
from tests.fsdp.trial import Case, run_case, run_cases
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
    pairs = [*((peer, 1) for peer in SHARDED), *((peer, 2) for peer in SHARDED[:2])]
    two = [Case(*peer, 2, 3, optimizer="sgd", dtype="bf16_comm", outer=outer, steps=1) for peer, outer in pairs]
    found = run_ranks(run_cases, 2, two)[0]
    assert {(c.engine, c.outer) for c, r in zip(two, found, strict=True) if in_16_bits(r)} == {("fsdp2", 2)}


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


@pytest.mark.parametrize("peer", [*PEERS, ("single", "no_shard")], ids="-".join)
def test_a_step_before_the_last_microbatch_is_an_error(peer: tuple[str, str]) -> None:
    run_ranks(_steps_at_once, 1, Case(*peer))
