"""Ranks that find each other, and know an old address from a new one."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from harness.store import reading
from harness.store.errors import StoreError
from harness.store.rank_place import RankPlace, is_slurm_step, rank_place, slurm_job
from harness.worker import rendezvous
from harness.worker.rendezvous import ADDRESS, interface_towards, is_one_host, meet, reachable_host
from tests.support.mutants import Slip, each

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


HOSTS = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""Of ranks that torchrun starts, each on a host of its own."""


def at(rank, start="now", world_size=2, launcher="local"):
    return RankPlace(rank, world_size, rank, start, launcher)


@pytest.fixture
def attempt(tmp_path):
    (tmp_path / "0").mkdir(mode=0o700)
    return tmp_path / "0"


def met(attempt, world_size=2, launcher="local", environment=HOSTS, start="now"):
    """What each rank met."""
    places = [at(rank, start, world_size, launcher) for rank in reversed(range(world_size))]
    with ThreadPoolExecutor(world_size) as pool:
        return [*pool.map(lambda place: meet(attempt, place, timeout_s=20, environment=environment), places)]


@pytest.mark.parametrize(("launcher", "kind"), [("local", "FileStore"), ("torchrun", "TCPStore")])
def test_all_ranks_share_a_store_of_their_own_kind(launcher, kind, attempt):
    meetings = met(attempt, 3, launcher)
    stores = [each.store for each in meetings]
    stores[0].set("word", "hello")
    assert stores[1].get("word") == stores[2].get("word") == b"hello"
    assert {each.host for each in meetings} == {"127.0.0.1"}
    assert {type(store).__name__ for store in stores} == {kind}


def test_the_way_is_open_to_nobody_else_whatever_the_umask(attempt):
    before = os.umask(0)
    try:
        met(attempt)
    finally:
        os.umask(before)
    (folder,) = attempt.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / ADDRESS).stat().st_mode & 0o777 == 0o600


def test_the_port_listens_on_the_address_that_leads_to_rank_0_only(attempt):
    meetings = met(attempt, launcher="torchrun")
    assert isinstance(meetings[0].store, TCPStore)
    port = rendezvous.read_json(attempt / "rendezvous-now" / ADDRESS)["port"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", port))  # refused if the store listened on every address


def test_another_start_is_not_met(attempt):
    first = met(attempt, start="before")
    first[0].store.set("word", "old")
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.2 s for rank 0"):
        meet(attempt, at(1), timeout_s=0.2)
    keep: list[object] = []
    late = threading.Timer(0.3, lambda: keep.append(meet(attempt, at(0), timeout_s=20)))
    late.start()
    store = meet(attempt, at(1), timeout_s=20).store
    assert not store.check(["word"])
    late.join()
    with pytest.raises(FileExistsError):
        meet(attempt, at(0), timeout_s=1)


def unsafe(attempt: Path) -> list[str]:
    """Ways that lead ranks to a store which another user may have made."""
    wrong = []
    for mode in (0o755, 0o770, 0o701):
        attempt.chmod(mode)
        wrong += [] if _is_refused(attempt, "yours alone", at(0, secrets.token_hex(4))) else [f"mode {mode:o}"]
    attempt.chmod(0o700)
    if os.getuid() != 0:
        return wrong
    os.chown(attempt, 65534, 65534)
    wrong += [] if _is_refused(attempt, "yours alone") else ["another's folder"]
    os.chown(attempt, 0, 0)
    (attempt / "rendezvous-now").mkdir(exist_ok=True)
    (attempt / "rendezvous-now" / ADDRESS).write_text('{"key": "00", "host": "127.0.0.1", "port": 0}')
    os.chown(attempt / "rendezvous-now" / ADDRESS, 65534, 65534)
    return wrong + ([] if _is_refused(attempt, "written by user 65534") else ["another's address"])


def _is_refused(attempt: Path, reason: str, place: RankPlace = at(1)) -> bool:  # noqa: B008 # it is frozen
    try:
        meet(attempt, place, timeout_s=0.3)
    except StoreError as error:
        return reason in str(error)
    except TimeoutError:
        return False
    return False


def test_a_way_that_another_user_may_have_laid_is_refused(attempt):
    assert unsafe(attempt) == []


SLIPS = {
    "modes": Slip(rendezvous, "_check_private", "& 0o077", "& 0o002"),
    "owners": Slip(rendezvous, "_check_private", "found.st_uid != os.getuid() or ", ""),
    "whose file": Slip(reading, "open_regular", "own and found.st_uid != os.getuid()", "False"),
}


@pytest.mark.parametrize(
    "slip",
    each(
        "strangers",
        [
            ("modes", "An attempt's folder that others may look into is where ranks meet"),
            ("owners", "So is one of another user"),
            ("whose file", "A way that another user has laid is gone"),
        ],
    ),
)
def test_a_way_that_is_not_looked_at_is_found(slip, attempt, monkeypatch):
    if slip != "modes" and os.getuid() != 0:
        pytest.skip("needs root, to give a file to another user")
    SLIPS[slip].put(monkeypatch)
    assert unsafe(attempt)


def test_ranks_without_a_common_start_are_told_how_to_begin(attempt):
    with pytest.raises(ValueError, match=r"torchrun started these ranks.*let it start run\.py"):
        meet(attempt, at(0, "", launcher="torchrun"), timeout_s=1)


def test_torchruns_ranks_are_on_one_host_where_it_says_so():
    place = at(0, launcher="torchrun")
    assert is_one_host(place, HOSTS | {"LOCAL_WORLD_SIZE": "2"})
    assert not is_one_host(place, HOSTS)
    assert not is_one_host(place, {})
    with pytest.raises(ValueError, match="MASTER_ADDR='' leads nowhere"):
        reachable_host(place, {})


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
