"""Provenance of a result: versions, machine, git, and a digest of the sources that can change a number.

The front end writes its part at the start of a run; rank 0 completes it (`merge`). Environment variables are recorded
by an allow-list of names, so that no token can reach a file.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from harness.store.files import PRIVATE, write_atomic, write_json
from harness.store.reading import read_json
from harness.store.shapes import PROVENANCE

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = "shipped"
ROOT = PACKAGE / SHIPPED if (PACKAGE / SHIPPED).is_dir() else PACKAGE.parent
"""Folder of `run.py`, `conf/` and `sweeps/`: beside the package in a checkout, inside it if installed."""
SOURCES = (
    *("worker", "train", "checkpoint", "control.py", "engines", "models", "data"),
    *("fsdp", "fp8", "shm", "muon.py", "private_torch.py"),
    *("config/derived.py", "config/data_source.py"),
)
"""Sources that can change a number, relative to the package; not meters, records and the front end."""
PACKAGES = ("torch", "numpy", "safetensors", "xxhash", "hydra-core", "omegaconf", "submitit", "wandb")
ENVIRONMENT = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD"),
    *("MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "KMP_AFFINITY", "GLOO_SOCKET_IFNAME"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_HIGH_PRIORITY"),
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_NVLS_NCHANNELS", "NCCL_CTA_POLICY"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_CUMEM_ENABLE", "NCCL_WIN_ENABLE", "NCCL_SYM_GIN_KERNELS_ENABLE"),
    *("NCCL_IBEXT_DISABLE", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"),
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"),
    *("SHARP_COLL_ENABLE_SAT", "SHARP_COLLNET_OVERLAP_AG", "SHARP_COLL_LOG_LEVEL"),
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION"),
    *("SLURM_RESTART_COUNT", "SLURM_NTASKS"),
)
"""Names that may be recorded: each changes numbers or speed, and none can hold a secret."""
WATCHED = "watched"
"""Entry of the provenance of a run that `harness.capture` recorded: of another program, by no source of ours."""
SERIES = "series"
"""Entry beside it of a run that `import-series` made: of numbers alone, from a file."""
OF_ANOTHER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES")
"""Variables of git's hooks and aliases, which would select another repository."""


def desk_facts(peers: Iterable[str] = ()) -> dict[str, Any]:
    """Facts of the front end at a run's start. Args: peers: distributions of engines, recorded besides `PACKAGES`."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "sources_digest": sources_digest(),
        "versions": versions((*PACKAGES, *peers)),
        "git": git_facts(PACKAGE.parent),
        "submit_host": os.uname().nodename,
    }


def machine_facts() -> dict[str, Any]:
    system = os.uname()  # `platform.platform()` starts `uname -p`
    return {
        "platform": f"{system.sysname}-{system.release}-{system.machine}",
        "machine": system.machine,
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    found = {"python": sys.version.split()[0], "harness": _version("sharding-harness") or "unknown"}
    return found | {name: version for name in names if (version := _version(name)) is not None}


@cache
def _version(name: str) -> str | None:
    from importlib import metadata  # late: most commands need no version

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return os.uname().machine
    match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else os.uname().machine


def python_path(environment: Mapping[str, str], first: Path = PACKAGE.parent) -> str:
    """PYTHONPATH of a child that imports this package, or that in another folder, and what its parent finds."""
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join([str(first), *(each for each in entries if Path(each).resolve() != PACKAGE.parent)])


def source_files(package: Path = PACKAGE) -> list[Path]:
    found: list[Path] = []
    for name in SOURCES:
        entry = package / name
        found.extend(entry.rglob("*.py") if entry.is_dir() else [entry] if entry.is_file() else [])
    return sorted(found)


def sources_digest(package: Path = PACKAGE) -> str:
    """SHA-256 over paths and bytes of the sources that can change a number, 64 hex digits."""
    return files_digest(package, (path.relative_to(package).as_posix() for path in source_files(package)))


def files_digest(root: Path, names: Iterable[str]) -> str:
    """SHA-256 over files under `root`: relative names and bytes, 64 hex digits; one may be missing."""
    digest = hashlib.sha256()
    for name in names:
        try:
            content = (root / name).read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
        except OSError:
            digest.update(f"{name}\0gone\0".encode())
    return digest.hexdigest()


def own_now(origin: Mapping[str, Any], *, loaded: bool = False) -> list[dict[str, Any]]:
    """Record of the user's own classes with present digests; `loaded`: of the ranks' files, a copy for submitted
    runs."""
    own = origin.get("own", ())
    folders = [Path(each.get("copy", each["root"]) if loaded else each["root"]) for each in own]
    return [{**each, "digest": files_digest(root, each["files"])} for each, root in zip(own, folders, strict=True)]


def edited(origin: Mapping[str, Any], now: Iterable[Mapping[str, Any]] | None = None) -> list[str]:
    """Names of the user's classes with other files today, or (`now`) in a request."""
    both = origin.get("own", ()), own_now(origin) if now is None else now
    held, present = ({each["name"]: each["digest"] for each in some} for some in both)
    return [name for name, digest in held.items() if present.get(name, digest) != digest]


def git_facts(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether tracked files were changed; None outside a repository, or where it tracks no file of the
    folder.

    One call of git where the folder is the repository's own. Remote addresses are left out: they may hold secrets.
    """
    if not ((folder / ".git").exists() or _git(folder, "ls-files", "--", ".")):
        return None
    named = (_git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or "").strip()
    sha, _, dirty = named.partition("-")
    return {"sha": sha, "dirty": bool(dirty)} if sha else None


def git_diff(folder: Path = PACKAGE.parent, facts: Mapping[str, Any] | None = None) -> str:
    """Tracked changes against HEAD. Args: facts: `git_facts` of the folder, where they are known."""
    facts = git_facts(folder) if facts is None else facts
    return (_git(folder, "diff", "HEAD", "--no-ext-diff", "--no-color") or "") if facts and facts["dirty"] else ""


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    ours = {name: value for name, value in os.environ.items() if name not in OF_ANOTHER}
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False, env=ours)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def record_start(run: Path, facts: Mapping[str, Any], diff: str) -> None:
    """Write the front end's part of `provenance.json`, and `diff.patch` with changes to the commit.

    Args: facts: `desk_facts`, and the user's own classes.
    """
    write_json(run / "provenance.json", facts)
    if diff:
        write_atomic(run / "diff.patch", diff, mode=PRIVATE)
    else:
        (run / "diff.patch").unlink(missing_ok=True)


def merge(run: Path, facts: Mapping[str, Any]) -> None:
    """Add rank 0's facts to `provenance.json`; `versions` are joined, all else is replaced."""
    present = read(run)
    joined = {**present.get("versions", {}), **facts.get("versions", {})}
    write_json(run / "provenance.json", {**present, **facts, "versions": joined})


def read(run: Path) -> dict[str, Any]:
    value: dict[str, Any] | None = read_json(run / "provenance.json", PROVENANCE)
    return value or {}


def is_stale(run: Path, digest: str | None = None, own: Iterable[Mapping[str, Any]] | None = None) -> bool:
    """True if a run's sources, with the user's own, differ from today's (or from `digest`).

    own: record of the present classes; by default their files are read again.
    """
    origin = read(run)
    recorded = origin.get("sources_digest")
    if recorded is None or WATCHED in origin:
        return False
    return bool(edited(origin, own) or recorded != (digest or sources_digest()))
