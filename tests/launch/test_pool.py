"""Which runs stand beside others, and in which order: real processes without torch."""

from __future__ import annotations

import io
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.config.compose import Cell
from harness.launch.local.run import listening
from harness.launch.opening import Sources, in_blocks, look
from harness.launch.submit import submit
from harness.launch.terminal import Terminal
from harness.store.errors import StoreError
from harness.store.rank_place import STOP_SIGNALS
from harness.store.rundir import Store
from tests.launch.cells import fake_ranks, make_cell

ENGINES = ("ddp", "native", "fsdp1", "fsdp2")


def timed(root: Path, *overrides: str) -> Cell:
    return make_cell(root, "measure.mode=bench", "measure.warmup_steps=2", *overrides)


def blocks(root: Path, count: int, seed: int = 0) -> list[Cell]:
    """Four engines in so many blocks, with two workloads."""
    return [
        timed(root, f"engine.name={engine}", f"train.replicate={block}", f"model.dim={dim}", f"study.order_seed={seed}")
        for dim in (32, 64)
        for engine in ENGINES
        for block in range(count)
    ]


def places(cells: Sequence[Cell]) -> list[tuple[int, int, str]]:
    return [(c.typed.train.replicate, c.typed.model.dim, c.typed.engine.name.name) for c in cells]


def test_blocks_follow_each_other_hold_every_arm_once_and_have_orders_of_their_own(tmp_path: Path) -> None:
    found = places(in_blocks(blocks(tmp_path, 12)))
    assert [block for block, _, _ in found] == sorted(block for block, _, _ in found)
    assert set(Counter(found).values()) == {1}
    fours = [found[start : start + 4] for start in range(0, len(found), 4)]
    assert all(len({dim for _, dim, _ in four}) == 1 for four in fours), "arms of one workload stand together"
    orders = [tuple(engine for _, _, engine in four) for four in fours]
    assert len(set(orders)) > 8
    assert {order[0] for order in orders} == set(ENGINES), "no arm is always first, none never"


def test_the_order_follows_from_the_seed_and_from_each_cell_alone(tmp_path: Path) -> None:
    cells = blocks(tmp_path, 4)
    whole = places(in_blocks(cells))
    assert places(in_blocks(cells[::-1])) == places(in_blocks(blocks(tmp_path / "elsewhere", 4))) == whole
    rest = [cell for cell in cells if cell.typed.engine.name.name != "ddp"]
    assert places(in_blocks(rest)) == [place for place in whole if place[2] != "ddp"], "as a resumed study goes on"
    assert places(in_blocks(blocks(tmp_path, 4, seed=1))) != whole
    plain = [make_cell(tmp_path, f"train.seed={seed}") for seed in (3, 1, 2)]
    assert list(in_blocks([timed(tmp_path), *plain])[:3]) == plain, "what is not timed keeps its order and comes first"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that were printed of requests whose runs end by themselves."""
    fake_ranks(monkeypatch, "done|done")
    return []


def carried_out(cells: Sequence[Cell], lines: list[str]) -> int:
    out = io.StringIO()
    code = submit(cells, Terminal(out))
    lines[:] = out.getvalue().splitlines()
    return code


def test_an_interrupted_study_goes_on(tmp_path: Path, asked: list[str]) -> None:
    cells = in_blocks([timed(tmp_path, f"train.replicate={n}") for n in range(2)])
    assert carried_out(cells[:1], asked) == 0
    assert carried_out(cells, asked) == 0
    runs = [Store(tmp_path).path_of(cell) for cell in cells]
    assert [line for line in asked if line.endswith(": done")] == [f"cell 1 of 2  {runs[0]}: done"]
    assert f"cell 2 of 2  {runs[1]}: done, 9 steps" in asked


def test_a_record_without_its_configuration_is_not_gone_on_with(tmp_path: Path) -> None:
    cell = make_cell(tmp_path)
    run = Store(tmp_path).create(cell)
    (run.path / "config.yaml").unlink()
    run.metrics.write_text('{"step": 1}\n')
    with pytest.raises(StoreError, match=r"no config\.yaml; put the file back, or remove the folder"):
        look(Store(tmp_path), cell, Sources({"sources_digest": ""}, ""), None)


def test_a_cell_that_cannot_be_started_spoils_no_other(tmp_path: Path, asked: list[str]) -> None:
    cells = [make_cell(tmp_path, f"train.replicate={n}") for n in range(3)]
    damaged, stranger = (Store(tmp_path).create(cells[n]).path for n in (0, 1))
    (damaged / "status.json").write_text("{")
    (stranger / "attempts").write_text("a file")
    assert carried_out(cells, asked) == 1
    assert [line.partition(": ")[0] for line in asked if ": not started: " in line] == [
        f"cell {n} of 3  {path}" for n, path in ((1, damaged), (2, stranger))
    ]
    assert any(line.endswith(": done, 9 steps") for line in asked)
    with pytest.raises(StoreError, match=r"status\.json is not valid JSON"):
        carried_out(cells[:1], asked)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_every_signal_by_which_ranks_are_asked_to_save_is_heard(number: signal.Signals) -> None:
    """Also SIGUSR2, which a batch script's own `--signal` may send to the request it has become."""
    with listening() as heard:
        os.kill(os.getpid(), number)
    assert heard == [number]
