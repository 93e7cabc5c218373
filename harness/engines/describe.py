"""`python -m harness.engines.describe package.module:Class`: an adapter's declarations as JSON, or its faults.

Run by the front end (`harness.config.adapter`), which never loads torch itself. Exit code 0 for a usable adapter.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from harness.config.adapter import to_plain
from harness.config.capabilities import Capabilities
from harness.engines.protocol import Engine
from harness.store.provenance import PACKAGE


class Unusable(Exception):
    """Fault of an engine class: a clause about it, valid alternatives, and a remedy."""

    def __init__(self, problem: str, *, choices: str = "", fix: str = "") -> None:
        super().__init__(problem)
        self.told = {"problem": problem, "choices": choices, "fix": fix}


def main(adapter: str) -> int:
    try:
        with redirect_stdout(sys.stderr):
            told = described(adapter)
    except Unusable as error:
        print(json.dumps(error.told))
        return 1
    print(json.dumps(told))
    return 0


def described(adapter: str) -> dict[str, Any]:
    """Capabilities, import folder, and sources of an adapter.

    Raises `Unusable`: the module or class is missing, or is not a complete engine.
    """
    name, _, attribute = adapter.partition(":")
    module = imported(name)
    found = getattr(module, attribute, None)
    if found is None:
        raise Unusable(f"{name} has no {attribute}", choices=_engines(module), fix=nearest(module, attribute))
    if not (inspect.isclass(found) and issubclass(found, Engine)):
        fix = f"class {attribute}(harness.engines.protocol.Engine)"
        raise Unusable("is no harness.engines.protocol.Engine", choices=_engines(module), fix=fix)
    if inspect.isabstract(found):
        missing = ", ".join(method for method in vars(Engine) if method in found.__abstractmethods__)
        raise Unusable(f"lacks {missing}", fix="write what is missing; harness/engines/protocol.py says what each does")
    declared = getattr(found, "capabilities", None)
    if not isinstance(declared, Capabilities) or not declared.strategies:
        raise Unusable(
            "declares no capabilities: what it can do is not known before ranks start",
            choices="an attribute of the class, of type harness.config.capabilities.Capabilities",
            fix="capabilities = Capabilities(strategies=(Strategy.no_shard,))",
        )
    root, files = sources(module)
    return {"capabilities": to_plain(declared), "root": str(root), "files": files}


def imported(name: str) -> Any:
    """Raises `Unusable`: no module of this name, or its import fails."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            fix = f"start from the folder {error.name}.py lies in, or put that folder on PYTHONPATH"
            raise Unusable(f"there is no module {error.name} here ({Path.cwd()}) or installed", fix=fix) from error
        raise Unusable(f"importing {name} failed: {where(error)}", fix=f"install {error.name}") from error
    except BaseException as error:  # also SystemExit: a script without a main guard
        raise Unusable(f"importing {name} failed: {where(error)}", fix=f"python -c 'import {name}'") from error


def where(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f", {frames[-1].filename}:{frames[-1].lineno}" if frames and frames[-1].filename != __file__ else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f", {error.filename}:{error.lineno}"
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}{place}"


def _engines(module: Any) -> str:
    found = [n for n, value in vars(module).items() if inspect.isclass(value) and issubclass(value, Engine)]
    return ", ".join(name for name in found if name != Engine.__name__) or "no Engine in this module"


def nearest(module: Any, attribute: str, setting: str = "engine.adapter") -> str:
    names = [n for n in vars(module) if not n.startswith("_") and n != attribute]
    near = difflib.get_close_matches(attribute, names, n=1)
    return f"{setting}={module.__name__}:{near[0]}" if near else ""


def sources(module: Any) -> tuple[Path, list[str]]:
    """Import root, and loaded sources of the adapter's package (or folder, without a package)."""
    depth = module.__name__.count(".") + (1 if hasattr(module, "__path__") else 0)
    root = Path(module.__file__).resolve().parents[depth]
    folder = root / module.__name__.partition(".")[0] if depth else root
    told = [Path(getattr(m, "__file__", None) or "") for m in list(sys.modules.values())]
    loaded = {path.resolve() for path in told if path.is_absolute()}  # torch.ops says "_ops.py", and is no file
    own = [path for path in loaded if path.is_relative_to(folder) and not path.is_relative_to(PACKAGE)]
    foreign = "site-packages" if "site-packages" not in folder.parts else None
    named = [path.relative_to(root) for path in own if foreign not in path.parts]
    if folder.name == "site-packages":  # one installed file among others
        named = [Path(module.__file__).resolve().relative_to(root)]
    return root, sorted(path.as_posix() for path in named)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
