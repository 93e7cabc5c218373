"""Ranks that find each other, and know an old address from a new one."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.store.rank_place import RankPlace, is_slurm_step, rank_place, slurm_job
from harness.worker import rendezvous
from harness.worker.rendezvous import interface_towards, meet, reachable_host

SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_ARRAY_JOB_ID": "10",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURMD_NODENAME": "n2",
}


def at(rank, start="now", world_size=2):
    return RankPlace(rank, world_size, rank, start, "local")


def test_all_ranks_share_a_store(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        met = list(pool.map(lambda rank: meet(tmp_path, at(rank, world_size=3), timeout_s=20), [2, 1, 0]))
    stores = [store for store, _ in met]
    stores[0].set("word", "hello")
    assert stores[1].get("word") == stores[2].get("word") == b"hello"
    assert {host for _, host in met} == {"127.0.0.1"}


def test_the_port_listens_on_loopback_only(tmp_path):
    store, _ = meet(tmp_path, at(0), timeout_s=20)
    port = json.loads((tmp_path / "rendezvous.json").read_text())["port"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", port))  # refused if the store listened on every address
    assert store is not None


def test_an_older_starts_address_is_not_believed(tmp_path):
    (tmp_path / "rendezvous.json").write_text(json.dumps({"start": "before", "host": "127.0.0.1", "port": 1}))
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.2 s for rank 0"):
        meet(tmp_path, at(1), timeout_s=0.2)
    late = threading.Timer(0.3, lambda: keep.append(meet(tmp_path, at(0), timeout_s=20)))
    keep: list[object] = []
    late.start()
    store, _ = meet(tmp_path, at(1), timeout_s=20)
    store.set("a", "b")
    late.join()


def test_who_a_process_is():
    own = {"HARNESS_LEASH_FD": "5", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "HARNESS_START": "x"}
    assert rank_place(own | SLURM) == RankPlace(1, 2, 1, "x", "local"), "our own ranks inside somebody's job are ours"
    assert rank_place({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}).launcher == "torchrun"
    assert rank_place(SLURM) == RankPlace(3, 4, 1, "12.0.0", "slurm", "10_2")
    assert rank_place(SLURM | {"SLURM_RESTART_COUNT": "2"}).start == "12.2.0", "a requeued job is a new start"
    assert rank_place({}) == RankPlace(0, 1, 0, "", "inline")
    for rank, world_size in (("2", "2"), ("-1", "2"), ("0", "0")):
        with pytest.raises(ValueError, match=f"rank {rank} of {world_size}"):
            rank_place({"RANK": rank, "WORLD_SIZE": world_size})


def test_an_sbatch_script_is_no_rank():
    script = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert not is_slurm_step(script)
    assert rank_place(script).launcher == "inline"
    assert (slurm_job(script), slurm_job({})) == ("12", "")


def test_over_several_nodes_rank_0_uses_the_address_slurm_knows_it_by(monkeypatch):
    asked = []

    def node_address(name):
        asked.append(name)
        return "127.0.0.1"

    monkeypatch.setattr(rendezvous, "_node_address", node_address)
    assert reachable_host(rank_place(SLURM), SLURM) == "127.0.0.1"
    assert asked == ["n2"]
    assert reachable_host(rank_place(SLURM), SLURM | {"SLURM_STEP_NUM_NODES": "1"}) == "127.0.0.1"
    assert asked == ["n2"], "on one node nobody is asked"


def test_the_interface_that_leads_to_loopback_is_loopback():
    assert interface_towards("127.0.0.1") in {"lo", "lo0"}
