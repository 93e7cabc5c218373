"""Mutants: pieces of this repository with one mistake each, and the tests that have to find them.

A test declares with `kills` which mutant it finds. With `--mutants FILE` every such test that passes is written into
the file with the seconds it took; `benchmarks/pages/mutants.py` makes docs/records/mutants.md of that.
"""

from __future__ import annotations

import inspect
import itertools
import json
import pydoc
import re
import sys
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PROPERTY = "mutant"


class Mutant(NamedTuple):
    """area: what was changed and who looks for it, a heading of the page. name: within the area."""

    area: str
    name: str
    breaks: str
    """The mistake, in a sentence."""


DECLARED: dict[Mutant, None] = {}
"""Every mutant of the modules that were imported, in the order of declaration."""


def kills(area: str, name: str, breaks: str) -> pytest.MarkDecorator:
    """The mark of a test that passes only where this mutant is found."""
    mutant = Mutant(area, name, " ".join(breaks.split()).rstrip("."))
    DECLARED[mutant] = None
    return pytest.mark.kills(*mutant)


def each(area: str, mutants: Mapping[str, Any] | Iterable[tuple[str, str]]) -> list[Any]:
    """Parameters of a test, one a mutant: its name. mutants: pairs of names and sentences, or by name what `breaks`, or
    a tuple with such."""
    if isinstance(mutants, Mapping):
        mutants = [(name, _breaks(mutant)) for name, mutant in mutants.items()]
    return [pytest.param(name, id=name, marks=kills(area, name, breaks)) for name, breaks in mutants]


def _breaks(mutant: Any) -> str:
    parts = (mutant,) if hasattr(mutant, "breaks") else mutant
    return str(next(part.breaks for part in parts if hasattr(part, "breaks")))


class Slip(NamedTuple):
    """A mistake in one place of the source: in `owner.name` (a function, property or constant of a module or class),
    `old` reads `new`. Without `old`, `new` takes the place of all: made of what was there, or an expression."""

    owner: Any
    name: str
    old: str
    new: Any
    breaks: str = ""

    def made(self) -> Any:
        """What stands there with the mistake in it.

        Raises:
            AssertionError: `old` does not stand there once: the source has moved on, and the mutant must follow.
        """
        found = vars(self.owner)[self.name]
        if not self.old:
            module = vars(inspect.getmodule(self.owner))
            return self.new(found) if callable(self.new) else eval(self.new, {**module, "was": found})
        function = getattr(found, "fget", getattr(found, "func", found))
        text = textwrap.dedent(inspect.getsource(function))
        assert text.count(self.old) == 1, f"{self.old!r} stands {text.count(self.old)} times in {self.name}"
        made: dict[str, Any] = {}
        exec(compile(text.replace(self.old, self.new), self.name, "exec"), vars(sys.modules[function.__module__]), made)
        if hasattr(made[self.name], "__set_name__"):
            made[self.name].__set_name__(self.owner, self.name)
        return made[self.name]

    def put(self, monkeypatch: pytest.MonkeyPatch, *others: Any) -> None:
        """Put it in place, wherever the package, or one of other modules, has it under its name."""
        found, made = vars(self.owner)[self.name], self.made()
        area = (self.owner.__name__ if inspect.ismodule(self.owner) else self.owner.__module__).rpartition(".")[0]
        theirs = [module for name, module in [*sys.modules.items()] if name.startswith(area.rpartition(".")[0])]
        for owner in (self.owner, *theirs, *others):
            if vars(owner).get(self.name) is found:
                monkeypatch.setattr(owner, self.name, made)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Have it in place for the body."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            self.put(monkeypatch)
            yield


def slips(*given: Any) -> dict[str, Any]:
    """Slips by name, of a table of rows like this one; a value is the slip, or a tuple where more belongs to a row:

        name of the mutant: The mistake, in a sentence
            path.of.the.function: old => new
            whatever else

    Args:
        given: the table, and before it what tuples begin with. Paths are without `harness.`, or begin with `tests.`. A
            line that begins with `=>` goes on with the one above; a new line in what is changed is `\\n`. Without `=>`
            it is an expression that takes the place of all, in which `was` is what was there.
    """
    *before, table = given
    found: dict[str, Any] = {}
    for row in re.split(r"\n(?=\S)", textwrap.dedent(table).strip()):
        head, edit, *more = (line.strip() for line in re.sub(r"\s*\n\s*=>", " =>", row).splitlines())
        (name, breaks), (place, change) = (head.rsplit(": ", 1), edit.split(": ", 1))
        path, _, attribute = place.rpartition(".")
        path = path if path.startswith("tests.") else f"harness.{path}"
        owner = sys.modules.get(path) or pydoc.locate(path)
        assert owner is not None, f"there is no {path}"
        old, arrow, new = change.replace(r"\n", "\n").partition(" =>")
        slip = Slip(owner, attribute, *((old, new.removeprefix(" ")) if arrow else ("", change)), breaks)
        found[name] = (*before, slip, *more) if before or more else slip
    return found


