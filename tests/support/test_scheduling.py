"""What `pytest -n` runs together, and that a test which is to be alone is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.scheduling import SLOW, SLOWEST, TOGETHER, admitted, is_slow, place_of

ROOT = Path(__file__).parents[2]


def test_every_folder_with_a_fixture_of_the_session_is_kept_together() -> None:
    session = 'scope="session"'
    owners = {path.parent for path in (ROOT / "tests").rglob("*.py") if session in path.read_text("utf-8")}
    assert {str(owner.relative_to(ROOT)) for owner in owners} - {"tests/support"} == set(TOGETHER)


def test_what_is_known_to_be_slow_exists_and_comes_first() -> None:
    assert all((ROOT / name).exists() for name in SLOWEST)
    assert (
        place_of(f"{SLOWEST[0]}::test_x") < place_of(f"{SLOWEST[-1]}/test_a.py::test_x") < place_of("tests/docs/x.py")
    )


def test_what_make_test_leaves_out_exists_and_is_run_by_ci() -> None:
    assert all((ROOT / name).exists() for name in SLOW)
    assert is_slow(f"{SLOW[0]}::test_x")
    assert is_slow("tests/slurm/test_a.py::test_x")
    assert not is_slow("tests/support/test_scheduling.py::test_x")
    chosen = re.findall(r"-m '(.*)'", (ROOT / "Makefile").read_text("utf-8"))
    assert chosen == ["not full and not slow", "slow and not full", "full or not full"]
    ran = re.findall(r"make test[-\w]*$", (ROOT / ".ci" / "run").read_text("utf-8"), re.M)
    assert ran == ["make test", "make test-slow"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


@pytest.mark.parametrize("guests", [1, 3])
def test_alone_means_that_nobody_is_there_nor_comes_in(tmp_path: Path, guests: int) -> None:
    """Guests come and go without a pause, and still who is to be alone gets in."""
    inside: set[int] = set()
    entered = False

    def come_and_go(number: int) -> None:
        while not entered:
            with admitted(tmp_path, alone=False):
                inside.add(number)
                time.sleep(0.01)
                inside.discard(number)

    with ThreadPoolExecutor(guests) as pool:
        coming = [pool.submit(come_and_go, number) for number in range(guests)]
        until(lambda: bool(inside))
        with admitted(tmp_path, alone=True):
            seen = set()
            for _ in range(20):
                seen |= inside
                time.sleep(0.005)
            entered = True
        for each in coming:
            each.result()
    assert seen == set()
