"""Check of the interpreter, before any other import of ours.

Pythons from 3.6 on must be able to parse this file, and `run.py` and `harness/command.py` up to their call of it.
"""

import gc
import importlib.util
import shlex
import sys

OLDEST = (3, 11)
NEEDED = ("hydra", "omegaconf", "submitit", "jinja2", "numpy", "psutil", "pydantic", "safetensors", "scipy", "xxhash")
USUAL, RARELY = gc.get_threshold(), 50000
"""New objects until circles are looked for. A command makes many objects and few circles: it saves 5 % of its time."""
REMEDY = "activate the environment that `make install` made, or `pip install` this package"


def require() -> None:
    """End the process with exit code 2 and one line if this interpreter is too old or lacks a dependency."""
    lack = lacking()
    if lack:
        print(f"bad request: {shlex.quote(sys.executable)} {lack}; {REMEDY}", file=sys.stderr)
        sys.exit(2)


def lacking() -> str:
    if sys.version_info < OLDEST:
        return f"is Python {sys.version.split()[0]}, and 3.11 is the oldest that can be used"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"lacks {missing[0]}" if missing else ""
