"""Ledgers of the sources: what they count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.checks import branches, step_trace, structure
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks


def test_one_block_of_a_step_is_traced_and_the_step_is_longer() -> None:
    first, second = run_ranks(step_trace.trace, step_trace.RANKS, "native")
    assert first.keys() == second.keys() == set(step_trace.PARTS)
    for count in step_trace.COUNTS:
        forward, backward, step = (first[part][count] for part in step_trace.PARTS)
        assert 0 < forward < step, count
        assert 0 < backward < step, count


def walked(tmp_path: Path) -> dict[str, int]:
    """Counts of a program of known calls: two files that call each other, and calls before and after."""
    spaces: dict[str, dict[str, Callable[..., object]]] = {"one": {}, "other": {}}
    for name, space in spaces.items():
        exec(compile("def call(then=None):\n    return then and then()\n", str(tmp_path / f"{name}.py"), "exec"), space)
    one, other = (space["call"] for space in spaces.values())
    walk = step_trace.Walk((str(tmp_path),))
    with walk.open():
        one()
        walk.mark("begin")
        one(other)
        one()
        one()
        walk.mark("end")
        other()
    other()
    return walk.counts("begin", "end")


SLIPS = {
    "calls": Slip(step_trace.Walk, "note", 'event == "call" and ', "", "Returns count as calls"),
    "bounds": Slip(step_trace.Walk, "counts", "[self.marks[begin] : self.marks[end]]", "", "Marks are ignored"),
    "changes": Slip(step_trace.Walk, "counts", "one != other", "one == other", "Staying in a file is a change of file"),
    "files": Slip(step_trace.Walk, "note", "frame.f_code.co_filename", "str(self.sources[0])", "All is one file"),
}


def test_calls_functions_files_and_changes_are_counted(tmp_path: Path) -> None:
    assert list(walked(tmp_path).values()) == [4, 2, 2, 2]


@pytest.mark.parametrize("name", each("Ledgers of the sources", SLIPS))
def test_a_ledger_that_counts_wrongly_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIPS[name].put(monkeypatch)
    assert list(walked(tmp_path).values()) != [4, 2, 2, 2]


def test_sizes_are_counted_by_package_and_by_room_of_the_engine(tmp_path: Path) -> None:
    for name in ("harness/config/a.py", "harness/fsdp/comm/b.py", "harness/fsdp/c.py", "run.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("if True:\n    x = 1\n\n", encoding="utf-8")
    for empty in ("hydra_plugins", "tests", "benchmarks"):
        (tmp_path / empty).mkdir()
    row = {"files": 1, "lines": 3, "statements": 2, "characters": 20}
    assert structure.sizes(tmp_path)["product"] == dict.fromkeys(
        ("harness/config", "harness/fsdp", "harness/fsdp/comm", "run.py"), row
    )


def test_the_page_of_branches_adds_packages_up() -> None:
    row = dict(zip(branches.COUNTS, (8, 4, 4, 1), strict=True))
    page = branches.render({"tests": "2 passed", "packages": {"harness/a": row, "harness/b": row}})
    assert "pytest said: 2 passed." in page
    assert page.splitlines()[-2] == "| `all` | 16 | 50.0% | 8 | 25.0% |"
    assert branches.folder_of(Path("harness/fsdp/comm/mesh.py")) == "harness/fsdp/comm"
    assert branches.folder_of(Path("harness/fsdp/api.py")) == "harness/fsdp"
