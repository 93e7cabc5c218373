"""Lists of checks that ranks make one after another in one visit, and mutants that one of the checks has to find.

A module has `CHECKS`, by name: called with the rank and the strategy, each returns what it found wrong, a sentence
each. It has `MUTANTS`, by name. And it may have `WORLD`, the number of ranks.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import once
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

Check = Callable[[int, str], list[str]]
RANKS, ZERO3 = 2, "optim_grads_params"
BROKEN = ("AttributeError", "TypeError", "NameError")
"""What a patch raises that no longer fits what it patches: no mutant."""


@dataclass(frozen=True)
class Mutant:
    """breaks: the mistake. patch: makes it. check: which has to find it, one of `CHECKS` or a function like them.
    strategy: or what else that function takes. area: for `areas_of`."""

    breaks: str
    patch: Callable[[], Any]
    check: str | Callable[[int, Any], Any]
    strategy: Any = ZERO3
    area: str = ""


def patched(where: Any, name: str, value: Any = mock.DEFAULT, **more: Any) -> Callable[[], Any]:
    """The patch of a mutant: what `where` has under a name is `value`; without one, it does nothing."""
    return lambda: mock.patch.object(where, name, value, **more)


def of_slips(table: str) -> dict[str, Mutant]:
    """Mutants of a table of `slips`; behind each its check, as `check / strategy` where that is not ZeRO-3. A line
    `[area]` begins those of an area."""
    first, *parts = re.split(r"(?m)^ *\[(.*)\]$", table)
    return {
        name: Mutant(slip.breaks, slip.patched, *(each for line in more for each in line.split(" / ")), area=area)
        for area, rows in [("", first), *zip(parts[::2], parts[1::2], strict=True)]
        if rows.strip()
        for name, (slip, *more) in slips(rows).items()
    }


def areas_of(mutants: Mapping[str, Mutant], area: str = "") -> list[Any]:
    """Parameters of a test, one a mutant: its name. area: of those that say none."""
    return [param for name, mutant in mutants.items() for param in each(mutant.area or area, [(name, mutant.breaks)])]


def said(action: Callable[[], Any], kind: type[Exception], *parts: str) -> list[str]:
    """What is wrong with the error of an action: its kind (any, for Exception), or a part it does not say.

    Args:
        parts: literally, or as patterns.
    """
    try:
        action()
    except Exception as error:
        if kind is not Exception and type(error) is not kind:
            return [f"{type(error).__name__} instead of {kind.__name__}: {error}"]
        text = str(error)
        return [f"{part!r} is not in: {text}" for part in parts if part not in text and not re.search(part, text, re.S)]
    return [f"nothing was said of {parts}"]


def sentences(found: Any) -> list[str]:
    """What a check has found wrong, out of the lists and mappings it comes in."""
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, list | tuple):
        return [sentence for part in found for sentence in sentences(part)]
    return [str(found)] if found else []


def world_of(module: str) -> int:
    """Ranks that make the checks of a module."""
    return int(getattr(import_module(module), "WORLD", RANKS))


def check_all(rank: int, module: str) -> dict[tuple[str, str], list[str]]:
    """What every check of a module finds under every strategy."""
    found = {}
    for strategy, (name, check) in itertools.product(STRATEGIES, import_module(module).CHECKS.items()):
        found[strategy, name] = check(rank, strategy)
        dist.barrier()
    return found


def check_mutants(rank: int, module: str) -> dict[str, tuple[list[str], float]]:
    """What its check finds of each mutant of a module, or what it raises; and the seconds that took."""
    found, there = {}, import_module(module)
    for name, mutant in there.MUTANTS.items():
        check = there.CHECKS[mutant.check] if isinstance(mutant.check, str) else mutant.check
        begin = time.perf_counter()
        with mutant.patch():
            try:
                told = sentences(check(rank, mutant.strategy))
            except Exception as error:
                told = [f"{type(error).__name__}: {error}"]
        found[name] = told, time.perf_counter() - begin
        dist.barrier()
    return found


@once
def checked(module: str) -> list[dict[tuple[str, str], list[str]]]:
    """`check_all` of every rank."""
    return run_ranks(check_all, world_of(module), module)


@once
def mutated(module: str) -> list[dict[str, tuple[list[str], float]]]:
    """`check_mutants` of every rank."""
    return run_ranks(check_mutants, world_of(module), module)


def each_holds(module: str, checks: Iterable[str]) -> Callable[[str, str], None]:
    """A test: under every strategy each check of a module finds nothing wrong on any rank."""

    @pytest.mark.parametrize("check", checks)
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test(strategy: str, check: str) -> None:
        holds(module, strategy, check)

    return test


def each_is_found(module: str, mutants: Mapping[str, Mutant], area: str = "") -> Callable[[str, Any], None]:
    """A test: each mutant of a module is found. area: of those that say none."""

    @pytest.mark.parametrize("name", areas_of(mutants, area))
    def test(name: str, killed_in: Callable[[float], None]) -> None:
        is_found(module, name, killed_in)

    return test


def holds(module: str, strategy: str, check: str) -> None:
    """Assert that a check finds nothing wrong on any rank."""
    wrong = [of_rank[strategy, check] for of_rank in checked(module)]
    assert wrong == [[]] * world_of(module), wrong


def is_found(module: str, name: str, killed_in: Callable[[float], None]) -> None:
    """Assert that the check of a mutant finds it, by what it measures or by what the engine raises."""
    ranks = [of_rank[name] for of_rank in mutated(module)]
    told = [each for all_told, _ in ranks for each in all_told]
    assert told, "it survives"
    assert not any(each.startswith(BROKEN) for each in told), f"no mutant: {told}"
    killed_in(max(seconds for _, seconds in ranks))
