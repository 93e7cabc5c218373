"""Check of the interpreter, before any other import of ours.

Pythons from 3.6 on must be able to parse this file, and `run.py` and `harness/command.py` up to their call of it.
"""

import importlib.util
import os
import shlex
import sys

OLDEST = (3, 11)

NEEDED = ("hydra", "omegaconf", "submitit", "jinja2", "numpy", "psutil", "pydantic", "safetensors", "scipy", "xxhash")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def require() -> None:
    """End the process with exit code 2 and one line if this interpreter is too old or lacks a dependency."""
    lack = lacking()
    if lack:
        print(f"bad request: {shlex.quote(sys.executable)} {lack}; type: {remedy()}", file=sys.stderr)
        sys.exit(2)


def lacking() -> str:
    if sys.version_info < OLDEST:
        return f"is Python {sys.version.split()[0]}, and 3.11 is the oldest that can be used"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    more = f" and {len(missing) - 1} more packages" if missing[1:] else ""
    return f"lacks {missing[0]}{more}" if missing else ""


def remedy() -> str:
    here, venv = shlex.quote(ROOT), os.path.join(ROOT, ".venv")
    activate = f". {shlex.quote(os.path.join(venv, 'bin', 'activate'))}"
    if not os.path.exists(os.path.join(ROOT, "Makefile")):
        return f"{shlex.quote(sys.executable)} -m pip install sharding-harness"
    if os.path.abspath(sys.prefix) == venv:
        return f"make -C {here} -B install"
    if os.path.exists(os.path.join(venv, "bin", "activate")):
        return activate
    if sys.version_info >= OLDEST and importlib.util.find_spec("torch"):
        return f"{shlex.quote(sys.executable)} -m pip install -e {here}"
    return f"make -C {here} install && {activate}"
