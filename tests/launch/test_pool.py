"""Which runs stand side by side, and in which order: real processes without torch, and a clock of begins and ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.compose import Cell
from harness.launch.local import pool as pool_module, ranks as ranks_module
from harness.launch.local.pool import Pool, listening
from harness.launch.opening import Sources, in_blocks, look
from harness.store.errors import StoreError
from harness.store.files import Lock
from harness.store.rank_place import STOP_SIGNALS
from harness.store.rundir import Store
from tests.launch.cells import make_cell

FAKE = Path(__file__).with_name("fake_rank.py")
ENGINES = ("ddp", "native", "fsdp1", "fsdp2")


def timed(root: Path, *overrides: str) -> Cell:
    """A timed cell."""
    return make_cell(root, "measure.mode=bench", "measure.warmup_steps=2", *overrides)


def blocks(root: Path, count: int = 4, seed: int = 0) -> list[Cell]:
    """Four engines in so many blocks, with two workloads."""
    return [
        timed(root, f"engine.name={engine}", f"train.replicate={block}", f"model.dim={dim}", f"study.order_seed={seed}")
        for dim in (32, 64)
        for engine in ENGINES
        for block in range(count)
    ]


def places(cells: tuple[Cell, ...]) -> list[tuple[int, int, str]]:
    return [(c.typed.train.replicate, c.typed.model.dim, c.typed.engine.name.name) for c in cells]


def test_blocks_follow_each_other_and_hold_every_arm_once(tmp_path: Path) -> None:
    found = places(in_blocks(blocks(tmp_path)))
    assert [block for block, _, _ in found] == sorted(block for block, _, _ in found)
    assert set(Counter(found).values()) == {1}
    for start in range(0, len(found), 4):
        assert len({dim for _, dim, _ in found[start : start + 4]}) == 1, "arms of one workload stand together"


def test_every_block_has_an_order_of_its_own(tmp_path: Path) -> None:
    found = places(in_blocks(blocks(tmp_path, count=12)))
    orders = [tuple(engine for _, _, engine in found[start : start + 4]) for start in range(0, len(found), 4)]
    assert len(set(orders)) > 8
    first = Counter(order[0] for order in orders)
    assert set(first) == set(ENGINES), "no arm is always first, none never"


def test_the_order_follows_from_the_seed_and_from_each_cell_alone(tmp_path: Path) -> None:
    cells = blocks(tmp_path)
    whole = places(in_blocks(cells))
    assert places(in_blocks(cells[::-1])) == whole
    assert places(in_blocks([replace(cell) for cell in blocks(tmp_path / "elsewhere")])) == whole
    rest = [cell for cell in cells if cell.typed.engine.name.name != "ddp"]
    assert places(in_blocks(rest)) == [place for place in whole if place[2] != "ddp"], "as a resumed study goes on"
    assert places(in_blocks(blocks(tmp_path, seed=1))) != whole


def test_cells_that_are_not_timed_keep_their_order_and_come_first(tmp_path: Path) -> None:
    plain = [make_cell(tmp_path, f"train.seed={seed}") for seed in (3, 1, 2)]
    found = in_blocks([timed(tmp_path), *plain])
    assert list(found[:3]) == plain


class Watched:
    """A pool whose runs end by themselves, and what was told of each begin and end."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            ranks_module,
            "worker_command",
            lambda run, attempt: [sys.executable, str(FAKE), str(run), "--attempt", str(attempt)],
        )
        monkeypatch.setenv("FAKE", "done|done")
        monkeypatch.setattr(pool_module, "TIMING", root / "timing.lock")
        self.told: list[tuple[str, str]] = []
        self.decisions: list[str] = []
        self.pool = Pool(
            Store(root),
            Sources({"sources_digest": "x"}, ""),
            None,
            on_decision=lambda cell, decision: self.decisions.append(decision.why),
            on_start=lambda opened: self.told.append(("begin", opened.cell.name)) or (lambda _: None),  # type: ignore[func-returns-value]
            on_end=lambda opened, ended: self.told.append(("end", opened.cell.name)),
        )

    def most_at_once(self) -> int:
        running = most = 0
        for what, _ in self.told:
            running += 1 if what == "begin" else -1
            most = max(most, running)
        return most


def test_timed_runs_are_alone_whatever_the_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, monkeypatch)
    many = [f"train.replicate={n}" for n in range(3)]
    cells = [make_cell(tmp_path, "cluster.slots=8", one) for one in many[:2]]
    cells += [timed(tmp_path, "cluster.slots=8", one) for one in many]
    assert watched.pool.run(cells) == [0] * 5
    assert watched.most_at_once() == 2, "the two that are not timed"
    assert [what for what, _ in watched.told[4:]] == ["begin", "end"] * 3
    assert Lock.acquire(tmp_path / "timing.lock") is not None, "given back"


def test_what_is_not_timed_waits_for_a_timed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, monkeypatch)
    cells = [timed(tmp_path, "cluster.slots=8"), make_cell(tmp_path, "cluster.slots=8", "train.replicate=1")]
    assert watched.pool.run(cells) == [0, 0]
    assert [what for what, _ in watched.told] == ["begin", "end"] * 2


def test_two_requests_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, monkeypatch)
    other = Lock.acquire(tmp_path / "timing.lock")
    assert other is not None
    threading.Timer(0.5, other.release).start()
    began = time.monotonic()
    assert watched.pool.run([timed(tmp_path)]) == [0]
    assert time.monotonic() - began >= 0.4
    assert watched.decisions == ["waits: another request times runs on this machine"]


def test_an_interrupted_study_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = in_blocks([timed(tmp_path, f"train.replicate={n}") for n in range(3)])
    first = Watched(tmp_path, monkeypatch)
    assert first.pool.run(cells[:1]) == [0]
    again = Watched(tmp_path, monkeypatch)
    assert again.pool.run(cells) == [0, 0]
    assert again.decisions == ["done"]
    assert [name for what, name in again.told if what == "begin"] == [cell.name for cell in cells[1:]]


def test_a_record_without_its_configuration_is_not_gone_on_with(tmp_path: Path) -> None:
    cell = make_cell(tmp_path)
    run = Store(tmp_path).create(cell)
    (run.path / "config.yaml").unlink()
    run.metrics.write_text('{"step": 1}\n')
    with pytest.raises(StoreError, match=r"no config\.yaml; put the file back, or remove the folder"):
        look(Store(tmp_path), cell, Sources({"sources_digest": ""}, ""), None)


def test_a_cell_that_cannot_be_started_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [make_cell(tmp_path, "cluster.slots=2", f"train.replicate={n}") for n in range(4)]
    damaged, stranger = (Store(tmp_path).create(cells[n]).path for n in (1, 2))
    (damaged / "status.json").write_text("{")
    (stranger / "attempts").write_text("a file")
    watched = Watched(tmp_path, monkeypatch)
    assert sorted(watched.pool.run(cells)) == [0, 0, 1, 1]
    assert [why.partition(": ")[0] for why in watched.decisions] == ["not started"] * 2
    assert str(damaged) in watched.decisions[0]
    with pytest.raises(StoreError, match=r"status\.json is not valid JSON"):
        Watched(tmp_path, monkeypatch).pool.run(cells[1:2])


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_every_signal_by_which_ranks_are_asked_to_save_is_heard(number: signal.Signals) -> None:
    """Also SIGUSR2, which a batch script's own `--signal` may send to the request it has become."""
    with listening() as asked:
        os.kill(os.getpid(), number)
    assert asked == [number]
