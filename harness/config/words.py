"""Words of a printed command line, quoted for a shell and for Hydra's grammar."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from harness.store import commands
from harness.store.study import asked

_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*|\.{1,2}(/[\w./-]*)?", re.ASCII)

SPECIAL = ("null", "true", "false", "yes", "no", "on", "off", "nan", "inf")


def quote(value: str) -> str:
    escaped = re.sub(r"(\\*)'", r"\1\1\'", value)  # backslashes count only before a quote, the closing one too
    escaped = re.sub(r"(\\+)\Z", r"\1\1", escaped)
    return f"'{escaped}'"


def as_word(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{as_word(key)}:{as_word(each)}' for key, each in value.items())}}}"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in SPECIAL else quote(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def setting(key: str, value: object) -> str:
    return shlex.quote(f"{key}={as_word(value)}")


def ask_again(root: Path | str, study: str, *more: str) -> str:
    """Command that repeats a study's request in its store.

    Args: more: further words, ready for a shell.

    Raises `StoreError`: the study's record is damaged.
    """
    words, folder = asked(Path(root), study)
    elsewhere = folder if os.path.isdir(folder) and not os.path.samefile(folder, os.curdir) else ""
    there = Path(root).absolute()
    if there != Path(elsewhere).absolute() / commands.USUAL:
        more += (setting("launch.root", str(there if elsewhere else root)),)
    return commands.request(" ".join(["-m", shlex.join(words), *more]), elsewhere)
