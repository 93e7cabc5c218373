"""Ranks that find each other, and know an old address from a new one."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from harness.store.rank_place import RankPlace, rank_place, slurm_job
from harness.worker import connect
from harness.worker.connect import is_one_host, meet
from tests.support.mutants import finds

SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_ARRAY_JOB_ID": "10",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
}


def at(rank, start="now", world_size=2, launcher="local"):
    return RankPlace(rank, world_size, rank, start, launcher)


def met(attempt, launcher, environment, start="now"):
    """What each of three ranks met."""
    places = [at(rank, start, 3, launcher) for rank in reversed(range(3))]
    with ThreadPoolExecutor(3) as pool:
        return [*pool.map(lambda place: connect.meet(attempt, place, timeout_s=20, environment=environment), places)]


@pytest.mark.parametrize(
    ("launcher", "environment", "kind"),
    [
        ("local", {}, "FileStore"),
        ("torchrun", {"LOCAL_WORLD_SIZE": "3"}, "FileStore"),
        ("slurm", {"SLURM_STEP_NUM_NODES": "1"}, "FileStore"),
        ("slurm", {"SLURM_STEP_NUM_NODES": "3"}, "TCPStore"),
    ],
)
def test_all_ranks_share_a_store_of_their_own_kind(launcher, environment, kind, tmp_path):
    assert is_one_host(at(0, "now", 3, launcher), environment) is (kind == "FileStore")
    assert launcher != "torchrun" or not is_one_host(at(0, "", 3, launcher), environment), "no file of this start alone"
    stores, hosts = zip(*met(tmp_path, launcher, environment), strict=True)
    stores[0].set("word", "hello")
    assert stores[1].get("word") == stores[2].get("word") == b"hello"
    assert len(set(hosts)) == 1
    assert (hosts[0] == "127.0.0.1") or kind == "TCPStore"
    assert {type(store).__name__ for store in stores} == {kind}


@pytest.mark.parametrize(
    ("told", "host"), [("NodeName=n1 NodeAddr=127.0.0.9 State=IDLE", "127.0.0.9"), ("", "127.0.1.1")]
)
def test_slurm_tells_the_address_of_a_node_whose_name_leads_to_its_loopback(told, host, tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho '{told}'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1" if name == socket.gethostname() else name)
    environment = {"SLURM_STEP_NUM_NODES": "3", "SLURMD_NODENAME": "n1"}
    assert {each for _, each in met(tmp_path, "slurm", environment)} == {host}


def test_ranks_of_torchrun_on_several_hosts_meet_in_its_store(tmp_path, monkeypatch):
    agent = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert not is_one_host(at(1, launcher="torchrun"), {"LOCAL_WORLD_SIZE": "1"})
    store, host = meet(tmp_path, at(1, launcher="torchrun"), timeout_s=20)
    store.set("word", "hello")
    assert host == "127.0.0.1"
    assert agent.num_keys() > 1
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ValueError, match="MASTER_ADDR expected"):
        meet(tmp_path, at(1, launcher="torchrun"), timeout_s=20)


OVER_NODES = {"SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize("environment", [{"SLURM_STEP_NUM_NODES": "1"}, OVER_NODES])
def test_another_start_is_not_met(environment, tmp_path):
    old = met(tmp_path, "slurm", environment, start="before")
    old[0][0].set("word", "old")
    now = met(tmp_path, "slurm", environment)
    assert not now[0][0].check(["word"])


def test_a_rank_says_for_whom_it_waited(tmp_path):
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.2 s for rank 0"):
        meet(tmp_path, at(1, launcher="slurm"), timeout_s=0.2, environment=OVER_NODES)


def test_who_a_process_is():
    own = {"HARNESS_LEASH_FD": "5", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "HARNESS_START": "x"}
    assert rank_place(own | SLURM) == RankPlace(1, 2, 1, "x", "local"), "our own ranks inside somebody's job are ours"
    assert rank_place({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}).launcher == "torchrun"
    assert rank_place(SLURM) == RankPlace(3, 4, 1, "12.0.0", "slurm", "10_2")
    assert rank_place(SLURM | {"SLURM_RESTART_COUNT": "2"}).start == "12.2.0", "a requeued job is a new start"
    assert rank_place({}) == RankPlace(0, 1, 0, "", "inline")
    script = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert rank_place(script).launcher == "inline", "an sbatch script is no rank"
    assert (slurm_job(script), slurm_job({})) == ("12", "")
    for rank, world_size in (("2", "2"), ("-1", "2"), ("0", "0")):
        with pytest.raises(ValueError, match=f"rank {rank} of {world_size}"):
            rank_place({"RANK": rank, "WORLD_SIZE": world_size})


test_a_mutant_is_found = finds(
    "launching",
    test_another_start_is_not_met="""
        one store: Ranks of a new start meet in the store of an earlier one
            worker.connect.meet: place.start => "always"
            (environment={"SLURM_STEP_NUM_NODES": "1"})
    """,
)
