"""The wandb copy: the real package's file holds the record to the last bit; a copy that fails is told."""

from __future__ import annotations

import random
import shlex
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.derived import wandb_mode
from harness.config.schema import CkptPolicy, WandbMode
from harness.store import status, wandb_run
from harness.store.fields import METRICS, as_line, synced
from harness.store.files import write_json
from harness.store.metrics import MetricsWriter, cut_back, read_metrics
from harness.store.rundir import RunDir
from harness.store.status import State, Status
from harness.store.wandb_run import wandb_id
from harness.train.record import WandbSync
from tests.support import wandb_file
from tests.support.factory import freeze, small_config, stopping, train
from tests.support.mutants import finds

HARD = (float("nan"), float("inf"), -float("inf"), 5e-324, 1.7976931348623157e308, 0.1 + 0.2)
"""All but -0.0, which wandb writes as 0."""


def line(step: int, draw: random.Random) -> dict[str, Any]:
    """A record whose numbers are hard to copy."""
    values: dict[str, Any] = {each.path: draw.uniform(-1, 1) * 10 ** draw.randint(-300, 300) for each in METRICS}
    values = {path: value for path, value in values.items() if "*" not in path}
    values |= {"step": step, "loss": HARD[step % len(HARD)], "param_norm": None, "data_digest": "ab" * 8}
    values |= {"skipped": step % 2 == 0, "tokens": 2**53 - step, "memory/allocated": None, "memory/rss": 2**40 + step}
    values |= {"memory/peak_tensor_bytes": 2**20 + step}
    return as_line(values | {"comm": {"all_gather": {"count": step, "bytes": 8 * step}}, "own": {}})


def write(run: RunDir, first: int, last: int, seed: int) -> None:
    with closing(MetricsWriter(run.metrics)) as writer:
        for step in range(first, last + 1):
            writer.write(line(step, random.Random(100 * seed + step)))


def summarise(run: RunDir, state: str, step: int) -> None:
    summary = {"status": state, "step": step, "step_time_s": {"median": 0.5}, "accounted_bytes": {"main_weights": 64}}
    write_json(run.summary, summary)


def follow(run: RunDir) -> None:
    """Copy a run's record as its rank 0 does."""
    wandb_sync = WandbSync(run.path, pytest.fail)
    wandb_sync.begin(small_config(wandb__mode=WandbMode.offline))
    wandb_sync.close()


