"""Ranks that hold the same weights compare their bits, and all name the same bucket, parameter and ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from harness.fsdp import MixedPrecisionPolicy, ReplicaDrift, fully_shard
from harness.fsdp.guards import bit_hash
from harness.probe.collectives import CollectiveMeter
from tests.fsdp.test_api import Block, make, sgd
from tests.support.spawn import run_ranks

# -- the hash ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.integers(1, 200_000),
    st.data(),
)
def test_any_flipped_bits_change_the_hash(dtype: torch.dtype, numel: int, data: st.DataObject) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    before = int(bit_hash(flat))
    assert int(bit_hash(flat.clone())) == before
    raw = flat.view(torch.uint8)
    places = data.draw(st.sets(st.integers(0, raw.numel() * 8 - 1), min_size=1, max_size=4))
    for place in places:
        raw[place // 8] ^= 1 << (place % 8)
    assert int(bit_hash(flat)) != before


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drift:
    """The second parameter of the second bucket changes by `value` on these ranks, behind the second update."""

    strategy: str
    ranks: tuple[int, ...]
    compute: torch.dtype = torch.float32
    value: float = 1e-3
    every: int = 2
    main: bool = False
    """In main weights that are no compute weights."""


DRIFTS = [
    *(Drift(strategy, (1,)) for strategy in ("no_shard", "optim", "optim_grads")),
    Drift("no_shard", (0,), torch.bfloat16, main=True),
    Drift("optim", (2,), torch.bfloat16, value=1.0),
    Drift("optim_grads", (0, 2)),
    Drift("optim", (1,), value=math.nan),
    Drift("no_shard", ()),
    Drift("optim_grads", (1,), every=0),
]


def drifting(rank: int) -> list[tuple[str, str]]:
    return [_drift(rank, case) for case in DRIFTS]


def _drift(rank: int, case: Drift) -> tuple[str, str]:
    """The error, and the name of the parameter."""
    model = make().to(case.compute)
    wrapped, optimizer = fully_shard(
        model,
        sgd(model),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=case.strategy,
        check_replicas_every=case.every,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
    )
    bucket = wrapped.engine.buckets[1]
    slot = bucket.layout.slots[1]
    install = bucket.install

    def install_and_drift() -> None:
        install()
        bucket.receive()
        dist.barrier()  # others have read by now what lies here, where it drifts
        target = bucket.main_storage if case.main else bucket.compute
        assert target is not None
        if number == 3 and rank in case.ranks:
            target[bucket.layout.bucket_range(slot)[0]] += case.value
            bucket.installed_version = bucket.main_version  # nothing tells of it

    message = ""
    with mock.patch.object(bucket, "install", install_and_drift):
        for number in range(1, 5):  # a forward installs the update before it
            try:
                wrapped(torch.full((2, 6), 0.1 * (rank + number), dtype=case.compute)).sum().backward()
            except ReplicaDrift as error:
                message = str(error)
                break
            optimizer.step()
            optimizer.zero_grad()
    wrapped.close()
    return message, slot.spec.name


def test_all_ranks_name_the_parameter_and_the_ranks_at_the_first_check() -> None:
    per_rank = run_ranks(drifting, 3)
    for index, case in enumerate(DRIFTS):
        messages = {found[index][0] for found in per_rank}
        assert len(messages) == 1, "the same on all ranks"
        message, name = messages.pop(), per_rank[0][index][1]
        print(case, message)
        if not case.ranks or not case.every:
            assert message == ""
            continue
        bucket = "main weights has" if case.main else "has"
        odd = {(1,): "rank 1", (0,): "rank 0", (2,): "rank 2", (0, 2): "ranks 0, 2"}[case.ranks]
        even = {(1,): "ranks 0, 2", (0,): "ranks 1, 2", (2,): "ranks 0, 1", (0, 2): "rank 1"}[case.ranks]
        if len(case.ranks) == 2:  # the same edit twice is the majority
            odd, even = even, odd
        assert f"replicas differ after update 2: {name} of bucket " in message
        assert f" {bucket} other bits on {odd} than on {even}. Something" in message


def traffic(rank: int) -> list[int]:
    """Numbers of `replica hashes` exchanged when each of four updates is installed."""
    model = make()
    wrapped, optimizer = fully_shard(
        model, sgd(model), fsdp_unit_modules=[Block], zero_dp_strategy="optim", check_replicas_every=2
    )
    counts = []
    meter = CollectiveMeter()
    for _ in range(4):
        wrapped(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            wrapped(torch.ones(2, 6))
        counts.append(sum(row.count for row in meter.take() if row.bucket == "replica hashes"))
    meter.close()
    wrapped.close()
    return counts


def test_one_small_all_reduce_where_a_check_is_due() -> None:
    assert run_ranks(traffic, 2) == [[0, 1, 0, 1]] * 2
