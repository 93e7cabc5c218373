"""The power study in short: every fault at full strength must be found where it is, and every clean baseline must pass.

Runs on a few ranks that stay. `make test` takes, of the first edition, as many faults as show each stage and each
strategy; of the second, each stage once. `make test-all` takes all. The verb, which starts ranks for each run, is put
to one fault here and to eighteen by `make test-all`; the whole study is docs/records/power.md.
"""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.power import whole
from benchmarks.power.first_steps import main
from benchmarks.power.score import Judged
from benchmarks.power.steps import Kind, carry_out, pairs
from harness.config.compose import Cell
from harness.store.errors import Busy
from harness.train.faults import AMOUNTS
from tests.faults.corpus import corpus
from tests.study import short
from tests.support.covering import covering, once

SHORT = pairs(short=True)
FAULTS = {pair.name: pair for pair in SHORT if pair.kind is Kind.faulty}
TWINS = {pair.name: pair for pair in SHORT if pair.kind is Kind.clean}
FIRST, SECOND = ([name for name in FAULTS if corpus()[name].edition == edition] for edition in (1, 2))


def shows(fault: str) -> tuple[str, str]:
    """The stage of a fault, and the strategy it is in."""
    return corpus()[fault].stage, next(text for text in corpus()[fault].cell if text.startswith("sharding="))


FEW = {
    "F01_duplicated_gradient",
    *(FIRST[place] for place in covering([shows(name) for name in FIRST], 1)),
    *(SECOND[place] for place in covering([shows(name)[:1] for name in SECOND], 1)),
}
"""Faults of `make test`, which shows of every one that it acts (tests/faults/test_bites.py)."""
FEW_TWINS = {name for name, baseline in TWINS.items() if any(FAULTS[fault].control == baseline.arm for fault in FEW)}


def marked(names: Iterable[str], few: set[str]) -> list[Any]:
    """As parameters; what `make test` leaves out is marked `full`."""
    return [pytest.param(name, marks=() if name in few else pytest.mark.full) for name in names]


ELSEWHERE = {
    "same_batch": "forward",
    "strided_shard_in_plain_order": "forward",
}
"""Where a verdict names another stage than the fault's: docs/records/power.md counts these as wrong."""
SEEN = [fault for fault in corpus().values() if not fault.is_held_out]
"""Without those that no judge may see yet (tests/study/test_held_out.py)."""
LATER = [fault.name for fault in SEEN if not fault.measured]


pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Judged]:
    """What a pair came to, by its name; the first of `make test`'s, and the first of the others, runs its part."""

    @once
    def part(few: bool) -> Mapping[str, Judged]:
        chosen = [pair for pair in SHORT if (pair.name in FEW | FEW_TWINS) is few]
        return short.judged(chosen, tmp_path_factory.mktemp("power") / "runs")

    return lambda name: part(name in FEW | FEW_TWINS)[name]


@pytest.mark.parametrize("fault", marked(FAULTS, FEW))
def test_a_fault_is_found_and_placed(judge: Callable[[str], Judged], fault: str) -> None:
    found = judge(fault)
    assert found.caught, found.sentence
    assert found.placed or fault in ELSEWHERE, found.sentence
    assert fault not in ELSEWHERE or found.named == ELSEWHERE[fault], found.sentence


@pytest.mark.parametrize("baseline", marked(TWINS, FEW_TWINS))
def test_its_baseline_passes(judge: Callable[[str], Judged], baseline: str) -> None:
    assert not judge(baseline).caught, judge(baseline).sentence


def test_the_duplicated_gradient_is_different_at_step_1_and_two_published_rules_pass_it(
    judge: Callable[[str], Judged],
) -> None:
    found = judge("F01_duplicated_gradient")
    assert (found.outcome, found.step) == ("DIFFERENT", 1)
    assert found.published["Megatron-Bridge"]
    assert found.published["Megatron-LM, approximate"]


THROUGH_THE_VERB = ("F01_duplicated_gradient", "F2", "_weights", "logged_loss", "grown_at_the_end", "lagging_loader")
"""Parts of names: eighteen faults of every stage, with and without a resume, hybrids and FP8 among them. `make test`
takes the first."""


@pytest.mark.parametrize(
    "only", [THROUGH_THE_VERB[0], *(pytest.param(each, marks=pytest.mark.full) for each in THROUGH_THE_VERB[1:])]
)
def test_the_verb_runs_judges_and_writes_what_it_found(only: str, tmp_path: Path) -> None:
    out = tmp_path / "power.json"
    words = ["--short", "--root", str(tmp_path / "runs"), "--out", str(out)]
    assert main([*words, "--only", only]) == 0
    found = {each["fault"]: Judged(**each) for each in json.loads(out.read_text())["pairs"]}
    assert [*found] == [pair.name for pair in SHORT if only in pair.name]
    wrong = [
        name
        for name in found
        if name in corpus() and (found[name].named != ELSEWHERE[name] if name in ELSEWHERE else not found[name].placed)
    ]
    assert not wrong


