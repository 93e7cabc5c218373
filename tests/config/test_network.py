"""What follows from nccl_ub and sharp: what forces what, the signature, and this machine's allocator settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.config.capabilities import ENGINES
from harness.config.derived import fixed_buffers, wants_infiniband_sharp
from harness.config.errors import BadRequest
from harness.config.schema import EngineName, OuterStrategy, Strategy
from harness.store.identity import run_name, signature
from tests.support.composing import compose


@pytest.mark.parametrize(
    ("overrides", "fixed"),
    [("", False), ("nccl_ub=auto", True), ("nccl_ub=manual", True), ("engine.double_buffer=true", True)],
)
def test_user_buffers_force_buffers_that_stay(overrides: str, fixed: bool) -> None:
    assert fixed_buffers(compose(overrides.split()).typed) is fixed


@pytest.mark.parametrize(
    ("overrides", "wanted"), [("", False), ("sharp=dp", True), ("sharp=dp sharp.infiniband=false", False)]
)
def test_only_infiniband_needs_an_owner(overrides: str, wanted: bool) -> None:
    assert wants_infiniband_sharp(compose(overrides.split()).typed) is wanted


def test_the_outer_axis_may_own_the_switches_where_its_engine_creates_communicators_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ["sharp=dp_outer", "mesh=two_by_two"]
    pair = (Strategy.optim_grads_params, OuterStrategy.no_shard)
    monkeypatch.setitem(ENGINES, EngineName.native, replace(ENGINES[EngineName.native], hybrid=(pair,)))
    compose(request)
    unordered = replace(ENGINES[EngineName.native], orders_communicators=False)
    monkeypatch.setitem(ENGINES, EngineName.native, unordered)
    with pytest.raises(BadRequest, match="in an order of its own"):
        compose(request)


def test_every_choice_that_can_change_a_number_is_another_run() -> None:
    requests: list[list[str]] = [
        [],
        ["nccl_ub=auto"],
        ["nccl_ub=manual"],
        ["nccl_ub=auto", "nccl_ub.symmetric=false"],
        ["nccl_ub.max_ctas=4"],
        ["sharp=dp"],
        ["sharp=dp", "sharp.nvlink=false"],
        ["sharp.algo=Ring"],
    ]
    assert len({signature(compose(request).config) for request in requests}) == len(requests)
    on_cuda = ["cluster=slurm", "cluster.device=cuda", "cluster.gpus_per_node=2", "launch.dry_run=true"]
    for chosen in ("default", "none"):  # without NCCL nothing is left to it: what was stored before is found
        requests.append([f"sharp={chosen}", *on_cuda])
        assert signature(compose([f"sharp={chosen}"]).config) == signature(compose([]).config)
    left, off = (signature(compose(request).config) for request in requests[-2:])
    assert left != off
    same = [[], ["launch.nccl_log=choices"], ["cluster=slurm", "cluster.sharp_network=x", "launch.dry_run=true"]]
    assert len({signature(compose(request).config) for request in same}) == 1


def test_a_run_is_named_after_what_it_asks_of_nccl() -> None:
    name = run_name(compose(["nccl_ub=manual", "sharp=dp"]).config)
    assert "ub_manual-sharp_dp" in name
    plain = compose([]).config
    old = {key: value for key, value in plain.items() if key not in ("nccl_ub", "sharp")}
    assert run_name(old) == run_name(plain)  # runs from before these groups keep their names
