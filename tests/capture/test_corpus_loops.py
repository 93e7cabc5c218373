"""Faults of the corpus, put into loops of DDP, FSDP2 and DeepSpeed from outside: they act there, from their step on."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.power import foreign
from harness.parity.record import load
from tests.faults.corpus import corpus

CHOSEN = {
    "ddp": ("drop_rank", "keys_for_values", "replica_drift", "F40_clipped_by_group", "F05_no_sync_without_effect"),
    "fsdp2": (
        "F25_read_before_ready",
        "last_not_sent",
        "repeat_rank",
        "F04_extra_adam_step",
        "F16_tail_lost_on_resume",
    ),
    "zero_2": ("stale_weights", "gains_of_one_rank", "round_gradient", "largest_taken", "F16_tail_lost_on_resume"),
}
"""Of each handle that a loop has, one."""


@pytest.mark.parametrize("loop", CHOSEN)
def test_a_fault_of_the_corpus_acts_from_its_step_on(loop: str, tmp_path: Path) -> None:
    if loop == "zero_2" and find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed: make peers")
    of_loop = [pair for pair in foreign.faulty() if pair.world == loop and pair.against == "twin"]
    chosen = [pair for pair in of_loop if pair.name in CHOSEN[loop] and pair.kind == "late"]
    assert {pair.name for pair in chosen} == {*CHOSEN[loop]}
    foreign.make(tmp_path, chosen)
    places = foreign.cells(tmp_path, chosen)
    for pair, row in zip(chosen, foreign.judged(tmp_path, chosen), strict=True):
        assert row["claimed"], (pair.name, row["sentence"])
        assert row["outcome"] in ("DIFFERENT", "UNDECIDED"), (pair.name, row["sentence"])
        assert row["stage"] in str(row["stages"]).split(), (pair.name, row["sentence"])
        arm, twin = (load(places[job][0]).stream for job in (pair.arm, pair.control))
        assert arm is not None
        assert twin is not None
        apart = [arm.column(name) != twin.column(name) for name in ("reduced_0", "after_0")]
        assert not any(each[: pair.step - 1].any() for each in apart), pair.name
        assert any(each[pair.step - 1 :].any() for each in apart), pair.name


def test_what_no_loop_can_have_is_told_with_its_reason() -> None:
    never = [each for each in corpus().values() if all(foreign.no_meaning(each, loop) for loop in foreign.LOOPS)]
    assert {each.edition for each in never} >= {1, 3}
    assert len([each for each in corpus().values() if each not in never]) > 120
