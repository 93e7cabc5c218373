"""Description of the user's own classes and faults as JSON: imported and tried, or refused.

`python -m harness.worker.describe`, with {"targets": [[kind, setting, name], ...], "config"} on its input, is run by
the front end (`harness.config.own`), which never loads torch itself.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils.data import Dataset

from harness.config.capabilities import Capabilities
from harness.config.schema import Config, OptimizerName
from harness.config.typed import load_config
from harness.engines.optim import Group, make_optimizer
from harness.engines.protocol import Engine
from harness.fsdp import create_state
from harness.store.provenance import PACKAGE
from harness.train.callbacks import Callback

MOST_TRIED = 20_000_000
"""Weights above which a model is not built on the CPU before ranks start."""

SAMPLE = 16

ZEROS = "its entries set to zeros of the weight's shape, as a checkpoint has them before the first step"

WORKLOAD = ("build", "initial_weight", "materialise_buffers", "loss", "decays")
"""Methods of a model's class; `harness.models.workload.TokenWorkload` defines them."""


ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop"}
)
"""torch optimizers whose update of an element depends on that element alone, so that its rows can be stepped."""


class Unusable(Exception):
    """Fault of an engine class: a clause about it, valid alternatives, and a remedy."""

    def __init__(self, problem: str, *, choices: str = "", fix: str = "") -> None:
        super().__init__(problem)
        self.reply = {"problem": problem, "choices": choices, "fix": fix}


def main() -> int:
    """Print a JSON object for each class; output of the classes goes to stderr."""
    asked = json.load(sys.stdin)
    for kind, setting, name in asked["targets"]:
        # A fork each: what one class imports is no source of another's, and one that ends the process ends its own.
        if (child := os.fork()) == 0:
            _tell(kind, setting, name, asked["config"])
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            fix = f"python -c 'import {name.partition(':')[0]}'"
            print(json.dumps(Unusable(f"trying it ended the process (exit code {code})", fix=fix).reply), flush=True)
    return 0


def _tell(kind: str, setting: str, name: str, shaping: Mapping[str, Any]) -> NoReturn:
    try:
        with redirect_stdout(sys.stderr):
            reply = described(kind, setting, name, shaping)
    except Unusable as error:
        reply = error.reply
    print(json.dumps(reply), flush=True)
    sys.stderr.flush()
    os._exit(0)


def described(kind: str, setting: str, name: str, shaping: Mapping[str, Any]) -> dict[str, Any]:
    """Description of a class with its import folder and sources.

    Raises `Unusable`: the module or class is missing, or does not fit its kind.
    """
    module = imported(name.partition(":")[0])
    attribute = name.partition(":")[2]
    found = getattr(module, attribute, None)
    wanted = inspect.isfunction if kind == "fault" else inspect.isclass
    if not wanted(found):
        what = "has no" if found is None else "has no function" if kind == "fault" else "has no class"
        own = [n for n, value in vars(module).items() if wanted(value) and value.__module__ == module.__name__]
        near = difflib.get_close_matches(attribute, own, n=1)
        fix = f"{setting}={module.__name__}:{near[0]}" if near else ""
        raise Unusable(f"{module.__name__} {what} {attribute}", choices=", ".join(own), fix=fix)
    with trying("trying it"):
        answer = TRIALS[kind](found, load_config(shaping))
    root, files = sources(module)
    return {"answer": answer, "root": str(root), "files": files}


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


def sources(module: Any) -> tuple[Path, list[str]]:
    """Import root, and loaded sources of the adapter's package (or folder, without a package)."""
    depth = module.__name__.count(".") + (1 if hasattr(module, "__path__") else 0)
    root = Path(module.__file__).resolve().parents[depth]
    folder = root / module.__name__.partition(".")[0] if depth else root
    sources = [Path(getattr(m, "__file__", None) or "") for m in list(sys.modules.values())]
    loaded = {path.resolve() for path in sources if path.is_absolute()}  # torch.ops says "_ops.py", and is no file
    own = [path for path in loaded if path.is_relative_to(folder) and not path.is_relative_to(PACKAGE)]
    foreign = "site-packages" if "site-packages" not in folder.parts else None
    named = [path.relative_to(root) for path in own if foreign not in path.parts]
    if folder.name == "site-packages":  # one installed file among others
        named = [Path(module.__file__).resolve().relative_to(root)]
    return root, sorted(path.as_posix() for path in named)


@contextmanager
def trying(what: str) -> Iterator[None]:
    """Raises `Unusable`, with one sentence and its place, for any error of the user's code."""
    try:
        yield
    except Unusable:
        raise
    except Exception as error:
        raise Unusable(f"{what} failed: {where(error)}") from error


def _check_base(kind: type, base: type) -> dict[str, Any]:
    if not issubclass(kind, base):
        name = f"{base.__module__}.{base.__name__}"
        raise Unusable(f"is no {name}", fix=f"class {kind.__name__}({name})")
    return {}


def try_engine(kind: type, config: Config) -> dict[str, Any]:
    _check_base(kind, Engine)
    if missing := ", ".join(each for each in vars(Engine) if each in getattr(kind, "__abstractmethods__", ())):
        raise Unusable(f"lacks {missing}", fix="write what is missing; harness/engines/protocol.py says what each does")
    declared = getattr(kind, "capabilities", None)
    if not isinstance(declared, Capabilities) or not declared.strategies:
        raise Unusable(
            "declares no capabilities: what it can do is not known before ranks start",
            choices="an attribute of the class, of type harness.config.capabilities.Capabilities",
            fix="capabilities = Capabilities(strategies=(Strategy.no_shard,))",
        )
    return {"capabilities": TypeAdapter(Capabilities).dump_python(declared, mode="json")}


