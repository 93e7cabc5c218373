"""Adding a fault touches one place: the function that does it, whose decorator says what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.config.faults import corpus, read_faults
from harness.probe.faults import INJECTORS
from tests.house.places import SMALLEST, Copy

ADDED = """

@fault("triple_gradient", "all gradients are three times what they should be", "reduction", cell=(ZERO3, *K2))
def triple_gradient(site: Site) -> None:
    site.reduce.factor *= 1.0 + 2.0 * site.amount
"""


def grad_norms(copy: Copy) -> dict[str, float]:
    """Gradient norm of step 1 of each run, by its fault and strength."""
    found = {}
    for path in copy.folder.glob("runs/*/*/metrics.jsonl"):
        name = "triple" if "triple" in path.parent.name else "none"
        found[name] = json.loads(path.read_text().splitlines()[0])["grad_norm"]
    return found


def test_a_fault_is_added_in_one_place(tmp_path: Path) -> None:
    """It is composed, hinted at, listed, put into a run, and part of the power study."""
    copy = Copy(tmp_path)
    copy.insert("harness/probe/faults/sums.py", ADDED)
    assert copy.changed() == copy.places
    assert len(copy.places) == 1
    for word in ("none", "triple_gradient"):
        done = copy.run("run.py", f"fault={word}", *SMALLEST, "train.steps=1")
        assert done.returncode == 0, done.stdout + done.stderr
    norms = grad_norms(copy)
    assert norms["triple"] == pytest.approx(3.0 * norms["none"], rel=1e-6)
    refused = copy.run("run.py", "fault=triple_gradint")
    assert "did you mean fault=triple_gradient" in refused.stderr
    assert "triple_gradient" in copy.run("run.py", "--help").stdout
    code = "from harness.study.power import faulty; print(*(pair.name for pair in faulty()))"
    assert copy.run("-c", code).stdout.split().count("triple_gradient") == 6


def test_the_desk_reads_what_the_rank_runs() -> None:
    assert INJECTORS.keys() == corpus().keys()


def test_a_declaration_that_cannot_be_read_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text('import torch\n\n@fault("mine", str(torch.pi), "forward", ())\ndef mine(site): ...\n')
    with pytest.raises(ValueError, match=r"mine\.py:3: name 'str' is not defined; declare it with literals"):
        list(read_faults(path))
