"""Secrets are never written down: what looks like one is replaced, in every text that `files.write_atomic` writes.

A secret is the value of an environment variable whose name says so, an assignment to such a name, a password within an
address, or a text in the form of a well-known service's keys. Settings that hold one are refused before that
(`harness.config.rules.launch`): a frozen configuration is the truth, and must not be changed on its way to the disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "<redacted>"

LEAST = 8
"""Characters from which on the value of a variable is searched for: `0` and `true` stand everywhere."""

_TELLING = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
"""What the name of a variable holds whose value is nobody's business."""

_ASSIGNED = (
    re.compile(r"((?:KEY|TOKEN|SECRET|PASSWORD)[A-Z0-9_]*=['\"]?)(?=\S*[a-z0-9])[^\s'\"$,;(){}<\[][^\s'\",;(){}]{3,}"),
    re.compile(r"((?:KEY|TOKEN)[A-Z0-9_]*['\"]?\s*[=:]\s*['\"])(?=[^'\"]*\d)[^'\"\s$<]{8,}(?=['\"])"),
    re.compile(r"(?i)((?:secret|password)\w*['\"]?\s*[=:]\s*['\"])[^'\"\s$<]{4,}(?=['\"])"),
    re.compile(r"(?i)((?:api_?key|token)\w*['\"]?\s*[=:]\s*['\"])(?=[^'\"]*\d)[^'\"\s$<]{16,}(?=['\"])"),
    re.compile(r"(://[^\s/:@'\"]*:)[^\s/@'\"]+(?=@)"),
    re.compile(r"()(?:AKIA[0-9A-Z]{16}|gh[pousr]_\w{20,}|hf_\w{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,})"),
    re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|\Z)", re.DOTALL),
)
"""Each keeps its first group."""


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` with every secret replaced by `HIDDEN`; the same text where it holds none."""
    for value in secrets_of(environment).values():
        text = text.replace(value, HIDDEN)
    for pattern in _ASSIGNED:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that hold a secret, the longest value first; a path to one is none."""
    found = {
        name: value
        for name, value in environment.items()
        if len(value) >= LEAST and not value.startswith("/") and _TELLING.search(name)
    }
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))
