"""Requested and effective settings of NCCL, for the record and for a warning, and its version.

`torch.cuda.nccl.version()` is a constant of torch's build. LD_PRELOAD, another wheel or a newer file give the process
another library, which is asked here.

Facts from NCCL's INFO log. No torch here.

Lines are those of NCCL 2.24 to 2.31 (`src/init.cc`, `enqueue.cc`, `ce_coll.cc`, `scheduler/symmetric_sched.cc`,
`transport/coll_net.cc`, `register/register.cc`). Which subsystem prints what:

| read back                                 | NCCL_DEBUG_SUBSYS |
|-------------------------------------------|-------------------|
| version, channels, NVLS and CollNet set up| INIT, NET         |
| registrations of user buffers             | REG               |
| algorithm, protocol or kernel of each collective | TUNING, on rank 0 of each communicator alone |

[Note: Channels that prove nothing] "16 collnet channels" is printed with the number of ordinary channels whether or not
CollNet is there. That it is, "Connected CollNet" and "via COLLNET/SHARP" say.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness.config.schema import Config, NcclLog, Registration, SharpAxis


@dataclass
class NcclFacts:
    """Facts of a log; missing ones are None, False or empty."""

    version: str | None = None
    """NCCL with its CUDA: "2.28.9+cuda12.9"."""
    nvls_channels: int = 0
    """Most NVLink SHARP channels of a communicator; 0 if unused."""
    collnet_connected: bool = False
    """True if a communicator owns InfiniBand SHARP; see [Note: Channels that prove nothing]."""
    registered: dict[str, dict[str, int]] = field(default_factory=dict)
    """Buffers that were registered: by the program (user), and as symmetric windows (symmetric)."""
    choices: dict[str, list[str]] = field(default_factory=dict)
    """By kind of collective what ran it: an algorithm and protocol, a symmetric kernel, or the copy engines."""

    @property
    def ran(self) -> set[str]:
        return {name for by in self.choices.values() for name in by}

    def plain(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, {})}


def parse(lines: Iterable[str]) -> NcclFacts:
    facts = NcclFacts()
    for line in lines:
        for marker, pattern in _PATTERNS:
            if marker in line and (match := pattern.search(line)):
                _note(facts, match.groupdict())
                break
    return facts


def read(path: Path) -> NcclFacts | None:
    """Facts of a log file; None if missing. Truncated lines and other encodings are harmless."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return parse(file)
    except OSError:
        return None


def log_of_process(environment: Mapping[str, str], pid: int) -> Path | None:
    """Log of NCCL_DEBUG_FILE, as the launcher names it (`nccl.%h.%p.log`), of a process of this machine; None if unset
    or missing."""
    named = Path(environment.get("NCCL_DEBUG_FILE", ""))
    folder = Path(named.parent.as_posix().replace("%%", "%"))
    return next(folder.glob(named.name.replace("%h", "*").replace("%p", str(pid))), None) if named.name else None


def _note(facts: NcclFacts, told: Mapping[str, str]) -> None:
    facts.version = told.get("version", facts.version)
    facts.nvls_channels = max(facts.nvls_channels, int(told.get("channels", 0)))
    facts.collnet_connected |= "collnet" in told
    for kind in REGISTERED & told.keys():
        entry = facts.registered.setdefault(kind, {"count": 0, "bytes": 0})
        entry["count"], entry["bytes"] = entry["count"] + 1, entry["bytes"] + int(told[kind])
    if "kind" in told:
        of_kernel = f"symmetric {told['kernel']}" if "kernel" in told else "copy engine"
        name = f"{told['algo']}/{told['proto']}".upper() if "algo" in told else of_kernel
        ran = facts.choices.setdefault(told["kind"], [])
        ran += [name] * (name not in ran)


REGISTERED = {"user", "symmetric"}
_POINTER = r"(?:0x)?[0-9a-fA-F]+"
_PATTERNS = [
    (marker, re.compile(pattern))
    for marker, pattern in (  # the longest logs are of the first
        (
            "-> Algo",
            r"(?P<kind>\w+): \d+ Bytes -> Algo (?P<algo>[A-Za-z]\w*) proto (?P<proto>\w+) channel\{Lo\.\.Hi\}=",
        ),
        ("[Symmetric]", r"(?P<kind>\w+) \[Symmetric\]: \d+ Bytes -> Kernel (?P<kernel>\w+)"),
        ("[Copy Engine]", r"(?P<kind>\w+) \[Copy Engine\]: \d+ Bytes"),
        ("register", rf"register comm {_POINTER} buffer {_POINTER} size (?P<user>\d+)"),
        ("Segment size", r"Segment \d+, Type : \d+, numSegments : \d+, Segment size : (?P<symmetric>\d+)"),
        ("coll channels", r"coll channels, (?:\d+ collnet channels, )?(?P<channels>\d+) nvls channels"),
        ("CollNet", r"(?P<collnet>Connected CollNet|CollNet \d+/\d+ : .* via COLLNET/)"),
        ("NCCL version", r"NCCL version (?P<version>\S+)"),
    )
]


