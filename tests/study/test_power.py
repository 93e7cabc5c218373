"""The power study in short: every fault at full strength must be found where it is, and every clean baseline must pass.

Runs on a few ranks that stay. `make test` takes, of the first edition, as many faults as show each stage and each
strategy; of the second, each stage once. `make test-all` takes all. Ranks of its own for each run are put to one fault
here and to eighteen by `make test-all`; the whole study is docs/records/power.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.power import class_runs, classes
from benchmarks.power.steps import STUDY, Judged, Kind, carry_out, judge_pair, pairs
from harness.store.identity import directory_name
from tests.faults.corpus import corpus
from tests.study import short
from tests.support.covering import covering, once

SHORT = [*pairs()]
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


ELSEWHERE = dict.fromkeys(("same_batch", "strided_shard_in_plain_order"), "forward")
"""Where a verdict names another stage than the fault's: docs/records/power.md counts these as wrong."""

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


def test_the_duplicated_gradient_is_different_at_step_1(judge: Callable[[str], Judged]) -> None:
    found = judge("F01_duplicated_gradient")
    assert (found.outcome, found.step) == ("DIFFERENT", 1)


ON_OWN_RANKS = ("F01_duplicated_gradient", "F2", "_weights", "logged_loss", "grown_at_the_end", "lagging_loader")
"""Parts of names: eighteen faults of every stage, with and without a resume, hybrids and FP8 among them. `make test`
takes the first."""


@pytest.mark.parametrize(
    "only", [ON_OWN_RANKS[0], *(pytest.param(each, marks=pytest.mark.full) for each in ON_OWN_RANKS[1:])]
)
def test_runs_with_ranks_of_their_own_are_judged_alike(only: str, tmp_path: Path) -> None:
    chosen = [pair for pair in SHORT if only in pair.name]
    cells = carry_out(chosen, str(tmp_path))
    paths = {words: tmp_path / STUDY / directory_name(cell.config) for words, cell in cells.items()}
    for pair in chosen:
        found = judge_pair(pair, paths[pair.arm], paths[pair.control])
        assert found.caught is (pair.kind is Kind.faulty), found.sentence
        if pair.kind is Kind.faulty:
            assert found.named == ELSEWHERE[pair.name] if pair.name in ELSEWHERE else found.placed, found.sentence


def test_every_stage_has_runs_with_ranks_of_their_own() -> None:
    taken = [name for name in FAULTS if any(only in name for only in ON_OWN_RANKS)]
    assert {corpus()[name].stage for name in taken} == {fault.stage for fault in corpus().values()}
    assert len(taken) == 17


CAMPAIGN = pd.read_csv(class_runs.DATA, keep_default_na=False)


def test_the_page_is_of_the_data() -> None:
    page = (Path(__file__).parents[2] / "docs" / "records" / "power.md").read_text()
    rates, by_control, _, clean = class_runs.tables(CAMPAIGN)
    late = [line for line in by_control.splitlines() if line.startswith("| late |")]
    assert {*rates.splitlines()[2:], *late, *clean.splitlines()[2:]} <= set(page.splitlines())
    assert all(fault.name in page for fault in corpus().values())


def test_a_campaigns_clean_pairs_are_not_different_and_its_faults_are_of_its_classes() -> None:
    clean, faulty = (CAMPAIGN[CAMPAIGN["kind"].isin(("clean", "peer")) == is_clean] for is_clean in (True, False))
    assert not ((clean["outcome"] == "DIFFERENT") & (clean["kind"] == "clean")).any()
    facts = ["kind", "name", "world", "against", "step"]
    told, meant = {*faulty[facts].itertuples(index=False, name=None)}, [*classes.faulty()]
    assert told <= {tuple(getattr(pair, fact) for fact in facts) for pair in meant}


def test_a_fault_that_leaves_no_trace_is_not_counted_and_one_that_passes_is() -> None:
    row = {**dict.fromkeys(CAMPAIGN.columns, ""), "kind": "late", "world": "fp32", "name": "x", "step": 8}
    twin, peer = ({**row, "against": against, "outcome": "EQUIVALENT"} for against in ("twin", "ddp"))
    other = {**row, "name": "y", "outcome": "DIFFERENT", "claimed": True, "stage": "gather", "stages": "forward gather"}

    def told(acts: object) -> str:
        return next(class_runs.tables(pd.DataFrame([twin | {"acts": acts}, peer, other]))).splitlines()[-1]

    assert "| 1 of 1 (100.0 %) | 5.0 % | 1 | 1 of 1 (100.0 %) |" in told(False)
    assert "| 1 of 3 (33.3 %) |" in told(True)


AGAIN = "gradient worked out again (between forward and gradient) is off by 1"
SAID = {
    f"at step 12, {AGAIN}; begun after step 9, the last one before it": [12, 10, 11],
    f"at step 3, {AGAIN}; begun at any step so far: none": [3, 1, 2],
    "at step 8, sum, sketched (reduction, first in x) is off by 1": [8],
}


@pytest.mark.parametrize("says", SAID)
def test_a_stated_interval_of_steps_is_a_claim(says: str) -> None:
    for known in ("", "x; in power_classes/b; and besides, "):
        told = class_runs.claimed(f"DIFFERENT: a against b: {known}{says}.", Path("power_classes/b"))
        assert told["steps"] == " ".join(map(str, SAID[says]))
