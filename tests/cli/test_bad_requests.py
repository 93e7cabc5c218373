"""A bad request: exit 2, one message with value, choices and fix; no traceback, no rank, no torch, no litter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.bad_requests import REQUESTS, Asker, Outcome, ask, make_bad_data, poison_torch

pytestmark = pytest.mark.timeout(900)


OWN = 12
"""Every how many requests are asked of a process of their own; the others of forks of one that has imported run.py."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """Every request of the table, asked once."""
    folder = tmp_path_factory.mktemp("bad")
    make_bad_data(folder)
    poison_torch(folder)
    with closing(Asker(folder)) as asker:
        yield {
            kind: asker.ask(request) if place % OWN else ask(request, folder)
            for place, (kind, request) in enumerate(REQUESTS.items())
        }


@pytest.mark.parametrize("kind", REQUESTS)
def test_is_refused_and_explained(kind: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[kind]
    assert outcome.code == 2, outcome.err
    for part in REQUESTS[kind].told:
        assert part in outcome.err.replace("run.py' ", "run.py ")  # quoted in a path with spaces
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert not re.search(r"append|use \+", outcome.err), "a typo must never be met with advice to append it"
    assert outcome.err.count("bad request") <= 1
    assert not outcome.torch_imported
    assert outcome.left_behind == (), "neither Hydra's litter nor a run"


def test_torch_would_be_noticed(tmp_path: Path) -> None:
    """The poison works: a request that starts a rank imports torch, and is seen to."""
    import os
    import subprocess
    import sys

    poison_torch(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "poison")}
    done = subprocess.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True)
    assert done.returncode == 1
    assert (tmp_path / "torch-was-imported").exists()
