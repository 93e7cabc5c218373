"""docs/compatibility.md tells of all scenarios under all engines; ours is never wrong there."""

from __future__ import annotations

import pytest

from benchmarks.pages.compatibility import DATA, HANGS, PEERS, RAISES, REFUSED, RIGHT, WRONG, judged
from benchmarks.pages.tables import read
from tests.fsdp.ordinary.dialects import OURS, attempt_as, changed_lines
from tests.fsdp.ordinary.program import Program
from tests.fsdp.ordinary.running import Lost, Raised, Trained, reference, run
from tests.fsdp.ordinary.scenarios import SCENARIOS
from tests.fsdp.pairs import STRATEGIES

FACTS = read(DATA)
NAMES = [name for programs in SCENARIOS.values() for name in programs]


def test_every_scenario_ran_under_every_engine() -> None:
    assert len(set(NAMES)) == len(NAMES), "two scenarios share a name"
    assert set(FACTS["outcomes"]) == set(NAMES)
    assert all(set(told) == {*PEERS, *STRATEGIES} for told in FACTS["outcomes"].values())


@pytest.mark.parametrize("name", NAMES)
def test_ours_was_right_or_refused(name: str) -> None:
    assert {FACTS["outcomes"][name][strategy][0] for strategy in STRATEGIES} <= {RIGHT, REFUSED}


def test_the_first_program_changes_as_many_lines_as_the_tours_say() -> None:
    """Imports apart, which are a line more of each tour."""
    first = SCENARIOS["Loops"][NAMES[0]]
    assert {peer: changed_lines(peer, first) for peer in PEERS} == {"DDP": 1, "FSDP2": 3, "megatron-fsdp": 1}


def test_peers_run_by_their_own_entries() -> None:
    program = SCENARIOS["Loops"][NAMES[0]]
    right = reference(program)
    ran = run(attempt_as, [(engine, program) for engine in (*PEERS, OURS)])
    assert [judged(ranks, right) for ranks in ran] == [[RIGHT, ""]] * (len(PEERS) + 1)


def test_outcomes_are_told_apart() -> None:
    program = Program(seed=0, pieces=("Mlp",), dtype="fp32")
    right = reference(program)
    nothing = Trained(dict(right.start), seen=right.seen)
    waits, tells = Raised("RuntimeError", "Timed out waiting 6000ms", False), Raised("StepError", "no", True)
    assert judged([right, right], right)[0] == RIGHT
    assert judged([right, nothing], right)[0] == WRONG
    assert judged([waits, tells], right)[0] == HANGS
    assert judged([Lost("hung"), right], right)[0] == HANGS
    assert judged([tells, tells], right) == [REFUSED, "StepError: no"]
    assert judged([tells, right], right)[0] == RAISES
    assert judged([Lost("ended by signal 11"), right], right)[0] == RAISES