NO_NCCL = "{backend} has no user buffers and no reductions inside the network"


def without_effect(config: Config, backend: str) -> str | None:
    asked = []
    if config.nccl_ub.mode is not Registration.none:
        asked.append(f"nccl_ub={config.nccl_ub.mode.name}")
    if config.sharp.group.is_asked:
        asked.append(f"sharp={config.sharp.group.name}")
    if backend == "nccl" or not asked:
        return None
    return f"{' and '.join(asked)}: requested, not effective: {NO_NCCL.format(backend=backend)}"


def record(
    config: Config, backend: str, user_buffers: Mapping[str, str], log: NcclFacts | None
) -> dict[str, dict[str, Any]]:
    """requested, effective and reason of `nccl_ub` and `sharp`; on NCCL also facts of its log.

    Args: backend: of the default group: nccl or gloo. user_buffers: the engine's report on registration; may be empty.
    log: of this rank, or None.
    """
    buffers, sharp = _user_buffers(config, backend, user_buffers, log), _sharp(config, backend, log)
    return {"nccl_ub": buffers, "sharp": sharp, **({"nccl": log.plain()} if log is not None else {})}


def _entry(requested: str, effective: str, reason: str = "") -> dict[str, Any]:
    return {"requested": requested, "effective": effective} | ({"reason": reason} if reason else {})


def _user_buffers(config: Config, backend: str, engine: Mapping[str, str], log: NcclFacts | None) -> dict[str, Any]:
    requested = config.nccl_ub.mode.value
    if requested == "none":
        return _entry("none", "none")
    if backend != "nccl":
        return _entry(requested, "none", NO_NCCL.format(backend=backend))
    if not engine:
        return _entry(requested, "none", f"engine={config.engine.name.name} registers nothing")
    entry = _entry(requested, engine["effective"], engine.get("reason", ""))
    return entry | ({"kernels": _kernels(log)} if log is not None and entry["effective"] != "none" else {})


def _kernels(log: NcclFacts) -> str:
    if not log.choices:
        return "not told; launch.nccl_log=choices has NCCL tell"
    special = sorted(name for name in log.ran if name.startswith(("symmetric", "copy engine")))
    return ", ".join(special) or "none symmetric: " + ", ".join(sorted(log.ran))


def _sharp(config: Config, backend: str, log: NcclFacts | None) -> dict[str, Any]:
    sharp = config.sharp
    if sharp.group is SharpAxis.none:
        found = _found(log) if log is not None else []
        return _entry("none", "+".join(found) or "none", "NCCL's log shows it all the same" if found else "")
    is_left = sharp.group is SharpAxis.default
    asked = (("nvlink", sharp.nvlink), ("infiniband", sharp.infiniband))
    wanted = [] if is_left else [kind for kind, is_asked in asked if is_asked]
    requested = "default" if is_left else f"{sharp.group.value}: {'+'.join(wanted)}"
    if backend != "nccl":
        return _entry(requested, "none", "" if is_left else NO_NCCL.format(backend=backend))
    if log is None:
        kept = config.launch.nccl_log is not NcclLog.none
        no_log = "NCCL left no log" if kept else "launch.nccl_log=none keeps no log to read it from"
        return _entry(requested, "unknown", no_log)
    found = _found(log)
    missing = [WHY_MISSING[kind] for kind in wanted if kind not in found]
    entry = _entry(requested, "+".join(found) or "none", "; ".join(missing))
    return entry | ({"ran": sorted(log.ran)} if log.choices else {})


def _found(log: NcclFacts) -> list[str]:
    kinds = {"nvlink": log.nvls_channels > 0, "infiniband": log.collnet_connected}
    return [kind for kind, there in kinds.items() if there]


WHY_MISSING = {
    "nvlink": "nvlink: no channels; one device a machine, or no NVLink switch",
    "infiniband": "infiniband: no communicator connected CollNet; NCCL's log says why",
}


LIBRARY = "libnccl.so.2"


def loaded_version() -> str | None:
    """Version of the loaded NCCL; None without one, or if torch is statically linked."""
    try:
        library = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    code = ctypes.c_int(0)
    return version_of(code.value) if library.ncclGetVersion(ctypes.byref(code)) == 0 else None


def version_of(code: int) -> str:
    """From NCCL's number: 10,000 a major version, 100 a minor one."""
    return f"{code // 10_000}.{code // 100 % 100}.{code % 100}"


def version_facts() -> dict[str, str | None]:
    """`nccl`: the loaded version, or else that of torch's build; `nccl_built`: that of the build. None without NCCL."""
    if not torch.cuda.is_available():
        return {"nccl": None, "nccl_built": None}
    built = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    return {"nccl": loaded_version() or built, "nccl_built": built}
