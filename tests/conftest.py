"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from harness.config.errors import Violation
from harness.config.own import describe_engine
from harness.config.schema import EngineName
from tests.support.forking import SELDOM
from tests.support.limits import GRACE_S, LONGEST_WAIT_S, arm, ended_after, tell_on_stderr
from tests.support.scheduling import WholeUnits, admitted, is_slow, place_of

# A submission must not fail over an example nobody has seen: CI takes the same ones every time, people explore.
# How long an example takes says how busy the machine is, and nothing about the example.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("people", deadline=None)
# pytest must not see CI: there it compares every line of two lists that differ with every other one. Where lists are
# long that takes minutes, and a mutant that dies at once here ran into its time limit there. Workers see TESTS_PROFILE.
os.environ.setdefault("TESTS_PROFILE", "ci" if os.environ.pop("CI", None) else "people")
settings.load_profile(os.environ["TESTS_PROFILE"])

gc.set_threshold(*SELDOM)

# A shell has what it starts with `&` ignore Ctrl-C, and that is inherited; tests send it to what they start. So does
# nohup with the end of a terminal: a handler goes on ignoring it here, and is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# What is printed is what one types here (`harness.store.commands`): as after `. .venv/bin/activate`.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
# A job's or a hook's place is not that of what tests start, nor are a user's settings those of the tests' repositories.
LAUNCHED = r"(SLURM|SBATCH)_.*|(LOCAL_)?RANK|WORLD_SIZE|GIT_(DIR|WORK_TREE|INDEX_FILE|COMMON_DIR)|HARNESS_TYPED"
for name in filter(re.compile(LAUNCHED).fullmatch, list(os.environ)):
    del os.environ[name]
os.environ["GIT_CONFIG_GLOBAL"] = os.devnull

pytest_plugins = ("tests.support.mutants",)

CONFORMANCE = Path(__file__).parent / "engines" / "conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the conformance suite is asked of."""
    names = [engine.name for engine in EngineName]
    parser.addoption("--engine", choices=names, help="run the conformance suite, for this engine")
    parser.addoption("--adapter", metavar="PKG.MOD:CLASS", help="the class behind --engine ext")


def pytest_configure(config: pytest.Config) -> None:
    """`--engine` alone means the conformance suite alone; an adapter may lie in the current directory."""
    tell_on_stderr()
    engine, adapter = config.getoption("--engine"), config.getoption("--adapter")
    if adapter and engine != EngineName.ext.name:
        raise pytest.UsageError(f"--adapter {adapter} goes with --engine ext")
    if engine and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(CONFORMANCE)]
    if adapter:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        found = describe_engine(adapter)
        if isinstance(found, Violation):
            raise pytest.UsageError(str(found))


# -- several workers (pytest -n) ---------------------------------------------------------------------------------------


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeUnits:
    """Work is handed out in the order of collection, which `pytest_collection_modifyitems` makes."""
    config.option.loadscopereorder = False
    return WholeUnits(config, log)


def pytest_configure_node(node: Any) -> None:
    """Tell each worker of a folder that they share."""
    if not hasattr(node.config, "shared_folder"):
        node.config.shared_folder = tempfile.mkdtemp(prefix="pytest-workers-")
    node.workerinput["shared_folder"] = node.config.shared_folder


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder that workers shared."""
    if hasattr(config, "shared_folder"):
        shutil.rmtree(config.shared_folder, ignore_errors=True)


def _shared_folder(config: pytest.Config) -> Path | None:
    """None in a session of one process."""
    return Path(config.workerinput["shared_folder"]) if hasattr(config, "workerinput") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow files are marked before `-m` chooses; the slowest are first, where several workers share them."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker("slow")
    if _shared_folder(config):
        items.sort(key=lambda item: place_of(item.nodeid))


def pytest_collection_finish() -> None:
    """Modules and items stay to the end: collecting garbage need not look through half a million objects for it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let tests marked `alone` be alone, their fixtures included, and no test last for ever."""
    folder = _shared_folder(item.config)
    with ended_after(LONGEST_WAIT_S):
        admission = nullcontext() if folder is None else admitted(folder, item.get_closest_marker("alone") is not None)
        with admission, ended_after(_limit(item) + GRACE_S):
            return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Once more: pytest disarms what would end a process when it reports an error."""
    arm(_limit(item))


def _limit(item: pytest.Item) -> float:
    """Seconds after which pytest-timeout raises in the test."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))
