"""A fault is one function, of this corpus or of one's own file, and is asked for by its name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.store.provenance import files_digest
from harness.train import faults
from tests.architecture.places import SMALLEST
from tests.faults import corpus, fresh
from tests.faults.corpus import Fault
from tests.faults.site import Site
from tests.support.factory import small_config
from tests.support.programs import run_program

RUN = Path(__file__).parents[2] / "run.py"
MINE = """
from dataclasses import replace
from harness.fsdp.update import norms

def tripled(config, build):
    before = norms.gradient_norm
    norms.gradient_norm = lambda *args: before(*args) * (3.0 if seen[-1] >= config.fault.begins_at else 1.0)
    seen, session = [0], build()
    return replace(session, begins=seen.append)
"""


def test_a_fault_of_ones_own_acts_from_its_step_on_and_is_part_of_what_the_run_is(tmp_path: Path) -> None:
    """It changes the engine before it is built, and the loop after it."""
    (tmp_path / "mine.py").write_text(MINE)
    for words in ([], ["fault.name=mine:tripled", "fault.begins_at=2"]):
        done = run_program([str(RUN), *SMALLEST, "train.steps=2", *words], cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = {"tripled" in path.name: path for path in tmp_path.glob("runs/*/*") if (path / "metrics.jsonl").exists()}
    norms = {
        kind: [json.loads(line)["grad_norm"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for kind, run in runs.items()
    }
    assert norms[True] == [norms[False][0], pytest.approx(3.0 * norms[False][1], rel=1e-6)]
    (own,) = json.loads((runs[True] / "provenance.json").read_text())["own"]
    assert (own["kind"], own["name"], own["files"]) == ("fault", "mine:tripled", ["mine.py"])
    assert own["digest"] == files_digest(tmp_path, ["mine.py"])
    assert "tripled-full-from2" in runs[True].name


def test_the_samples_are_the_options_and_are_in_the_corpus() -> None:
    folder = RUN.parent / "conf" / "fault"
    names = {path.stem: path.read_text().splitlines()[-1] for path in folder.glob("*.yaml")}
    assert names == {name: f"name: {name}" for name in names}
    samples = {fault.name for fault in corpus.corpus().values() if ":" not in fault.target}
    assert names.keys() == {"none", *samples}
    assert all(callable(getattr(faults, name)) for name in samples)


@pytest.mark.parametrize(
    ("limits", "changes", "said"),
    [
        ({"strategies": ("optim",)}, {}, "needs sharding=optim"),
        ({"recipes": ("block",)}, {}, "needs dtype.fp8=block"),
        ({"tensor_parallel": True}, {}, "needs mesh.tp=2"),
        ({}, {"mesh__world_size": 2, "mesh__tp": 2}, "names data-parallel ranks"),
        ({"microbatches": 5}, {}, "needs 5 microbatches"),
        ({"resumes": True}, {"fault__begins_at": 2}, "when a run is resumed"),
        ({"ends": True}, {"fault__begins_at": 2}, "when the last step is done"),
    ],
)
def test_a_run_in_which_a_fault_would_do_nothing_is_refused(
    limits: dict[str, object], changes: dict[str, object], said: str
) -> None:
    fault = Fault("one", "one", "does", "forward", (), **limits)
    config = small_config(**changes)
    with pytest.raises(ValueError, match="engine=native"):
        fault.check(config)
    config.engine.name = type(config.engine.name).native
    with pytest.raises(ValueError, match=said):
        fault.check(config)


@pytest.mark.parametrize(("begins", "only", "acting"), [(1, False, [1, 2, 3]), (2, False, [2, 3]), (2, True, [2])])
def test_a_fault_of_one_step_is_as_before_in_the_next(begins: int, only: bool, acting: list[int]) -> None:
    calls, owner = list[int](), SimpleNamespace(method=lambda: None)
    site = Site(small_config(fault__begins_at=begins), None, 0, 1, only=only)
    site.around(owner, "method", lambda method: calls.append(site.step))
    for step in (1, 2, 3):
        site.begin(step)
        owner.method()
    assert calls == acting


def test_the_fifth_edition_has_a_twin_of_one_step_for_each() -> None:
    found = [fault for fault in corpus.corpus().values() if fault.edition == 5]
    assert len(found) >= 40
    assert all(callable(getattr(fresh, f"{fault.name}_once")) for fault in found)
