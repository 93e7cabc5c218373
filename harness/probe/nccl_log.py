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
from collections.abc import Callable, Iterable, Mapping
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
    """Log of NCCL_DEBUG_FILE for a process of this machine; None if unset or missing."""
    named = environment.get("NCCL_DEBUG_FILE")
    if not named:
        return None
    pattern = "".join(_expanded(part, pid) for part in re.split(r"(%.)", Path(named).name))
    folder = Path(Path(named).parent.as_posix().replace("%%", "%"))
    found = sorted(path for path in folder.glob("*") if re.fullmatch(pattern, path.name))
    return found[0] if found else None


def _expanded(part: str, pid: int) -> str:
    return {"%h": "[^/]*", "%p": str(pid), "%%": "%"}.get(part, re.escape(part))


Reader = Callable[[NcclFacts, re.Match[str]], None]


def _read(facts: NcclFacts, line: str) -> None:
    _, level, text = line.partition("NCCL WARN ")
    if level:
        if len(facts.warnings) < MAX_WARNINGS:
            facts.warnings.append(text.strip())
        line = text
    for marker, pattern, reader in _READERS:
        if marker in line and (match := pattern.search(line)):
            reader(facts, match)
            return


def _fields(facts: NcclFacts, match: re.Match[str]) -> None:
    """Set the fields that groups of the pattern are named by."""
    for name, value in match.groupdict().items():
        setattr(facts, name, value)


def _flag(name: str) -> Reader:
    """Set a field to False where the pattern's group `not` has found something, else to True."""

    def note(facts: NcclFacts, match: re.Match[str]) -> None:
        setattr(facts, name, match.groupdict().get("not") is None)

    return note


def _channels(facts: NcclFacts, match: re.Match[str]) -> None:
    facts.nvls_channels = max(facts.nvls_channels, int(match["nvls"] or 0))


def _refused(facts: NcclFacts, match: re.Match[str]) -> None:
    facts.collnet_refused = facts.collnet_refused or match[0].strip()


def _registered(kind: str, *, failed: bool = False) -> Reader:
    def note(facts: NcclFacts, match: re.Match[str]) -> None:
        entry = facts.registered.setdefault(kind, Registered())
        if failed:
            entry.failed += 1
        else:
            entry.count += 1
            entry.bytes += sum(int(size) for size in match.groups() if size)

    return note


def _chose(by: Callable[[re.Match[str]], str]) -> Reader:
    """Note what ran a kind of collective. Args: by: its name, from the match; empty for none that is known."""

    def note(facts: NcclFacts, match: re.Match[str]) -> None:
        name, kind = by(match), match.groupdict().get("kind", "(any)")
        if name and name not in facts.choices.get(kind, ()):
            facts.choices.setdefault(kind, []).append(name)

    return note


def _numbered(match: re.Match[str]) -> str:
    algo, proto = int(match["algo"]), int(match["proto"])
    return f"{ALGORITHMS[algo]}/{PROTOCOLS[proto]}" if algo < len(ALGORITHMS) and proto < len(PROTOCOLS) else ""


_algorithm = _chose(lambda match: f"{match['algo'].upper()}/{match['proto'].upper()}")
_numbered_algorithm = _chose(_numbered)
_symmetric_kernel = _chose(lambda match: f"symmetric {match['kernel']}")
_copy_engine = _chose(lambda match: "copy engine" + " over the network" * bool(match["hierarchical"]))

_POINTER = r"(?:0x)?[0-9a-fA-F]+"
_READERS: tuple[tuple[str, re.Pattern[str], Reader], ...] = tuple(
    (marker, re.compile(pattern), reader)
    for marker, pattern, reader in (
        # the longest logs are of these: first
        (
            "-> Algo",
            r"(?P<kind>\w+): \d+ Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+) channel\{Lo\.\.Hi\}=\{\d+\.\.\d+\}",
            _algorithm,
        ),
        ("-> Algo", r"\d+ Bytes -> Algo (?P<algo>\d+) proto (?P<proto>\d+)", _numbered_algorithm),
        ("[Symmetric]", r"(?P<kind>\w+) \[Symmetric\]: \d+ Bytes -> Kernel (?P<kernel>\w+)", _symmetric_kernel),
        (
            "Bytes -> ",
            r"(?P<kind>\w+) \[(?:Copy Engine|(?P<hierarchical>Hierarchical CE))\]: \d+ Bytes",
            _copy_engine,
        ),
        ("register", rf"register comm {_POINTER} buffer {_POINTER} size (\d+)", _registered("user")),
        (
            "NVLS",
            r"successfully registered NVLS sendbuff.*?sendbuff size (\d+), recvbuff size (\d+)",
            _registered("nvls"),
        ),
        ("NVLS", r"failed to NVLS register", _registered("nvls", failed=True)),
        ("multicast-bind", r"Failed to multicast-bind user buffer", _registered("nvls", failed=True)),
        ("COLLNET", r"COLLNET register userbuff .*?buffSize (\d+)", _registered("collnet")),
        ("COLLNET", r"COLLNET failed to register", _registered("collnet", failed=True)),
        ("NET register", r"- NET register userbuff .*?buffSize (\d+)", _registered("net")),
        ("NET register", r"failed to NET register", _registered("net", failed=True)),
        ("IPC register", r"- IPC register(?:ing)? buffer .*?size (\d+)", _registered("ipc")),
        ("IPC register", r"failed to IPC register", _registered("ipc", failed=True)),
        ("Segment size", r"Segment \d+, Type : \d+, numSegments : \d+, Segment size : (\d+)", _registered("symmetric")),
        ("coll channels", r"coll channels, (?:\d+ collnet channels, )?(?:(?P<nvls>\d+) nvls channels)?", _channels),
        ("NVLS multicast", r"NVLS multicast support is (?P<not>not )?available", _flag("nvls_available")),
        ("collnet plugin", r"Loaded coll(?:net|Net) plugin (?P<collnet_plugin>.+?)(?: \(v\d+\))?$", _fields),
        ("CollNet", r"Connected CollNet|CollNet \d+/\d+ : .* via COLLNET/", _flag("collnet_connected")),
        ("CollNet node threshold", r"Communicator has \d+ nodes which is less than CollNet node threshold.*", _refused),
        ("SHARP", r"(?:SHARP coll init error: .*|Cannot create SHARP job.*|sharp_create_job failed.*)", _refused),
        ("NCCL version", r"NCCL version (?P<version>\S+)", _fields),
    )
)
