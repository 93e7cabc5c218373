"""Other users of a machine hold no lock of a store, and read no tensor or log."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from harness.checkpoint import folder as checkpoints
from harness.probe import capture
from harness.store import check_stream, provenance
from harness.store.files import Lock, is_held, private_folder
from harness.store.rundir import RunDir, Store
from tests.launch.cells import make_cell
from tests.support.mutants import finds

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can be somebody else")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may write into: pytest's own is closed."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def another(act: Callable[[], int]) -> int:
    """Exit code of another user's process, which does `act`."""
    child = os.fork()
    if child == 0:
        gc.disable()  # what earlier tests left behind would wait for threads that a fork lacks
        code = 99
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = act()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def grab(path: Path) -> int:
    """0: the lock is held by whoever does this; 1: it could not even be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return 1
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return 0


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_a_lock_is_its_owners_alone_whatever_the_umask(mask: int, tmp_path: Path) -> None:
    """Also one that an older version left open; and a planted link makes no file elsewhere."""
    (tmp_path / "older").touch(0o666)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with umask(mask):
        locks = [Lock.acquire(tmp_path / name) for name in (".lock", "older")]
        with pytest.raises(OSError, match="symbolic"):
            Lock.acquire(tmp_path / "link")
    assert all(locks)
    assert mode(tmp_path / ".lock") == mode(tmp_path / "older") == 0o600
    assert is_held(tmp_path / ".lock")
    assert not (tmp_path / "elsewhere").exists()


@as_root
def test_nobody_else_can_keep_the_owner_from_its_lock(open_folder: Path) -> None:
    path = open_folder / ".lock"
    with umask(0):
        lock = Lock.acquire(path)
    assert lock is not None
    lock.release()
    assert another(lambda: grab(path)) == 1
    assert another(lambda: not is_held(path)) == 0, "who cannot look believes what the state says"


def written(run: Path) -> dict[str, Path]:
    """Every folder of a run that is closed to others, made by the code that fills it."""
    capture.write_step(run / "capture", 1, {"w": torch.ones(2)}, {})
    check_stream.StreamWriter(run, [], 1, 1, 0).close()
    checkpoints.begin(run / "ckpt", 1)
    private_folder(run / "verdict")
    attempt = RunDir(run).attempt_dir(RunDir(run).new_attempt())
    provenance.record_start(run, {}, "diff")
    found = {name: run / name for name in ("capture", "step_checks", "ckpt", "verdict", "diff.patch")}
    return found | {"attempt": attempt, "file": run / "capture" / "step-000001.safetensors"}


def open_to_others(run: Path, mask: int) -> list[str]:
    with umask(mask):
        made = written(run)
    return [name for name, path in made.items() if mode(path) & 0o077]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_tensors_and_logs_are_their_owners_alone(mask: int, tmp_path: Path) -> None:
    assert not open_to_others(tmp_path, mask)
    assert mode(tmp_path) == mode(tmp_path.parent), "folders above are made as usual"
    with umask(0):
        run = Store(tmp_path / "runs").create(make_cell(tmp_path / "runs"))
    modes = [mode(folder) for folder in (tmp_path / "runs", run.path.parent, run.path)]
    assert modes == [0o775, 0o775, 0o755], "nobody else writes into a run"


def test_an_owner_may_open_a_folder(tmp_path: Path) -> None:
    assert private_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "b").chmod(0o755)
    assert not private_folder(tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        private_folder(tmp_path / "file")


test_a_mutant_is_found = finds(
    "The store",
    test_a_lock_is_its_owners_alone_whatever_the_umask="""
        an open lock: A lock file has the umask's mode, so that another user holds it for ever
            store.files.PRIVATE: 0o666
            (mask=0)
    """,
    test_tensors_and_logs_are_their_owners_alone="""
        open captures: Gradients, weights and logs can be read by every user whose umask lets them
            store.files.private_folder: path.chmod(0o700) => path.chmod(0o755)
            (mask=0o022)
    """,
)
