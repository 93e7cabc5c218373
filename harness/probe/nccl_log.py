"""Facts from NCCL's INFO log. No torch here.

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

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