def test_after_three_attempts_one_file_equals_the_record(tmp_path: Path) -> None:
    """The second attempt goes back two steps, as from a checkpoint; the third begins where the second ended."""
    run = RunDir(tmp_path / "adhoc" / "arm-01234567")
    freeze(small_config(wandb__mode=WandbMode.offline, wandb__project="lab"), run.path)
    for seed, (back_to, last, state) in enumerate([(0, 5, "preempted"), (3, 8, "preempted"), (8, 15, "done")]):
        if back_to:
            cut_back(run.metrics, back_to)
        write(run, back_to + 1, last, seed)
        summarise(run, state, last)
        follow(run)
    found = wandb_file.records(wandb_file.only_file(run.path))
    rows = [{key: value for key, value in row.items() if key[0] != "_"} for row in wandb_file.history(found)]
    expected = [
        {f"train/{path}": each for path, each in synced(record).items()} for record in read_metrics(run.metrics)
    ]
    assert [sorted(row) for row in rows] == [sorted(row) for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert {key: float(row[key]).hex() for key in row} == {key: float(wanted[key]).hex() for key in wanted}
    opened, summary = wandb_file.run_of(found), wandb_file.summary(found)
    assert (opened.run_id, opened.project) == (wandb_id("adhoc", run.signature()), "lab")
    assert (opened.run_group, list(opened.tags)) == ("adhoc", ["single", "no_shard", "fp32"])
    assert (summary["result/state"], summary["result/sent_bytes"]) == ("done", 120)
    assert (summary["result/peak_bytes"], summary["result/rss_bytes"]) == (2**20 + 15, 2**40 + 15)
    stepped = [record.metric for record in found if record.WhichOneof("record_type") == "metric"]
    assert "train/*" in {each.glob_name for each in stepped}


def test_the_file_is_whole_when_following_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb's `finish` returns while its service still writes: in four of ten runs the file had seven bytes. A mode in
    capitals, which holds here, was refused by wandb."""
    import wandb

    wandb_run.settle()  # wandb reads the variable where it begins
    monkeypatch.setenv("WANDB_MODE", "OFFLINE")
    asked: list[str] = []
    monkeypatch.setattr("wandb.teardown", lambda real=wandb.teardown: (asked.append("settled"), real()))
    run = RunDir(tmp_path / "adhoc" / "arm-01234567")
    freeze(small_config(wandb__mode=WandbMode.offline), run.path)
    write(run, 1, 1, 0)
    summarise(run, "done", 1)
    follow(run)
    assert asked == ["settled"]
    assert (run.path / "wandb").stat().st_mode & 0o777 == 0o700
    assert wandb_file.summary(wandb_file.records(wandb_file.only_file(run.path)))["result/state"] == "done"


def test_a_run_of_three_attempts_copies_itself_and_leaves_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted after steps 1 and 2: one file, one id, every line once."""
    key = "0123456789abcdef" * 5
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", "offline")  # decides: `online` is asked for below
    run = RunDir(tmp_path / "adhoc" / "arm-01234567")
    config = small_config(train__steps=3, wandb__mode=WandbMode.online, ckpt__policy=CkptPolicy.last)
    freeze(config, run.path)
    assert [train(config, run.path, should_stop=stopping(1)).status for _ in range(2)] == ["preempted"] * 2
    assert train(config, run.path).status == "done"
    found = wandb_file.records(wandb_file.only_file(run.path))
    assert [row["train/step"] for row in wandb_file.history(found)] == [1, 2, 3]
    assert wandb_file.run_of(found).run_id == wandb_id("adhoc", run.signature())
    assert wandb_file.summary(found)["result/state"] == "done"
    assert not [path for path in run.path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    for study in ("a", "x" * 31, "x" * 200):
        ids = {wandb_id(study, signature) for signature in ("a" * 64, "a" * 31 + "b" + "a" * 32)}
        assert len(ids) == 2
        assert all(len(each) <= 64 for each in ids)


def refuses(*_: object, **__: object) -> None:
    raise ConnectionError("no route\nto host")


def refuses_a_line(**_: object) -> Any:
    nothing = lambda *_, **__: None  # noqa: E731
    return SimpleNamespace(dir="/nowhere/files", define_metric=nothing, finish=nothing, log=refuses)


def hangs(**_: object) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("init", "told"),
    [
        (refuses, "WandbFailed: ConnectionError: no route to host"),
        (refuses_a_line, "WandbFailed: ConnectionError: no route to host"),
        (hangs, "not everything was sent within 0 s"),
    ],
)
def test_a_copy_that_fails_or_hangs_is_told_and_the_run_is_done(
    init: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "my runs" / "adhoc" / "arm-01234567")
    freeze(small_config(wandb__mode=WandbMode.offline), run.path)
    status.write(run.path, Status(State.running, "started", 0))
    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setattr("harness.train.record.CLOSE_S", 0.3)
    took: list[float] = []
    close = WandbSync.close

    def timed(copy: WandbSync, **named: Any) -> None:
        began = time.monotonic()
        close(copy, **named)
        took.append(time.monotonic() - began)

    monkeypatch.setattr(WandbSync, "close", timed)
    assert train(small_config(wandb__mode=WandbMode.offline), run.path).status == "done"
    assert took[0] < 4, "the copy holds up the end"
    said = capsys.readouterr().out
    present = status.read(run.path)
    assert present is not None
    assert said.count("wandb copy: ") == 1
    assert told in said
    assert told in present.wandb
    assert shlex.split(present.wandb)[-1] == str(run.path)
    assert "python -m harness sync" in present.wandb


def test_disabled_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.init", lambda **_: pytest.fail("a run was opened"))
    wandb_sync, muted = WandbSync(tmp_path, pytest.fail), WandbSync(tmp_path, pytest.fail)
    wandb_sync.begin(small_config())
    monkeypatch.setenv("WANDB_MODE", "disabled")
    muted.begin(small_config(wandb__mode=WandbMode.online))
    for one in (wandb_sync, muted):
        one.log({"step": 1})
        one.close()


@pytest.mark.parametrize(
    ("asked", "word", "expected"),
    [
        ("online", "", "online"),
        ("online", "offline", "offline"),
        ("offline", "online", "online"),
        ("offline", "DISABLED", "disabled"),
        ("disabled", "online", "disabled"),
    ],
)
def test_the_variable_decides_where_a_copy_is_asked_for(asked: str, word: str, expected: str) -> None:
    assert wandb_mode(WandbMode[asked], {"WANDB_MODE": word}) is WandbMode[expected]


test_a_mutant_is_found = finds(
    "wandb",
    test_a_copy_that_fails_or_hangs_is_told_and_the_run_is_done="""
        a copy that is awaited: A copy that hangs holds up the end
            train.record.WandbSync.close: self._thread.join(patience_s) => self._thread.join(4)
            (init=hangs, told="within 0 s")
        a copy that raises: A copy that fails is not told
            train.record.WandbSync._copy: self._failed = => why =
            (init=refuses, told="no route")
    """,
    test_the_file_is_whole_when_following_ends="""
        a file that is not awaited: The wandb copy ends while wandb's service still writes its file
            train.record.settle: lambda: None
        a mode in capitals: WANDB_MODE=OFFLINE, which holds here, is left for wandb to refuse
            store.wandb_run.opened: os.environ.pop(VARIABLE, None) => None
            ()
            WandbFailed
    """,
    test_after_three_attempts_one_file_equals_the_record="""
        project left out: The run opens in wandb's own project instead of wandb.project
            store.wandb_run.copying: project=config["wandb"]["project"], =>
            ()
            ^AssertionError: .*lab
        files of earlier attempts: Files of earlier attempts stay, so that two are sent
            store.wandb_run.opened: shutil.rmtree(other, ignore_errors=True) => pass
            ()
            too many values to unpack
    """,
)
