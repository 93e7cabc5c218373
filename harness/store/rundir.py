"""Runs on disk: where one lies, what is in it, and how to find it again."""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from harness.store import commands, identity, shapes, status
from harness.store.errors import Busy, StoreError
from harness.store.files import Lock, held, private_folder, write_atomic
from harness.store.reading import folder_names, read_json, read_text
from harness.store.reading_yaml import read_yaml

Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
CONFIG = "config.yaml"
LAST = ".last"
CANCEL = "cancel"
CHECKSUMS = "checksums.json"
CODE = ".snapshots"
MARK, MARK_TEXT = ".store", "A store of runs. `python -m harness gc` tidies up only under a folder with this file.\n"
SHARED, OWNED = 0o775, 0o755
"""Modes before the umask of the root and studies, which a group may share, and of a run, writable by its owner
alone."""
_ATTEMPT = re.compile(r"[0-9]{1,9}")
_CHECKPOINT = re.compile(r"step-[0-9]{6,}(\.tmp|\.old)?")
"""Names of `harness.checkpoint.folder`: a checkpoint, a partial one, a replaced one."""
RECORD = (
    *("metrics.jsonl", "summary.json", "provenance.json", "diff.patch", "capture", "step_checks", "vouch"),
    CHECKSUMS,
)
"""Results of a run, moved aside when it restarts from step 0."""


class CellLike(Protocol):
    @property
    def config(self) -> dict[str, Any]:
        """Plain, resolved, complete."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides as typed."""


