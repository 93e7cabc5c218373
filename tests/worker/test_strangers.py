"""Another user of the machine finds no port by which ranks of one host meet, and none of their files."""

from __future__ import annotations

import os

import pytest

from tests.support.mutants import kills
from tests.worker.strangers import Outcome, attacked

pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to start a process of another user"
)

ONE_HOST = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def unheard(ended: Outcome) -> list[str]:
    """What a stranger came by of ranks on one host, and what is left of their meeting."""
    wrong = [] if ended.codes == [0, 0] else [f"ranks ended with {ended.codes}: {ended.said}"]
    wrong += [] if set(ended.loot.get("heard", "none").split()) <= {"127.0.0.1", "::1"} else ["ports off loopback"]
    return wrong + sorted(ended.loot.keys() - {"heard", "done"}) + ended.left


@pytest.mark.parametrize("launcher", [ONE_HOST, {}], ids=["torchrun", "run.py"])
def test_on_one_host_there_is_no_store_to_reach(launcher: dict[str, str]) -> None:
    assert unheard(attacked(launcher)) == []


@kills("strangers", "a port on one host", "Ranks of one host meet through a port")
def test_a_store_at_a_port_is_found() -> None:
    assert "store" in unheard(attacked(ONE_HOST, "a port on one host"))
