"""megatron-fsdp's own tests of its entries hold here; see [Note: Upstream's tests] in tests/fsdp/upstream.py."""

from __future__ import annotations

import hashlib

import pytest

from tests.fsdp.upstream import NEEDS_MORE, RANKS, REPLACED, SOURCE, Case, cases, replaced, run_cases, upstream
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

BLOB = "28e95ed4a56880f13e51f1736457cb22b3fca465"
"""What git calls upstream's file."""


def is_left_out(case: Case) -> bool:
    """Whether upstream leaves a case out of its own tests, as what its engine does not do."""
    given = case.arguments
    inner = given.get("dp_shard_strategy", given.get("shard_strategy"))
    outer = given.get("dp_outer_strategy", given.get("outer_shard_strategy"))
    hybrid = outer == "optim" and inner != "optim_grads_params"
    replicated = inner == "no_shard" and case.test == "test_dcp_checkpoint_save_and_load"
    if case.test == "test_fully_shard":
        replicated = inner == "no_shard" and (
            given["common_args"]["init_model_with_meta_device"] or outer == "no_shard"
        )
    return hybrid or replicated


def is_slow(case: Case) -> bool:
    """Whether torch.compile is in it."""
    return bool(case.arguments.get("common_args", {}).get("torch_compile"))


def visit(case: Case) -> tuple[bool, str | None]:
    """With whom a case is run: eight ranks that compile one model for the first time take a minute or two."""
    return is_slow(case), case.arguments.get("model_type") if is_slow(case) else None


CASES = Cover(sorted(cases(), key=is_left_out), values=lambda case: case[:1], key=visit, strength=1)
"""`make test` runs one case of every test of upstream's."""


@once
def ran(batch: tuple[Case, ...]) -> list[dict[Case, str]]:
    return run_ranks(run_cases, RANKS, batch)


@pytest.mark.parametrize("case", CASES.params())
def test_upstream_s_test_holds(case: Case) -> None:
    outcomes = {of_rank[case] for of_rank in ran(CASES.batch(case))}
    assert len(outcomes) == 1, f"ranks end otherwise: {outcomes}"
    assert (outcomes != {"passed"}) == is_left_out(case), outcomes
    if is_left_out(case):
        pytest.skip(f"upstream: {outcomes.pop()}")


def test_what_is_vendored_is_upstream_s() -> None:
    content = SOURCE.read_bytes()
    assert hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == BLOB
    assert "NVIDIA CORPORATION" in (SOURCE.parent / "LICENSE").read_text()


def test_nothing_else_is_replaced() -> None:
    """Line by line: what is not upstream's comes from `REPLACED`."""
    text = SOURCE.read_text()
    left = replaced(text)
    for old, new in reversed(REPLACED):
        left = left.replace(new, old) if new and new not in text else left
    kept = [line for line in left.splitlines() if line not in text.splitlines()]
    assert not [line for line in kept if '"cpu"' not in line]


def test_every_other_test_is_run() -> None:
    tests = {name for name in vars(upstream().TestMegatronFsdpFullyShard) if name.startswith("test_")}
    assert {case.test for case in CASES} == tests - NEEDS_MORE
    assert len(CASES) == 115
