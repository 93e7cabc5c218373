"""Settings of all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from harness.config.adapter import describe
from harness.config.errors import Violation
from harness.config.schema import EngineName

# A submission must not fail over an example nobody has seen: CI takes the same ones every time, people explore.
settings.register_profile("ci", derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

CONFORMANCE = Path(__file__).parent / "engines" / "conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the conformance suite is asked of."""
    names = [engine.name for engine in EngineName]
    parser.addoption("--engine", choices=names, help="run the conformance suite, for this engine")
    parser.addoption("--adapter", metavar="PKG.MOD:CLASS", help="the class behind --engine ext")


def pytest_configure(config: pytest.Config) -> None:
    """`--engine` alone means the conformance suite alone; an adapter may lie in the current directory."""
    engine, adapter = config.getoption("--engine"), config.getoption("--adapter")
    if adapter and engine != EngineName.ext.name:
        raise pytest.UsageError(f"--adapter {adapter} goes with --engine ext")
    if engine and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(CONFORMANCE)]
    if adapter:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        found = describe(adapter)
        if isinstance(found, Violation):
            raise pytest.UsageError(str(found))