def try_model(kind: type, config: Config) -> dict[str, Any]:
    """Build it on the meta device, count its weights, and, unless it is large, compare its buffers on a device."""
    abstract: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())
    asked = (*WORKLOAD, "orthogonalizes") if config.optimizer.name is OptimizerName.muon else WORKLOAD
    missing = [name for name in asked if name in abstract or not hasattr(kind, name)]
    if missing:
        base = "class Mine(harness.models.workload.TokenWorkload)"
        raise Unusable(f"lacks {', '.join(missing)}", choices="what TokenWorkload has", fix=base)
    with trying("making it"):
        workload = kind(config)
        units, _ = workload.unit_classes, workload.may_leave_unused
    with trying("build('meta', torch.float32)"):
        model = workload.build("meta", torch.float32)
        parameters = dict(model.named_parameters())
        _check_built(model, parameters, units)
    count = sum(param.numel() for param in parameters.values())
    if count <= MOST_TRIED:
        _check_buffers(workload, model)
    return {"parameters": count}


def _check_built(model: nn.Module, parameters: Mapping[str, Tensor], units: tuple[type, ...]) -> None:
    for name, tensor in (*parameters.items(), *model.named_buffers()):
        if tensor.device.type != "meta":
            fix = "make it with device=device, so that nothing is allocated where the model is only planned"
            raise Unusable(f"build('meta', ...) puts {name} on the {tensor.device.type}", fix=fix)
    absent = [unit.__name__ for unit in units if not any(isinstance(each, unit) for each in model.modules())]
    if absent:
        found = ", ".join(sorted({type(each).__name__ for each in model.modules()}))
        raise Unusable(f"unit_classes names {', '.join(absent)}, which the model does not contain", choices=found)


def _check_buffers(workload: Any, model: nn.Module) -> None:
    with trying("materialise_buffers"):
        workload.materialise_buffers(model, torch.device("cpu"))
    direct = dict(workload.build("cpu", torch.float32).named_buffers())
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta":
            raise Unusable(f"materialise_buffers leaves {name} without a value", fix="give it one on the device")
        other = direct[name]
        if buffer.dtype != other.dtype or not torch.equal(buffer.nan_to_num(), other.nan_to_num()):
            fix = "make both the same: some engines build on meta and call it, others build on their device"
            raise Unusable(f"materialise_buffers gives {name} another value than build('cpu', ...) does", fix=fix)


def try_data(kind: type, config: Config) -> dict[str, Any]:
    if getattr(kind, "__getitem__", None) in (None, Dataset.__getitem__):
        fix = "def __getitem__(self, index): resuming and several ranks need any sequence by its index"
        raise Unusable("lacks __getitem__, so it can only be read in order", fix=fix)
    with trying("opening it"):
        source = kind(config.data)
        count = source.num_sequences
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise Unusable(f"has num_sequences={count!r}", choices="a Python int of at least 1")
    for index in sorted({(count - 1) * each // (SAMPLE - 1) for each in range(SAMPLE)}):
        with trying(f"sequence {index}"):
            tokens = source[index]
        wanted = (config.data.seq_len + 1,)
        if not isinstance(tokens, np.ndarray) or tokens.shape != wanted or tokens.dtype != np.int64:
            found = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
            raise Unusable(f"sequence {index} is {found}", choices=f"a numpy array, int64 {wanted}: data.seq_len + 1")
    return {"num_sequences": count}


def try_optimizer(kind: type, config: Config) -> dict[str, Any]:
    _check_base(kind, torch.optim.Optimizer)
    kept = []
    for prepared in (False, True):
        weights = [nn.Parameter(torch.linspace(-1.0, 1.0, 6).view(shape)) for shape in ((2, 3), (6,))]
        with trying(f"making it with lr={config.optimizer.lr} and optimizer.options={config.optimizer.options}"):
            optimizer = make_optimizer(config.optimizer, [Group(weights[:1], True), Group(weights[1:], False)])
        if prepared:
            create_state(optimizer)
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.5)
        with trying("its step" + prepared * f", with {ZEROS},"):
            optimizer.step()
        held = [pair for weight in weights for pair in optimizer.state.get(weight, {}).items()]
        if odd := [pair for pair in held if not isinstance(pair[1], Tensor | None)]:
            fix = "a tensor in its place, of shape [] for a number, so that it can be saved"
            raise Unusable(f"keeps {odd[0][0]!r} of a weight as a {type(odd[0][1]).__name__}", fix=fix)
        kept.append({str(name) for name, _ in held})
    declared = {entry for own in create_state(optimizer).values() for entry in own}
    if kept[0] != declared or kept[1] != declared:
        names = ", ".join(repr(name) for name in sorted(kept[0] | kept[1]))
        raise Unusable(
            f"keeps {names or 'nothing'} of a weight, and declares {', '.join(sorted(declared)) or 'nothing'}",
            fix=f"entries = ({names}{',' if names else ''}) in the class, each zeros at first, so that it can be saved",
        )
    step = inspect.unwrap(optimizer.step)  # which torch wraps; of a class that inherits it, its base's
    known = step.__module__.startswith("torch.optim") and step.__qualname__.split(".")[0] in ELEMENTWISE
    declares = getattr(kind, "elementwise", False) or hasattr(optimizer, "needs_whole")
    return {"elementwise": known or bool(declares)}


TRIALS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "engine": try_engine,
    "model": try_model,
    "data": try_data,
    "optimizer": try_optimizer,
    "callback": lambda kind, config: _check_base(kind, Callback),  # it is made where it runs
    "fault": lambda function, config: {},
}


if __name__ == "__main__":
    sys.exit(main())
