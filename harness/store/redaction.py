"""Removal of secrets from every text that `files.write_atomic` writes.

A secret is the value of an environment variable with a telling name, an assignment to such a name, a password within an
address, or a text in the form of a well-known service's keys. Settings that hold one are refused before
(`harness.config.rules.running`), because a frozen configuration must not change.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from urllib.parse import quote

HIDDEN = "<redacted>"
LEAST = 8
"""Least characters of a variable's value that is searched for: `0` and `true` stand everywhere."""
LONG = 10_000
"""Characters from which on a text is searched once only."""
_TELLING = re.compile(
    r"KEY|TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|COOKIE|WEBHOOK|JWT|(?:^|_|PG)PASS(?:_|$)|_PAT$|_AUTH(?:_|$)",
    re.IGNORECASE,
)
"""Parts of the names of secret variables."""
_NAME = r"(?:pass(?:word|wd|phrase)|secret|credential|(?:api|access|account|auth|private)[_-]?(?:key|token))"
"""Part of a name, in any case, whose value is always hidden."""
_TOKEN = r"(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token(?![\w-])"
"""Names with tokens of models."""
_ON = r"(?:[\s(\\]|(?<=\n)[+-])*"
"""Continuation of a value, also in the next line, which a diff begins with a sign."""
_TYPES = r"(?!(?:str|bytes|int|object|Any|None|null|true|false|\w*Str|\w*Token)\s*$)"
"""Types and constants after the colon of a declaration."""
_ASSIGNED = tuple(
    re.compile(pattern)
    for pattern in (
        r"((?:KEY|TOKEN|SECRET|PASSWORD|_PASS)[A-Z0-9_]*=['\"]?)(?=\S*[a-z0-9])[^\s'\"$,;(){}<\[][^\s'\",;(){}]{3,}",
        r"((?:KEY|TOKEN)[A-Z0-9_]*['\"]?\s*[=:]\s*['\"])(?=[^'\"]*\d)[^'\"\s$<]{8,}(?=['\"])",
        rf"((?:_KEY|TOKEN|SECRET|PASSWORD)['\"]\]?\s*[=:,]{_ON}['\"])(?![A-Z_]+['\"])[^'\"\s$<{{]{{6,}}(?=['\"])",
        rf"(?i)({_NAME}[\w-]*['\"]?\s*[=:]{_ON}['\"])[^'\"\n$<{{]{{4,}}(?=['\"])",
        rf"(?i)({_TOKEN}['\"]?\s*[=:]{_ON}['\"])[^'\"\s$<{{\[]{{8,}}(?=['\"])",
        r"(?i)(\bkey\s*[=:]\s*['\"])[0-9a-f]{32,}(?=['\"])",
        r"(?i)((?:secret|passw\w+|passphrase)[\w-]*\s*[=:]\s*)(?=\S*\d)[^\s'\"$<(){},;.\[\]]{6,}(?=\s|$)",
        r"(?i)((?:api[_-]?key|token)\s*[=:]\s*)(?=\S*\d)[\w+/=~-]{16,}",
        rf"(?im)^([+\- ]?\s*(?:- |export |set )?[\w.-]*(?:{_NAME}[\w-]*|{_TOKEN})(?::[ \t]+|=)){_TYPES}"
        r"(?![\w.]*(?:password|secret|token)$)[^\s'\"$<(){}\[\],;|>]{6,}(?=\s*$)",
        rf"(?im)^([+\- ]?\s*[\w.-]*(?:{_NAME}[\w-]*|{_TOKEN}):[ \t]*[|>][+-]?[ \t]*\n[+\- ]?\s+)\S.*$",
        r"(?i)(\bAccountKey=)[\w+/=]{8,}",
        r"(?i)(--?(?:password|token|api-key)[ =]|\blogin\s+\S+\s+password\s+|\bwandb login\s+)[^\s'\"$<-][^\s'\"]{7,}",
        r"(?i)(\bauthorization['\"]?\s*[=:,]\s*['\"]?(?:bearer|basic|digest|token)\s+)[^\s'\"$<{%]{6,}",
        r"(?i)(\bbearer\s+)(?=\S*\d)[\w.~+/=-]{12,}",
        r"(://[^\s/:@'\"]*:)[^\s/@'\"]+(?=@)",
        r"(://)(?=[^\s/:@]*\d)[\w.-]{16,}(?=:?@)",
        r"()(?:(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{20,}"
        r"|npm_\w{30,}|pypi-[\w-]{16,}|sk-[\w-]{20,}|[rs]k_live_\w{12,}|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{10,}"
        r"|wandb_v\d_\w{20,}|ya29\.[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{12,}"
        r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]+)?)",
        r"(hooks\.slack\.com/services/)[\w/]+",
        r"(?s)(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|\Z)",
        r"(?m)^([+\- ]?)(?=\S*[a-z])(?=\S*[A-Z])(?=\S*\d)[A-Za-z0-9+/]{60,76}={0,2}$",
        r"(?m)^([+\- ]?)[A-Za-z0-9+/]{8,76}={0,2}$(?=\n[+\- ]?-----END [A-Z ]*PRIVATE KEY)",
    )
)
"""Patterns that keep their first group."""


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    return redactor(environment)(text)


def redactor(environment: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """`redacted` for many texts: the environment is read once."""
    values = tuple(dict.fromkeys(form for value in _secrets_of(environment) for form in _forms(value)))
    return lambda text: _kept(text, values) if len(text) > LONG else _without(text, values)


def _forms(value: str) -> Iterator[str]:
    yield value
    yield from (json.dumps(value)[1:-1], quote(value, safe=""))
    if "\n" in value:
        yield from (line for line in value.splitlines() if len(line.strip()) >= LEAST)


def _without(text: str, values: tuple[str, ...]) -> str:
    for value in values:
        text = text.replace(value, HIDDEN)
    for pattern in _ASSIGNED:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


_kept = lru_cache(maxsize=4)(_without)


def _secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Values of variables that hold a secret of `LEAST` characters, the longest first; paths are none."""
    found = [
        value
        for name, value in environment.items()
        if len(value) >= LEAST and _TELLING.search(name) and not (_is_path(name, value) or _is_count(name, value))
    ]
    return sorted(found, key=len, reverse=True)


def _is_count(name: str, value: str) -> bool:
    """True for counts (`MAX_TOKENS=20000000`), whose value may occur as a number in any record."""
    return value.isdecimal() and bool(re.search(r"(?:TOKEN|KEY)S(?:_|$)", name, re.IGNORECASE))


def _is_path(name: str, value: str) -> bool:
    """True for paths. Keys in base 64 may begin with a slash, too."""
    return "/" in value and bool(re.search(r"_(?:FILE|PATH|DIR|HOME)$", name, re.IGNORECASE) or os.path.lexists(value))
