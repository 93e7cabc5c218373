"""Runs on disk: where one lies, what is in it, and how to find it again."""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import yaml

from harness.store import commands, identity, shapes, status
from harness.store.errors import Busy, StoreError
from harness.store.files import Lock, held, private_folder, write_atomic
from harness.store.reading import folder_names, read_json, read_text, read_yaml

Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

CONFIG = "config.yaml"
LAST = ".last"
CANCEL = "cancel"
CHECKSUMS = "checksums.json"
CODE = ".snapshots"
CODE_OF = "code"
DRY_RUN = ".dry_run"
"""Folders under a study: what was submitted, a folder for each array; and batch scripts that were only asked for."""
MARK, MARK_TEXT = ".store", "A store of runs. `python -m harness gc` tidies up only under a folder with this file.\n"
SHARED, OWNED = 0o775, 0o755
"""Modes before the umask of the root and its studies, which a group may share, and of a run: nobody else writes."""
_ATTEMPT = re.compile(r"[0-9]{1,9}")
_CHECKPOINT = re.compile(r"step-[0-9]{6,}(\.tmp|\.old)?")
"""Names that `harness.checkpoint.folder` gives: of a checkpoint, one that is being written, one that is replaced."""
RECORD = ("metrics.jsonl", "summary.json", "provenance.json", "diff.patch", "capture", "vouch", CHECKSUMS)
"""Files that a run produced; moved aside when it starts again from step 0."""


class CellLike(Protocol):
    @property
    def config(self) -> dict[str, Any]:
        """Plain, resolved, complete."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides as typed."""


class RunDir:
    """One run's directory. Cheap to make; reads the disk when asked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDir) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def provenance(self) -> Path:
        """Versions, hosts, git, digest of the sources."""
        return self.path / "provenance.json"

    @property
    def ckpt(self) -> Path:
        return self.path / "ckpt"

    @property
    def capture(self) -> Path:
        return self.path / "capture"

    @property
    def name(self) -> str:
        """`<study>/<name>-<sig8>`: enough to find it under its root."""
        return f"{self.path.parent.name}/{self.path.name}"

    def config(self) -> dict[str, Any]:
        """The frozen configuration, plain.

        Raises:
            StoreError: there is none, or it is not YAML.
        """
        value: dict[str, Any] | None = read_yaml(self.path / CONFIG, shapes.CONFIG)
        if value is None:
            raise StoreError(f"{self.path} is not a run: it has no {CONFIG}")
        return value

    def setting(self, path: str) -> Any:
        """One value of the frozen configuration, by its dotted path.

        Raises:
            StoreError: as `config`, or the run was frozen by a version that had no such setting.
        """
        found = flatten(self.config())
        if path not in found:
            raise StoreError(f"{self.path / CONFIG} has no {path}")
        return found[path]

    def overrides(self) -> tuple[str, ...]:
        return tuple((read_text(self.path / "overrides.txt") or "").splitlines())

    def signature(self) -> str:
        """64 hex digits, from the frozen configuration."""
        return identity.signature(self.config())

    def status(self) -> status.Status | None:
        """Contents of `status.json`, believed or not; see `status.effective`."""
        return status.read(self.path)

    def attempts(self) -> list[int]:
        return sorted(int(name) for name in folder_names(self.path / "attempts") if _ATTEMPT.fullmatch(name))

    def attempt_dir(self, number: int) -> Path:
        return self.path / "attempts" / str(number)

    def next_attempt(self) -> int:
        """Number that the next attempt gets, unless another request makes one first."""
        return (self.attempts() or [-1])[-1] + 1

    def new_attempt(self) -> int:
        """Make the folder of the next attempt; two processes never get the same one.

        Only its owner may look into it, whatever the umask: it holds logs, and the word by which ranks meet.
        """
        number = self.next_attempt()
        while not private_folder(self.attempt_dir(number)):
            number += 1
        return number

    def lock(self, *, timeout_s: float = 2.0) -> Lock:
        """Become the one process that runs this; held until released or until every process that inherited it is gone.

        Raises:
            Busy: another process runs it.
        """
        lock = Lock.acquire(self.path / status.OWNER_LOCK, timeout_s=timeout_s)
        if lock is None:
            present = self.status()
            owner = f"process {present.pid} on {present.host}" if present and present.pid else "another process"
            look = commands.verb(f"watch {shlex.quote(self.path.parent.name)}", self.path.parent.parent)
            raise Busy(f"{self.path} is in use by {owner}; wait for it or run: {look}")
        return lock

    def adopt(self, cell: CellLike) -> None:
        """Take a cell's cluster, launch, wandb, notes and study as those of the next attempt.

        Raises:
            StoreError: the cell is another run.
        """
        present = self.config()
        if identity.signature(cell.config) != identity.signature(present):
            raise StoreError(f"{self.path} holds another configuration: {_difference(self, cell)}")
        if cell.config != present:
            write_atomic(self.path / CONFIG, _dump(cell.config))
            write_atomic(self.path / "overrides.txt", _lines(cell.overrides))

    def has_record(self) -> bool:
        """True if the run directory holds steps or a checkpoint of an earlier attempt."""
        return self.metrics.exists() or bool(self.checkpoints())

    def checkpoints(self) -> list[Path]:
        """Folders of checkpoints, torn ones too; a person's own files may lie beside them."""
        return [self.ckpt / name for name in sorted(folder_names(self.ckpt)) if _CHECKPOINT.fullmatch(name)]

    def start_over(self, attempt: int) -> None:
        """Move the record of earlier attempts into `attempts/<attempt>/before/` and drop its checkpoints."""
        for checkpoint in self.checkpoints():  # first: if we are interrupted, none outlives the record it stands on
            shutil.rmtree(checkpoint) if checkpoint.is_dir() and not checkpoint.is_symlink() else checkpoint.unlink()
        target = self.attempt_dir(attempt) / "before"
        for entry in (self.path / name for name in RECORD):
            if entry.exists():
                target.mkdir(parents=True, exist_ok=True)
                os.replace(entry, target / entry.name)