def found_by(slip: Slip, *claims: Callable[..., None], **fixtures: Any) -> None:
    """Hold that one of these tests fails with the mistake in place, which a test's module has under its name, too.

    Args: claims: with all their parameters. fixtures: of the tests that take them.
    """

    def every_claim() -> None:
        for claim in claims:
            marks = [mark.args for mark in getattr(claim, "pytestmark", ()) if mark.name == "parametrize"]
            axes = [[{n: v} if isinstance(n, str) else dict(zip(n, v, strict=True)) for v in vs] for n, vs in marks]
            taken = {name: fixtures[name] for name in fixtures.keys() & inspect.signature(claim).parameters}
            for case in itertools.product(*axes):
                claim(**ChainMap(taken, *case))

    with pytest.MonkeyPatch.context() as monkeypatch:
        slip.put(monkeypatch, inspect.getmodule(claims[0]))
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            every_claim()


def each_found_by(area: str, table: str, *claims: Callable[..., None]) -> Any:
    """A test a row of a table of `slips`, which holds that one of the claims fails."""
    mutants = slips(table)

    @pytest.mark.parametrize("name", each(area, mutants))
    def test_a_mutant_is_found(name: str) -> None:
        found_by(mutants[name], *claims)

    return test_a_mutant_is_found


def finds(area: str, **tables: str) -> Any:
    """A test of every mutant of tables, as `slips` has them, by the name of the check in the same module that finds it:
    a test, which fails, or a claim, which fails or returns faults. It is given fixtures by name, for other paths a new
    folder. A claim is also a test by itself, of the code as it is; its table may be empty.

    A row's third line is another check, or what is no fixture: `(number=3)`. A fourth one is a pattern
    of the failure, `Error: text`; by default an assertion's.
    """
    rows = [row for check, table in tables.items() if table for row in slips(check, table).items()]
    mutants = dict(rows)
    assert len(mutants) == len(rows), "two mutants have one name"
    claims = [pytest.param(check, id=check) for check in tables if not check.startswith("test_")]

    @pytest.mark.parametrize("name", [*claims, *each(area, mutants)])
    def test_a_mutant_is_found(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if name in tables:
            assert list(_called(request, name, "") or ()) == []
            return
        usual, slip, *more = mutants[name]
        call, said = [*more, *(usual, "^(AssertionError|Failed)")[len(more) :]]
        check, _, given = (usual + call if call.startswith("(") else call).partition("(")
        slip.put(monkeypatch, request.module)
        told = ""
        try:
            found = any(_called(request, check, given) or ())
        except (Exception, pytest.fail.Exception) as error:
            found, told = True, f"{type(error).__name__}: {error}"
        assert found, f"{name} survives"
        assert not told or re.search(said, told), f"{name}: {told}"

    return test_a_mutant_is_found


def _called(request: pytest.FixtureRequest, check: str, given: str) -> Any:
    """What a check of the test's module returns. Args: given: text of its arguments that are no fixtures."""
    function = getattr(request.module, check)
    arguments = eval(f"dict({given or ')'}", vars(request.module))
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty and key not in arguments:
            try:
                arguments[key] = request.getfixturevalue(key)
            except pytest.FixtureLookupError:
                assert parameter.annotation == "Path", f"{check} is given no {key}"
                arguments[key] = request.getfixturevalue("tmp_path")
    return function(**arguments)


@pytest.fixture
def killed_in(record_property: Callable[[str, object], None]) -> Callable[[float], None]:
    """To be called with the seconds it took, where that is not what the test itself took."""
    return lambda seconds: record_property("seconds", seconds)


class Recorder:
    """Writes what tests say of mutants; a plugin of the process that hears of all tests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a mutant that was found."""
        told = dict(report.user_properties)
        if report.when == "call" and report.passed and PROPERTY in told:
            seconds = round(float(told.get("seconds", report.duration)), 2)
            self.rows.append({**Mutant(*told[PROPERTY])._asdict(), "test": report.nodeid, "seconds": seconds})

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        rows = sorted(self.rows, key=lambda row: (row["area"], row["test"]))
        self.path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write it."""
    parser.addoption("--mutants", metavar="FILE", type=Path, help="write which test killed which mutant, and how fast")


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that hears of all tests writes."""
    if config.getoption("--mutants") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("--mutants")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the report of a test say which mutant it kills.

    Raises:
        UsageError: such a test is left out of CI, which is to kill every mutant.
    """
    for item in items:
        mark = item.get_closest_marker("kills")
        if mark is not None and item.get_closest_marker("full") is not None:
            raise pytest.UsageError(f"{item.nodeid} kills a mutant, and the mark `full` leaves it out of CI")
        if mark is not None:
            item.user_properties.append((PROPERTY, list(mark.args)))
