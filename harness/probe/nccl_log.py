"""Facts from NCCL's INFO log. No torch here.

Lines are those of NCCL 2.21 to 2.31 (`src/init.cc`, `enqueue.cc`, `ce_coll.cc`, `scheduler/symmetric_sched.cc`,
`transport/{nvls,coll_net,p2p,net}.cc`, `register/register.cc`). Which subsystem prints what:

| read back                                 | NCCL_DEBUG_SUBSYS |
|-------------------------------------------|-------------------|
| version, channels, NVLS and CollNet set up| INIT, NET         |
| registrations, and failed ones            | REG (NVLS before 2.24) |
| algorithm, protocol or kernel of each collective | TUNING, on rank 0 of each communicator alone |

[Note: Channels that prove nothing] "16 collnet channels" is printed with the number of ordinary channels whether or not
CollNet is there. That it is, "Connected CollNet" and "via COLLNET/SHARP" say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")

MAX_WARNINGS = 20


@dataclass
class Registered:
    count: int = 0
    bytes: int = 0
    failed: int = 0


@dataclass
class NcclFacts:
    """Facts of a log; missing ones are None, False or empty."""

    version: str | None = None
    """NCCL with its CUDA: "2.28.9+cuda12.9"."""
    nvls_channels: int = 0
    """Most NVLink SHARP channels of a communicator; 0 if unused."""
    nvls_available: bool | None = None
    collnet_plugin: str | None = None
    """Collective part of the network plugin; loading it connects nothing."""
    collnet_connected: bool = False
    """True if a communicator owns InfiniBand SHARP; see [Note: Channels that prove nothing]."""
    collnet_refused: str | None = None
    registered: dict[str, Registered] = field(default_factory=dict)
    """Registrations by kind: user (asked for), symmetric, nvls, collnet, net, ipc."""
    choices: dict[str, list[str]] = field(default_factory=dict)
    """By kind of collective what ran it: an algorithm and protocol, a symmetric kernel, or the copy engines."""
    warnings: list[str] = field(default_factory=list)

    @property
    def ran(self) -> set[str]:
        return {name for by in self.choices.values() for name in by}

    @property
    def tells_choices(self) -> bool:
        return bool(self.choices)

    def plain(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, {}, [])}


def parse(lines: Iterable[str]) -> NcclFacts:
    facts = NcclFacts()
    for line in lines:
        _read(facts, line)
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


def _read(facts: NcclFacts, line: str) -> None:
    _, level, text = line.partition("NCCL WARN ")
    if level:
        if len(facts.warnings) < MAX_WARNINGS:
            facts.warnings.append(text.strip())
        line = text
    for marker, what, pattern in _PATTERNS:
        if marker in line and (match := pattern.search(line)):
            _note(facts, what, match)
            return


def _note(facts: NcclFacts, what: str, match: re.Match[str]) -> None:
    told = match.groupdict()
    if what == "ran":
        name, kind = _ran(told), told.get("kind", "(any)")
        if name and name not in facts.choices.get(kind, ()):
            facts.choices.setdefault(kind, []).append(name)
    elif what == "nvls_channels":
        facts.nvls_channels = max(facts.nvls_channels, int(match[1] or 0))
    elif what == "collnet_refused":
        facts.collnet_refused = facts.collnet_refused or match[0].strip()
    elif what in ("version", "collnet_plugin"):
        setattr(facts, what, match[1])
    elif what in ("nvls_available", "collnet_connected"):  # a group of the pattern is a "not"
        setattr(facts, what, match.lastindex is None)
    else:  # a kind of registration, with sizes unless it failed
        entry = facts.registered.setdefault(what, Registered())
        entry.failed += not match.groups()
        entry.count += bool(match.groups())
        entry.bytes += sum(int(size) for size in match.groups() if size)


def _ran(told: Mapping[str, str | None]) -> str:
    """Name of what ran a collective; empty for an unknown number."""
    if "kernel" in told:
        return f"symmetric {told['kernel']}"
    if "hierarchical" in told:
        return "copy engine" + " over the network" * bool(told["hierarchical"])
    algo, proto = str(told["algo"]), str(told["proto"])
    if not algo.isdigit():
        return f"{algo.upper()}/{proto.upper()}"
    known = int(algo) < len(ALGORITHMS) and int(proto) < len(PROTOCOLS)
    return f"{ALGORITHMS[int(algo)]}/{PROTOCOLS[int(proto)]}" if known else ""


_POINTER = r"(?:0x)?[0-9a-fA-F]+"
_CHOSEN = r"(?P<kind>\w+): \d+ Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+) channel\{Lo\.\.Hi\}=\{\d+\.\.\d+\}"
_BY_NUMBER = r"\d+ Bytes -> Algo (?P<algo>\d+) proto (?P<proto>\d+)"
_COPIED = r"(?P<kind>\w+) \[(?:Copy Engine|(?P<hierarchical>Hierarchical CE))\]: \d+ Bytes"
_REFUSED = r"(?:SHARP coll init error: .*|Cannot create SHARP job.*|sharp_create_job failed.*)"
_PATTERNS = [
    (marker, what, re.compile(pattern))
    for marker, what, pattern in (
        ("-> Algo", "ran", _CHOSEN),  # the longest logs are of these: first
        ("-> Algo", "ran", _BY_NUMBER),
        ("[Symmetric]", "ran", r"(?P<kind>\w+) \[Symmetric\]: \d+ Bytes -> Kernel (?P<kernel>\w+)"),
        ("Bytes -> ", "ran", _COPIED),
        ("register", "user", rf"register comm {_POINTER} buffer {_POINTER} size (\d+)"),
        ("NVLS", "nvls", r"successfully registered NVLS sendbuff.*?sendbuff size (\d+), recvbuff size (\d+)"),
        ("NVLS", "nvls", r"failed to NVLS register"),
        ("multicast-bind", "nvls", r"Failed to multicast-bind user buffer"),
        ("COLLNET", "collnet", r"COLLNET register userbuff .*?buffSize (\d+)"),
        ("COLLNET", "collnet", r"COLLNET failed to register"),
        ("NET register", "net", r"- NET register userbuff .*?buffSize (\d+)"),
        ("NET register", "net", r"failed to NET register"),
        ("IPC register", "ipc", r"- IPC register(?:ing)? buffer .*?size (\d+)"),
        ("IPC register", "ipc", r"failed to IPC register"),
        ("Segment size", "symmetric", r"Segment \d+, Type : \d+, numSegments : \d+, Segment size : (\d+)"),
        ("coll channels", "nvls_channels", r"coll channels, (?:\d+ collnet channels, )?(?:(\d+) nvls channels)?"),
        ("NVLS multicast", "nvls_available", r"NVLS multicast support is (not )?available"),
        ("collnet plugin", "collnet_plugin", r"Loaded coll(?:net|Net) plugin (.+?)(?: \(v\d+\))?$"),
        ("CollNet", "collnet_connected", r"Connected CollNet|CollNet \d+/\d+ : .* via COLLNET/"),
        ("CollNet node threshold", "collnet_refused", r"Communicator has \d+ nodes which is less than CollNet node.*"),
        ("SHARP", "collnet_refused", _REFUSED),
        ("NCCL version", "version", r"NCCL version (\S+)"),
    )
]
