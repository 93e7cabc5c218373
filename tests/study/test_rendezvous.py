"""Ranks of one start agree on a run: rank 0 answers each question, and only this start's."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.store import reading
from harness.store.errors import StoreError
from harness.store.rank_place import RankPlace
from harness.study import rendezvous
from harness.study.rendezvous import Answer, ask, publish, rendezvous_folder, shared_root
from tests.support.mutants import kills


def place(rank: int, world_size: int) -> RankPlace:
    return RankPlace(rank, world_size, rank, start="", launcher="torchrun")


@pytest.mark.parametrize("host_first", [True, False])
def test_every_rank_gets_the_answer_and_nothing_is_left(host_first: bool, tmp_path: Path) -> None:
    folder, answer = tmp_path / "root" / "meeting", Answer(run="/runs/x", attempt=3)
    if host_first:
        published = publish(folder, place(0, 5), answer)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ask, folder, place(rank, 5)) for rank in range(1, 5)]
        if not host_first:
            time.sleep(0.1)
            assert not any(one.done() for one in waiting)
            published = publish(folder, place(0, 5), answer)
        assert [one.result(10) for one in waiting] == [answer] * 4
    published.join(10)
    assert not published.is_alive()
    assert list(folder.iterdir()) == []


def test_an_older_starts_answer_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "answer-1-older").write_text('{"run": "/runs/old", "attempt": 0, "exit_code": null, "message": ""}')
    with pytest.raises(TimeoutError, match="rank 1 waited"):
        ask(tmp_path, place(1, 2), timeout_s=0.2)


def _led_astray(tmp_path: Path) -> bool:
    """Whether a rank goes where another user's answer leads: to a run whose code it would execute."""
    answers = threading.Thread(target=_answer_as_nobody, args=(tmp_path,))
    answers.start()
    try:
        return ask(tmp_path, place(1, 2), timeout_s=20).run == "/theirs"
    except StoreError as error:
        return "written by user 65534" not in str(error)
    finally:
        answers.join()


def _answer_as_nobody(folder: Path) -> None:
    while not (found := list(folder.glob("ask-1-*"))):
        time.sleep(0.01)
    answer = found[0].with_name(found[0].name.replace("ask-", "answer-"))
    part = folder / "part"
    part.write_text('{"run": "/theirs", "attempt": 0, "exit_code": null, "message": ""}')
    os.chown(part, 65534, 65534)
    part.rename(answer)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file to another user")
def test_another_users_answer_is_not_taken(tmp_path: Path) -> None:
    assert not _led_astray(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file to another user")
@kills("strangers", "whose answer", "Ranks go to the run that any user's answer names")
def test_a_rank_that_is_led_astray_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "read_json", lambda path, *, own: reading.read_json(path))
    assert _led_astray(tmp_path)


def test_questions_are_asked_where_nobody_else_may_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with pytest.raises(TimeoutError):
            ask(tmp_path / ".rendezvous" / "here", place(1, 2), timeout_s=0)
    finally:
        os.umask(before)
    assert (tmp_path / ".rendezvous" / "here").stat().st_mode & 0o777 == 0o700


def test_a_question_left_by_a_dead_rank_does_not_keep_the_living_waiting(tmp_path: Path) -> None:
    (tmp_path / "ask-1-dead").touch()
    publish(tmp_path, place(0, 2), Answer(exit_code=2))
    while not (tmp_path / "answer-1-dead").exists():
        time.sleep(0.01)
    assert ask(tmp_path, place(1, 2), timeout_s=5) == Answer(exit_code=2)


def test_starts_are_told_apart(tmp_path: Path) -> None:
    first = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    folders = {rendezvous_folder(tmp_path, env) for env in (first, first | {"MASTER_PORT": "2"}, {"SLURM_JOB_ID": "1"})}
    assert len(folders) == 3


def test_the_root_is_known_before_composing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shared_root(()) == tmp_path / "runs"
    assert shared_root(["launch.root='a b'"]) == tmp_path / "a b"
    assert shared_root(["launch.root='~/x'"]) == Path.home() / "x"
    assert rendezvous.LINGER_S < rendezvous.ANSWER_TIMEOUT_S
