"""Another user of the machine is no rank of a run: none of his addresses is believed, nothing of his is unpickled."""

from __future__ import annotations

import os

import pytest

from tests.support.mutants import kills
from tests.worker.strangers import Outcome, attacked

pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to start a process of another user"
)

HOSTS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""Each rank on a host of its own, as torchrun tells it."""
ONE_HOST = HOSTS | {"LOCAL_WORLD_SIZE": "2"}
REFUSED = "was not written by a rank of this run"


def test_over_hosts_a_stranger_is_not_rank_1() -> None:
    ended = attacked("join", HOSTS)
    assert ended.codes[0] == 1, ended
    assert REFUSED in ended.said
    assert ended.loot.keys() - {"error", "done"} == {"heard", "store"}


@kills("strangers", "nothing is verified", "What is read in the store counts as written by a rank")
def test_a_store_that_is_believed_lets_a_stranger_in() -> None:
    ended = attacked("join", HOSTS, "nothing is verified")
    assert "told" in ended.loot, ended
    assert "ran" not in ended.loot, "and even then nothing of his is unpickled"


def test_over_hosts_an_address_that_a_stranger_replaced_is_not_believed() -> None:
    ended = attacked("replace", HOSTS)
    assert "replaced" in ended.loot, ended
    assert ended.codes[1] == 1
    assert REFUSED in ended.said


def unheard(ended: Outcome) -> list[str]:
    """What a stranger came by of ranks on one host, and what is left of their meeting."""
    wrong = [] if ended.codes == [0, 0] else [f"ranks ended with {ended.codes}: {ended.said}"]
    wrong += [] if set(ended.loot.get("heard", "none").split()) <= {"127.0.0.1", "::1"} else ["ports off loopback"]
    return wrong + sorted(ended.loot.keys() - {"heard", "done"}) + ended.left


@pytest.mark.parametrize("launcher", [ONE_HOST, {}], ids=["torchrun", "run.py"])
def test_on_one_host_there_is_no_store_to_reach(launcher: dict[str, str]) -> None:
    assert unheard(attacked("replace", launcher)) == []


@kills("strangers", "a port on one host", "Ranks of one host meet through a port")
def test_a_store_at_a_port_is_found() -> None:
    assert "store" in unheard(attacked("replace", ONE_HOST, "a port on one host"))
