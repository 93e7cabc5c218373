"""Whose communicator is created when, and with SHARP on or off; no ranks and no devices are needed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.schema import Config, SharpAxis
from harness.engines.adapters import native
from harness.engines.protocol import Ranks
from harness.store.rank_place import RankPlace
from harness.worker import connect
from tests.support.mutants import finds

CUDA = torch.device("cuda", 0)
COLLNET = "NCCL_COLLNET_ENABLE"
ALONE = RankPlace(rank=0, world_size=1, local_rank=0, start="", launcher="inline")


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the default group was made with, and the variable as NCCL would have read it then."""
    made: list[dict[str, Any]] = []
    group = SimpleNamespace(WORLD=None)

    def init(**settings: Any) -> None:
        made.append(settings | {"collnet": os.environ.get(COLLNET)})
        group.WORLD = SimpleNamespace(group_desc="default_pg")

    monkeypatch.setenv(COLLNET, "0")
    monkeypatch.setattr(connect.dist, "init_process_group", init)
    monkeypatch.setattr(connect.dist, "group", group)
    monkeypatch.setattr(connect, "_store", lambda config, place, attempt: "store")
    monkeypatch.setattr(connect.dist, "all_reduce", lambda *_, **__: made[-1].update(met=os.environ.get(COLLNET)))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))  # on the device
    return made


def asking(axis: str, outer: int = 1, *, infiniband: bool = True) -> Config:
    """A configuration for SHARP on this axis."""
    config = Config()
    config.sharp.group, config.sharp.infiniband, config.mesh.dp_outer = SharpAxis[axis], infiniband, outer
    return config


@pytest.mark.parametrize(
    ("config", "collnet", "bound", "is_owner"),
    [
        (asking("none"), "0", CUDA, False),
        (asking("dp", infiniband=False), "0", CUDA, False),
        (asking("dp"), "1", CUDA, True),
        (asking("dp", 2), "0", None, False),
        (asking("dp_outer", 2), "0", None, False),
    ],
)
def test_the_default_communicator_has_sharp_where_it_is_the_owner_and_waits_where_another_is(
    config: Config, collnet: str, bound: Any, is_owner: bool, created: list[dict[str, Any]], tmp_path: Path
) -> None:
    connect.join(config, ALONE, tmp_path, CUDA)
    (made,) = created
    assert (made["backend"], made["collnet"], made["device_id"]) == ("nccl", collnet, bound)
    assert made.get("met") == ("1" if is_owner else None)
    assert os.environ[COLLNET] == "0"
    connect.join(config, ALONE, tmp_path, torch.device("cpu"))
    assert [created[1][name] for name in ("backend", "device_id", "collnet")] == ["gloo", None, "0"]


def chosen(host: str, monkeypatch: pytest.MonkeyPatch, **variables: str) -> tuple[str | None, str | None]:
    """Interfaces of gloo and NCCL after a meeting by this host."""
    names = (connect.GLOO_INTERFACE, connect.NCCL_INTERFACE)
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    connect._choose_interfaces(host)
    return os.environ.get(names[0]), os.environ.get(names[1])


def test_on_one_host_ranks_listen_on_loopback_and_over_hosts_where_a_variable_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loopback = connect.interface_towards("127.0.0.1")
    assert chosen("127.0.0.1", monkeypatch) == (loopback, loopback)
    assert chosen("127.0.0.1", monkeypatch, GLOO_SOCKET_IFNAME="eth9") == (loopback, loopback)
    monkeypatch.setattr(connect, "interface_towards", lambda host: "ib7")
    assert chosen("10.0.0.1", monkeypatch) == ("ib7", None)
    assert chosen("10.0.0.1", monkeypatch, GLOO_SOCKET_IFNAME="eth9") == ("eth9", None)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (asking("default", 2), False),
        (asking("none", 2), False),
        (asking("dp", 2, infiniband=False), False),
        (asking("dp", 2), True),
        (asking("dp_outer", 2), True),
    ],
)
def test_an_axis_is_given_the_switches_only_where_they_were_asked_for(
    config: Config, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is given them raises NCCL_COLLNET_ENABLE while its communicator is made, whatever else said 0."""
    seen: list[tuple[int, str]] = []

    def groups(num_outer: int, device: torch.device, owner: str) -> Any:
        seen.append((num_outer, owner))
        return None, None

    monkeypatch.setattr(native, "axis_groups", groups)
    monkeypatch.setattr(native.DeviceMesh, "from_group", lambda *_, **__: "given")
    monkeypatch.setattr(native, "mesh_of", lambda *_: "not given")
    mesh = native._axes(config, Ranks(0, 4, 0, CUDA))["device_mesh"]
    assert mesh == ("given" if given else "not given")
    assert seen == [(2, "dp_outer" if config.sharp.group is SharpAxis.dp_outer else "dp")] * given


test_a_mutant_is_found = finds(
    "strangers",
    test_on_one_host_ranks_listen_on_loopback_and_over_hosts_where_a_variable_says="""
        variables: On one host, ranks listen where a variable says
            worker.connect._choose_interfaces: os.environ[GLOO_INTERFACE] = os.environ[NCCL_INTERFACE] =
            => os.environ[NCCL_INTERFACE] = os.environ.setdefault(GLOO_INTERFACE, interface); _ =
        nccl: On one host, NCCL listens where it likes
            worker.connect._choose_interfaces: os.environ[NCCL_INTERFACE] = =>
    """,
)