@dataclass(unsafe_hash=True)
class RunDir:
    """One run's directory. Cheap to make; reads the disk when asked."""

    path: Path

    def __post_init__(self) -> None:
        self.metrics, self.summary = self.path / "metrics.jsonl", self.path / "summary.json"
        self.provenance = self.path / "provenance.json"
        self.ckpt, self.capture = self.path / "ckpt", self.path / "capture"

    @property
    def name(self) -> str:
        """`<study>/<name>-<sig8>`: enough to find it under its root."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def digits(self) -> str:
        """Signature's digits at the end of its name; empty of a folder that another program named."""
        found = self.path.name.rpartition("-")[2]
        return found if re.fullmatch(f"[0-9a-f]{{{identity.SHORT}}}", found) else ""

    def config(self) -> dict[str, Any]:
        """Frozen configuration, plain. Raises `StoreError`: it is missing, or no YAML."""
        value = read_yaml(self.path / CONFIG, shapes.CONFIG)
        if value is None:
            raise StoreError(f"{self.path} is not a run: it has no {CONFIG}")
        return identity.current(value)

    def setting(self, path: str) -> Any:
        """Value of a dotted setting. Raises `StoreError`, as `config`, or for a setting its version did not have."""
        found = flatten(self.config())
        if path not in found:
            raise StoreError(f"{self.path / CONFIG} has no {path}")
        return found[path]

    def overrides(self) -> tuple[str, ...]:
        return tuple((read_text(self.path / "overrides.txt") or "").splitlines())

    def signature(self) -> str:
        return identity.signature(self.config())

    def status(self) -> status.Status | None:
        """Content of `status.json`, believed or not; see `status.effective`."""
        return status.read(self.path)

    def attempts(self) -> list[int]:
        return sorted(int(name) for name in folder_names(self.path / "attempts") if _ATTEMPT.fullmatch(name))

    def attempt_dir(self, number: int) -> Path:
        """Folder of one attempt: script, rank logs, `error.txt`."""
        return self.path / "attempts" / str(number)

    def next_attempt(self) -> int:
        """Number of the next attempt, unless another request makes one first."""
        return max(self.attempts(), default=-1) + 1

    def new_attempt(self) -> int:
        """Make the folder of the next attempt, unique over processes.

        Only its owner may enter, whatever the umask: it holds logs, and the key of the rendezvous.
        """
        number = self.next_attempt()
        while not private_folder(self.attempt_dir(number)):
            number += 1
        return number

    def lock(self, *, timeout_s: float = 2.0) -> Lock:
        """Lock of the one process that runs this; held until released or until every process that inherited it is gone.

        Raises `Busy`: another process runs it.
        """
        lock = Lock.acquire(self.path / status.OWNER_LOCK, timeout_s=timeout_s)
        if lock is None:
            present = self.status()
            owner = f"process {present.pid} on {present.host}" if present and present.pid else "another process"
            look = commands.verb(f"watch {shlex.quote(self.path.parent.name)}", self.path.parent.parent)
            raise Busy(f"{self.path} is in use by {owner}; wait for it or run: {look}")
        return lock

    def adopt(self, cell: CellLike) -> None:
        """Replace cluster, launch, wandb, notes and study for the next attempt."""
        if cell.config != self.config():
            self.freeze(cell)

    def freeze(self, cell: CellLike) -> None:
        """Write a cell's files; the configuration last, which makes the folder a run."""
        write_atomic(self.path / "overrides.txt", "".join(f"{override}\n" for override in cell.overrides))
        text = yaml.dump(cell.config, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
        write_atomic(self.path / CONFIG, text)

    def has_record(self) -> bool:
        return self.metrics.exists() or bool(self.checkpoints())

    def checkpoints(self) -> list[Path]:
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
    write_atomic(run / "attempts" / str(attempt) / CANCEL, "")


def cancel_requested(run: Path, attempt: int) -> bool:
    return (run / "attempts" / str(attempt) / CANCEL).exists()


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one level of dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class Store:
    def __init__(self, root: Path | str) -> None:
        """Args: root: folder of studies; need not exist yet."""
        self.root = _anchored(root)

    def path_of(self, cell: CellLike) -> Path:
        """Folder of a cell's run: the one of its signature, whatever name it was begun under."""
        usual = self.root / identity.study_name(cell.config) / identity.directory_name(cell.config)
        if usual.exists():
            return usual
        end = usual.name[-1 - identity.SHORT :]
        others = (usual.with_name(name) for name in folder_names(usual.parent) if name.endswith(end))
        found = (path for path in others if (path / CONFIG).is_file())
        return next((path for path in found if RunDir(path).signature() == identity.signature(cell.config)), usual)

    def create(self, cell: CellLike) -> RunDir:
        """Run of a cell, made if missing, once also for concurrent processes.

        Raises `StoreError`: the directory holds another configuration. `OSError`: the root is not writable, or the disk
        is full.
        """
        run = RunDir(self.path_of(cell))
        self.claim()
        run.path.parent.mkdir(SHARED, exist_ok=True)
        run.path.mkdir(OWNED, exist_ok=True)
        with held(run.path / status.WRITE_LOCK):
            if not (run.path / CONFIG).exists():
                run.freeze(cell)
                return run
        if identity.signature(cell.config) != run.signature():
            raise StoreError(f"{run.path} holds another configuration")
        return run

    def claim(self) -> None:
        """Mark the root as a store, made if missing; `gc` removes nothing elsewhere."""
        self.root.mkdir(SHARED, parents=True, exist_ok=True)
        if not (self.root / MARK).exists():
            write_atomic(self.root / MARK, MARK_TEXT)

    def is_marked(self) -> bool:
        try:
            return read_text(self.root / MARK) == MARK_TEXT
        except StoreError:
            return False

    def study_lock(self, study: str) -> Lock:
        """Lock under which cells of a study are examined and started: two requests start each cell once."""
        folder = self.root / study
        self.claim()
        folder.mkdir(SHARED, exist_ok=True)
        lock = Lock.acquire(folder / ".lock", timeout_s=60.0)
        if lock is None:
            raise Busy(f"another process has been starting runs of {folder} for 60 s; wait for it")
        return lock

    def remember(self, run: RunDir) -> None:
        write_atomic(self.root / LAST, f"{run.path.relative_to(self.root)}\n")

    def studies(self) -> list[str]:
        return sorted({run.path.parent.name for run in self.runs()})

    def runs(self, study: str | None = None) -> list[RunDir]:
        """Runs in a stable order, of one study or of all."""
        if study is not None and Path(study).name != study:
            return []
        found = sorted(self.root.glob(f"{glob.escape(study) if study else '*'}/*/{CONFIG}"))
        return [RunDir(path.parent) for path in found if not path.parent.name.startswith(".")]

    def find(self, ref: str) -> RunDir:
        """Run named by a path, `study/name`, a prefix of its signature (4 digits or more) or `@last`.

        Raises `StoreError`: there is no such run, or more than one.
        """
        if ref == "@last":
            return self._last()
        for path in (_anchored(ref), self.root / ref):
            if os.path.isfile(path / CONFIG):
                return RunDir(path)
        prefix, matches = ref.lower(), []
        if re.fullmatch("[0-9a-f]{4,}", prefix):
            named = [run for run in self.runs() if run.digits.startswith(prefix[: identity.SHORT])]
            matches = [run for run in named if run.signature().startswith(prefix)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise StoreError(f"{ref!r} fits {len(matches)} runs: {_listed(matches)}; add digits or give a path")
        raise StoreError(
            f"no run {ref!r} under {self.root}; give a path, 4 or more digits of a signature, or @last "
            f"(there are: {_listed(self.runs()) or 'none yet'})"
        )

    def short(self, run: RunDir) -> str:
        """Shortest word by which `find` finds a run: digits of its signature; after its study where ambiguous."""
        digits = run.digits
        same = [path for path in self.root.glob(f"*/*-{digits}/{CONFIG}") if not path.parent.name.startswith(".")]
        return digits if digits and len(same) < 2 else run.name

    def _last(self) -> RunDir:
        text = read_text(self.root / LAST)
        if text is not None and os.path.isfile((path := self.root / text.strip()) / CONFIG):
            return RunDir(path)
        start = f"; start with: {commands.request()}" * commands.is_usual(self.root)
        raise StoreError(f"@last: nothing was run under {self.root} yet{start}")


def _anchored(path: Path | str) -> Path:
    """Absolute path, `~` expanded. Raises `StoreError`: no such home, or no working directory."""
    try:
        return Path(path).expanduser().absolute()
    except (OSError, RuntimeError, ValueError) as error:
        raise StoreError(f"{str(path)!r} leads nowhere: {error}; give an absolute path") from error


def _listed(runs: list[RunDir]) -> str:
    return ", ".join(run.name for run in runs[:6]) + (", ..." if len(runs) > 6 else "")


def read_summary(run: RunDir) -> dict[str, Any] | None:
    """`summary.json`; None before the run has ended."""
    value: dict[str, Any] | None = read_json(run.summary, shapes.SUMMARY)
    return value


def checkpoint_folder(path: Path) -> Path:
    return path / "ckpt" if (path / "ckpt").is_dir() else path