def test_every_stage_goes_through_the_verb() -> None:
    taken = [name for name in FAULTS if any(only in name for only in THROUGH_THE_VERB)]
    assert {corpus()[name].stage for name in taken} == {fault.stage for fault in SEEN}
    assert len(taken) == 18


def test_the_study_is_as_large_as_it_says() -> None:
    every = pairs()
    assert len(SEEN) - len(LATER) == 63
    assert sum(fault.name[0] == "F" and fault.name[1:3].isdigit() for fault in SEEN) == 45
    assert len(LATER) == 45
    faulty = Counter((pair.strength, pair.against) for pair in every if pair.kind is Kind.faulty)
    assert faulty == {(strength, against): 63 for strength in AMOUNTS for against in ("baseline", "reference")}
    clean = [pair for pair in every if pair.kind is Kind.clean]
    assert len(clean) >= 1000
    assert sum(pair.held_out for pair in clean) >= 300
    assert all(pair.arm != pair.control for pair in every)


def test_no_run_is_in_both_parts() -> None:
    """But what runs are held against: baselines, DDP, the perturbed reference."""
    parts: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}
    for pair in pairs():
        runs = {pair.arm, *([pair.control] if pair.against in ("control", "arm") else [])}
        parts[pair.held_out] |= runs
    assert not parts[True] & parts[False]


def test_the_page_is_of_the_data(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "records" / "power.md").read_text()
    data = json.loads((Path(__file__).parents[2] / "benchmarks" / "data" / "power.json").read_text())
    assert len(data["pairs"]) == len(pairs())
    assert data["sources"][:8] in page
    assert all(fault.name in page for fault in SEEN)


WHOLE = {
    "power_whole": [each for each in whole.pairs() if not each.held_out],
    "power_whole_held_out": [each for each in whole.pairs() if each.held_out],
    "power_whole_fresh": whole.fresh(),
    "power_whole_again": whole.fresh(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_part_about_whole_runs_is_of_all_its_pairs(name: str) -> None:
    root = Path(__file__).parents[2]
    data = json.loads((root / "benchmarks" / "data" / f"{name}.json").read_text())
    facts = ("name", "world", "begins", "strength", "against", "group")
    of_study = [tuple(getattr(each, key) for key in facts) for each in WHOLE[name]]
    assert sorted(tuple(each[key] for key in facts) for each in data["pairs"]) == sorted(of_study)
    different = [each for each in data["pairs"] if each["views"]["default"]["outcome"] == "DIFFERENT"]
    assert not [each for each in different if each["kind"] == "clean"]
    page = " ".join((root / "docs" / "records" / "power.md").read_text().split())
    assert re.search(rf"(judges frozen|The same two commands) at commit `{data['code']['sha'][:7]}`", page)


@pytest.mark.full
def test_the_part_about_whole_runs_is_what_its_data_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composes the 1,128 runs that the page counts: 18 CPU seconds."""
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "benchmarks" / "pages"))
    said = "\n".join(importlib.import_module("benchmarks.power.whole_section").section())
    assert said in (root / "docs" / "records" / "power.md").read_text()


def test_the_fresh_part_is_of_the_second_edition_and_of_clean_groups_that_no_campaign_had() -> None:
    fresh, before = whole.fresh(), whole.pairs()
    assert {pair.name for pair in fresh if pair.kind is Kind.faulty} == {*SECOND}
    assert len(SECOND) == 31
    assert all(pair.held_out for pair in fresh)
    clean = [pair for pair in fresh if pair.kind is Kind.clean]
    assert len(clean) == 1001
    assert {whole.WORLDS[pair.world].hot for pair in clean} == {True, False}
    assert not {pair.group for pair in clean} & {pair.group for pair in before}
    runs = {run for pair in clean for run in (pair.arm, pair.control)}
    assert not runs & {run for pair in before for run in (pair.arm, pair.control)}


@pytest.mark.parametrize(("code", "ended"), [(130, KeyboardInterrupt), (69, Busy)])
def test_a_campaign_that_was_stopped_is_not_judged(
    code: int, ended: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(cells: Sequence[Cell]) -> int:
        assert len(cells) == 2
        return code

    monkeypatch.setattr("harness.launch.submit.submit", submit)
    with pytest.raises(ended):
        carry_out(SHORT[:1], str(tmp_path))
