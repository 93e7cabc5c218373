"""Checks of every step cost a share of the training at most, and a verdict claims no step that they left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.parity.compare import compare
from harness.parity.outcome import Outcome
from harness.probe.step_checks import cadence
from harness.probe.step_checks.cadence import ALLOWED_S, FIRST, Cadence
from harness.store import check_stream
from harness.store.rundir import RunDir, Store, read_summary
from tests.support.mutants import finds
from tests.support.programs import run_program

ROOT = Path(__file__).resolve().parents[2]

SHARE = 0.02
DRAWN = 777
"""A step that is looked at whatever it costs."""


def simulated(step_s: float, look_s: float, steps: int, share: float = SHARE) -> tuple[Cadence, list[int]]:
    """Steps that are looked at where training and looking take so long each, and what counted it."""
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cadence.time, "process_time", lambda: now[0])
        found, looked = Cadence(share, 0, {DRAWN, steps}, lambda every: every, on_device=False), []
        for step in range(1, steps + 1):
            if found.looks(step):
                looked.append(step)
                with found.looking():
                    now[0] += look_s
                with found.apart():
                    now[0] += 50 * step_s
            now[0] += step_s
            found.end(step)
    return found, looked


def wrong_cadences() -> Iterator[str]:
    for step_s, look_s in ((1.3, 0.06), (3.4, 0.13), (0.01, 0.008), (0.1, 0.1), (5.0, 0.05)):
        steps = 6_000
        found, looked = simulated(step_s, look_s, steps)
        budget_s = ALLOWED_S + SHARE * step_s * steps + 2 * FIRST * look_s
        if found.looking_s != pytest.approx(look_s * len(looked)) or found.steps != len(looked):
            yield f"{found.steps} steps in {found.looking_s} s counted, of {len(looked)}"
        if found.looking_s > budget_s:
            yield f"{found.looking_s} s of looking where {budget_s} are allowed"
        if len(looked) < steps and found.looking_s < budget_s / 5:
            yield f"{len(looked)} of {steps} steps, for {found.looking_s} s of {budget_s}"
        if not {*range(1, FIRST + 1), DRAWN, steps} <= set(looked):
            yield "a step that is always looked at is not"
        if not any(step + 1 in looked for step in looked if step > steps / 2):
            yield "no two neighbours, between which weights could be looked at"
    counts = [len(simulated(*given)[1]) for given in ((5.0, 0.05, 600), (0.01, 0.01, 60), (1, 1, 99, 1))]
    if counts != [600, 60, 99]:
        yield f"steps are left out of cheap, short and full checks: {counts}"


STEPS, BEGINS = 24, 12
LEFT_OUT = [*range(10, 16), *range(18, 24)]
"""Where looking has no share: after the first 8, two of each 8 up to step 16, then two of each 16."""
SMALL = (
    *("model.dim=32", "model.num_layers=2", "model.ffn_dim=48", "data=synthetic", "data.seq_len=16", "ckpt=none"),
    *(f"train.steps={STEPS}", "train.global_batch_size=8", "measure.capture_steps=[1]", "measure.again=0"),
)
SELDOM = ("sharding=optim_grads", "measure.step_checks_share=0")
RUNS = {
    "seldom": SELDOM,
    "always": ("sharding=no_shard", "measure.step_checks_share=1"),
    "faulty": (*SELDOM, "fault.name=tests.faults.sums:F01_duplicated_gradient", f"fault.begins_at={BEGINS}"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("store") / "runs"
    for name, words in RUNS.items():
        done = run_program([str(ROOT / "run.py"), *SMALL, *words, f"launch.root={root}", f"study.name={name}"])
        assert done.returncode == 0, done.stdout + done.stderr
    return {name: Store(root).runs(name)[0].path for name in RUNS}


def test_steps_that_nobody_looked_at_are_not_claimed(runs: dict[str, Path]) -> None:
    stream, summary = check_stream.read(runs["seldom"]), read_summary(RunDir(runs["seldom"]))
    assert stream is not None
    assert summary is not None
    looked = [step for step in range(1, STEPS + 1) if step not in LEFT_OUT]
    assert [*looked, STEPS + 1] == (1 + np.flatnonzero(stream.looked)).tolist()
    assert (summary["step_checks"]["steps"], summary["step_checks"]["every"]) == (len(looked), 16)
    assert stream.kept[0].tolist() == looked
    unknown = (1 + np.flatnonzero(np.isnan(stream.column("kept")))).tolist()
    assert unknown == [*LEFT_OUT[:6], 16, *LEFT_OUT[6:], STEPS]
    verdict = compare(runs["seldom"], runs["always"])
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.sentence
    every, _, rest = verdict.sentence.partition("at every step, and right: ")[2].partition("; ")
    assert every == "what it was fed"
    assert f"weights between steps: at {len(looked) - 2} of {STEPS} steps" in rest
    assert f"sums of gradients: at {len(looked)} of {STEPS} steps" in rest
    assert "at every step" in compare(runs["always"], runs["seldom"]).sentence


def test_a_fault_among_steps_left_out_is_said_to_have_begun_there(runs: dict[str, Path]) -> None:
    verdict = compare(runs["faulty"], runs["always"])
    assert verdict.outcome is Outcome.DIFFERENT
    assert "at step 16, sum, sketched" in verdict.sentence
    assert "; begun after step 9, the last one looked at, and right, before it" in verdict.sentence


test_a_mutant_is_found = finds(
    "Checks of every step: cadence",
    wrong_cadences="""
        training alone: Steps that are worked out again count as training, and make room for more
            probe.step_checks.cadence.Cadence._chosen: - self._apart_s => - 0.0
        all of the budget twice: What was spent on looking is not taken from what is left
            probe.step_checks.cadence.Cadence._chosen: 2 * self._share * training_s - self.looking_s
                => 2 * self._share * training_s
        every step alone: No two steps in a row are looked at
            probe.step_checks.cadence.Cadence.looks: step % self.every < 2 => step % self.every == 0
        captured ones too: A step that is captured or worked out again is left out
            probe.step_checks.cadence.Cadence.looks: or step in self._always => or False
        no allowance: Short runs are not looked at in every step
            probe.step_checks.cadence.Cadence._chosen: ALLOWED_S if self._share else 0.0 => 0.0
    """,
    test_a_fault_among_steps_left_out_is_said_to_have_begun_there="""
        a fault begins where it is seen: Steps left out before a finding are not named
            parity.telling.wording._since: right is None => first.check != LOOKS[RECOMPUTED].check
            ()
            begun after step 9
    """,
)