def request_cancel(run: Path, attempt: int) -> None:
    """Ask whoever runs an attempt to end it; obeyed from any host that shares the file system."""
    write_atomic(run / "attempts" / str(attempt) / CANCEL, "")


def cancel_requested(run: Path, attempt: int) -> bool:
    return (run / "attempts" / str(attempt) / CANCEL).exists()


def _difference(run: RunDir, cell: CellLike) -> str:
    theirs, ours = flatten(run.config()), flatten(cell.config)
    keys = [
        key
        for key in sorted(theirs.keys() | ours.keys())
        if key.split(".")[0] not in identity.EXCLUDED and theirs.get(key) != ours.get(key)
    ]
    return ", ".join(f"{key}={theirs.get(key)!r} there, {ours.get(key)!r} here" for key in keys[:5]) or "keys only"


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one level of dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _dump(config: dict[str, Any]) -> str:
    text: str = yaml.dump(config, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def _lines(items: tuple[str, ...]) -> str:
    return "".join(f"{item}\n" for item in items)


def check_name(what: str, name: str) -> str:
    """`name`, if it is one plain folder name.

    Raises:
        StoreError: it is empty, hidden, `..`, or holds anything but letters, digits, `_`, `.` and `-`.
    """
    if not name or name != identity.slug(name):
        better = identity.slug(name) or "my_study"
        raise StoreError(
            f"{what}={name!r} names a folder: use lower-case letters, digits, '_', '.' and '-', such as {better!r}"
        )
    return name


class Store:
    def __init__(self, root: Path | str) -> None:
        """
        Args:
            root: the folder of studies; need not exist yet.

        Raises:
            StoreError: the path holds a newline or another control character, which neither sbatch nor logs survive, or
                bytes that are no UTF-8, as which it is written down.
        """
        if any(ord(character) < 32 or ord(character) == 127 for character in str(root)):
            raise StoreError(f"launch.root={str(root)!r} holds a control character (a newline?); choose another folder")
        if any("\ud800" <= character <= "\udfff" for character in str(root)):
            raise StoreError(f"launch.root={str(root)!r} is not UTF-8; choose another folder")
        self.root = _anchored(root)

    def path_of(self, cell: CellLike) -> Path:
        study = check_name("study.name", identity.study_name(cell.config))
        return self.root / study / identity.directory_name(cell.config)

    def create(self, cell: CellLike) -> RunDir:
        """The run of a cell, made where it is missing. The same cell twice is one run, also from two processes at once.

        Raises:
            StoreError: the directory holds another configuration.
            OSError: the root is not writable, or the disk is full.
        """
        run = RunDir(self.path_of(cell))
        self.claim()
        run.path.parent.mkdir(SHARED, exist_ok=True)
        run.path.mkdir(OWNED, exist_ok=True)
        with held(run.path / status.WRITE_LOCK):
            if not (run.path / CONFIG).exists():
                write_atomic(run.path / "overrides.txt", _lines(cell.overrides))
                write_atomic(run.path / CONFIG, _dump(cell.config))
                return run
        if identity.signature(cell.config) != run.signature():
            raise StoreError(f"{run.path} holds another configuration: {_difference(run, cell)}")
        return run

    def claim(self) -> None:
        """Leave the mark of a store in its root, made where it is missing: only what bears it is ever tidied up."""
        self.root.mkdir(SHARED, parents=True, exist_ok=True)
        if not (self.root / MARK).exists():
            write_atomic(self.root / MARK, MARK_TEXT)

    def is_marked(self) -> bool:
        try:
            return read_text(self.root / MARK) == MARK_TEXT
        except StoreError:
            return False

    def study_lock(self, study: str, *, timeout_s: float = 60.0) -> Lock:
        """The lock under which cells of a study are looked at and started: two requests start each cell once."""
        folder = self.root / study
        self.claim()
        folder.mkdir(SHARED, exist_ok=True)
        lock = Lock.acquire(folder / ".lock", timeout_s=timeout_s)
        if lock is None:
            raise Busy(f"another process has been starting runs of {folder} for {timeout_s:g} s; wait for it")
        return lock

    def remember(self, run: RunDir) -> None:
        write_atomic(self.root / LAST, f"{run.path.relative_to(self.root)}\n")

    def studies(self) -> list[str]:
        return sorted({run.path.parent.name for run in self.runs()})

    def runs(self, study: str | None = None) -> list[RunDir]:
        """Runs in a stable order, of one study or of all.

        Raises:
            StoreError: none is seen, because another person's folder is closed.
        """
        if study is not None and Path(study).name != study:
            return []
        pattern = f"{glob.escape(study) if study else '*'}/*/{CONFIG}"
        found = [path.parent for path in sorted(self.root.glob(pattern)) if not path.parent.name.startswith(".")]
        for folder in () if found else (self.root, *self.root.glob(glob.escape(study) if study else "[!.]*")):
            if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
                raise StoreError(f"{folder} cannot be read: Permission denied")
        return [RunDir(path) for path in found]

    def find(self, ref: str) -> RunDir:
        """The run that `ref` names: a path, `study/name`, a prefix of its signature (4 digits or more) or `@last`.

        Raises:
            StoreError: there is no such run, or more than one.
        """
        if ref == "@last":
            return self._last()
        for path in (_anchored(ref), self.root / ref):
            if os.path.isfile(path / CONFIG):
                return RunDir(path)
        matches = list(self._by_signature(ref.lower()))
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise StoreError(f"{ref!r} fits {len(matches)} runs: {_listed(matches)}; add digits or give a path")
        raise StoreError(
            f"no run {ref!r} under {self.root}; give a path, 4 or more digits of a signature, or @last "
            f"(there are: {_listed(self.runs()) or 'none yet'})"
        )

    def short(self, run: RunDir) -> str:
        """The shortest word by which `find` finds a run: digits of its signature; after its study where another study
        has the same cell."""
        digits = run.path.name.rpartition("-")[2]
        same = [path for path in self.root.glob(f"*/*-{digits}/{CONFIG}") if not path.parent.name.startswith(".")]
        return digits if len(same) < 2 else run.name

    def _by_signature(self, prefix: str) -> Iterator[RunDir]:
        if len(prefix) < 4 or any(character not in "0123456789abcdef" for character in prefix):
            return
        for run in self.runs():
            short = run.path.name.rpartition("-")[2]
            if short.startswith(prefix[: identity.SHORT]) and run.signature().startswith(prefix):
                yield run

    def _last(self) -> RunDir:
        text = read_text(self.root / LAST)
        run = None if text is None else RunDir(self.root / text.strip())
        if run is None or not os.path.isfile(run.path / CONFIG):
            start = f"; start with: {commands.request()}" * commands.is_usual(self.root)
            raise StoreError(f"@last: nothing was run under {self.root} yet{start}")
        return run


def _anchored(path: Path | str) -> Path:
    """An absolute path, `~` expanded.

    Raises:
        StoreError: there is no such home, or no working directory any more.
    """
    try:
        return Path(path).expanduser().absolute()
    except (OSError, RuntimeError, ValueError) as error:
        why = "the working directory is gone" if isinstance(error, FileNotFoundError) else str(error)
        raise StoreError(f"{str(path)!r} leads nowhere: {why}; give an absolute path") from error


def _listed(runs: list[RunDir]) -> str:
    return ", ".join(run.name for run in runs[:6]) + (", ..." if len(runs) > 6 else "")


def read_summary(run: RunDir) -> dict[str, Any] | None:
    """`summary.json`; None before the run has ended."""
    value: dict[str, Any] | None = read_json(run.summary, shapes.SUMMARY)
    return value


def checkpoint_folder(path: Path) -> Path:
    """Where the step-* folders of a run, or of its ckpt folder, lie."""
    return path / "ckpt" if (path / "ckpt").is_dir() else path
