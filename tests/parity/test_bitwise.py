"""T1: where bits are owed, that a single one counts, and that equal ones are said to be equal."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness.parity import Outcome, Verdict, compare
from harness.parity.record import load
from harness.parity.telling import wording
from harness.parity.tiers.bitwise import same_float
from harness.parity.tiers.comparable import admissible
from harness.store.rundir import flatten
from tests.parity.arms import Arm
from tests.parity.conftest import Bench
from tests.parity.corpus import OURS
from tests.parity.edits import edit_json, edit_lines, next_float
from tests.parity.lab import CLEAN, write_capture

ORDERED = replace(OURS, numerics="ordered", strategy="optim", k=1)
TWICE = replace(ORDERED, replicate=1)


def judged(bench: Bench, tmp_path: Path, edit: Callable[[Path], object]) -> Verdict:
    """An A/A pair that owes bits, with one side changed."""
    arm = tmp_path / "lab" / "changed"
    shutil.copytree(bench.run(TWICE), arm)
    edit(arm)
    return compare(arm, bench.run(ORDERED), sources=CLEAN)


def flip(run: Path, name: str, position: int) -> None:
    """Flip the lowest bit of one element of one captured gradient."""
    grads = load_file(run / "capture/step-000001.safetensors")
    grads[name].ravel().view(np.uint32)[position] ^= 1
    write_capture(run, 1, grads)


def nudge(key: str, step: int) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        edit_lines(run, lambda lines: lines[step - 1].update({key: next_float(lines[step - 1][key])}))

    return change


def test_a_repetition_is_equal(bench: Bench, tmp_path: Path) -> None:
    verdict = judged(bench, tmp_path, lambda run: None)
    assert verdict.outcome is Outcome.EQUAL
    assert "every recorded bit" in verdict.sentence
    run, rows = load(bench.run(ORDERED), CLEAN), [row for row in verdict.evidence if row.tier == "T1"]
    (count,) = (row.count for row in rows if row.check == "gradient bits")
    several = wording.right_of(Outcome.EQUAL, run, run, [*rows, *rows], None, {}, (0, 0))
    assert re.findall(r"(\d+) gradient", several) == [str(2 * count)], "of several steps: one number"
    assert verdict.admissible.startswith("T1")


@pytest.mark.parametrize(
    ("edit", "step", "tensor", "says"),
    [
        (nudge("loss", 1), 1, None, "loss bits"),
        (nudge("loss", 12), 12, None, "loss bits"),
        (nudge("grad_norm", 3), 3, None, "grad_norm bits"),
        (nudge("param_norm", 10), 10, None, "param_norm bits"),
        (lambda run: flip(run, "blocks.1.w_up.weight", 2047), 1, "blocks.1.w_up.weight", "gradient bits"),
        (lambda run: flip(run, "embedding.weight", 0), 1, "embedding.weight", "gradient bits"),
        (lambda run: edit_json(run / "summary.json", final_weights="0" * 64), 12, None, "final weights"),
    ],
    ids=["first loss", "last loss", "gradient norm", "weight norm", "gradient", "first gradient", "final weights"],
)
def test_a_single_bit_is_different_where_bits_are_owed(
    bench: Bench, tmp_path: Path, edit: Callable[[Path], object], step: int, tensor: str | None, says: str
) -> None:
    verdict = judged(bench, tmp_path, edit)
    assert verdict.outcome is Outcome.DIFFERENT
    first = verdict.findings[0]
    assert (first.tier, first.step, first.tensor) == ("T1", step, tensor)
    assert says in verdict.sentence


def test_gradients_that_one_run_lacks_are_missed_even_where_all_else_is_equal(bench: Bench, tmp_path: Path) -> None:
    verdict = judged(bench, tmp_path, lambda run: shutil.rmtree(run / "capture"))
    assert verdict.outcome is Outcome.UNDECIDED
    assert "gradients captured (record) is absent against captured" in verdict.sentence


def test_the_same_bit_is_rounding_where_none_are_owed(bench: Bench, tmp_path: Path) -> None:
    arm = tmp_path / "lab" / "changed"
    shutil.copytree(bench.run(replace(OURS, replicate=1)), arm)
    flip(arm, "embedding.weight", 0)
    verdict = compare(arm, bench.run(OURS), sources=CLEAN)
    assert verdict.outcome is Outcome.EQUIVALENT


def test_bits_are_owed_across_strategies_only_while_sums_are_in_one_order(bench: Bench) -> None:
    """Real sums: ZeRO-1 and ZeRO-3 agree bit for bit at k = 1, and differ within rounding at k = 2."""
    for k, expected in ((1, Outcome.EQUAL), (2, Outcome.EQUIVALENT)):
        arm, control = (replace(ORDERED, k=k, strategy=s) for s in ("optim_grads_params", "optim"))
        assert compare(bench.run(arm), bench.run(control), sources=CLEAN).outcome is expected
    wrong = replace(ORDERED, strategy="optim_grads_params")
    assert compare(bench.run(wrong), bench.run(replace(ORDERED, k=2)), sources=CLEAN).outcome is Outcome.EQUIVALENT


def config(**changes: object) -> dict[str, object]:
    flat = flatten(replace(Arm(), **changes).config())  # type: ignore[arg-type]
    return flat


TIERS = [
    ("T2", {}, {}, "promises no order"),
    ("T1", {"numerics": "deterministic"}, {"numerics": "deterministic", "replicate": 1}, "run twice"),
    ("T1", {"numerics": "ordered", "captures": (1, 2)}, {"numerics": "ordered"}, "run twice"),
    ("T2", {"numerics": "ordered"}, {"numerics": "deterministic"}, "one arm is numerics=ordered"),
    (
        "T2",
        {"numerics": "deterministic", "strategy": "optim"},
        {"numerics": "deterministic"},
        "sharding.strategy differ",
    ),
    ("T1", {"numerics": "ordered", "k": 1, "strategy": "no_shard"}, {"numerics": "ordered", "k": 1}, "rank order"),
    (
        "T1",
        {"numerics": "ordered", "strategy": "no_shard"},
        {"numerics": "ordered", "strategy": "optim"},
        "before ranks",
    ),
    ("T1", {"numerics": "ordered", "strategy": "optim_grads"}, {"numerics": "ordered"}, "before microbatches"),
    ("T2", {"numerics": "ordered", "strategy": "optim"}, {"numerics": "ordered"}, "with k = 2"),
    ("T2", {"numerics": "ordered", "ranks": 4, "k": 1}, {"numerics": "ordered", "ranks": 2, "k": 1}, "world_size"),
    ("T2", {"numerics": "ordered", "wire": "bf16"}, {"numerics": "ordered"}, "dtype.grad_comm"),
    ("T2", {"numerics": "ordered", "engine": "single"}, {"numerics": "ordered"}, "engine.name"),
    (
        "T2",
        {"numerics": "ordered", "engine": "ddp", "strategy": "optim"},
        {"numerics": "ordered", "engine": "ddp"},
        "differ",
    ),
]


@pytest.mark.parametrize(("tier", "arm", "control", "says"), TIERS)
def test_the_tier_follows_from_the_configurations(
    tier: str, arm: dict[str, object], control: dict[str, object], says: str
) -> None:
    for left, right in ((arm, control), (control, arm)):
        admission = admissible(config(**left), config(**right))
        assert admission.tier == tier
    assert says in admissible(config(**arm), config(**control)).reason


@pytest.mark.parametrize(("device", "tier"), [("cpu", "T1"), ("cuda", "T2")])
def test_user_buffers_choose_kernels_on_nccl_alone(device: str, tier: str) -> None:
    control = config(numerics="deterministic") | {"cluster.device": device}
    assert admissible(control | {"nccl_ub.mode": "auto"}, control).tier == tier


def test_floats_are_compared_by_bits() -> None:
    assert same_float(1.0, 1.0)
    assert not same_float(0.0, -0.0)
    assert same_float(float("nan"), float("nan"))
    assert not same_float(1.0, next_float(1.0))
    assert not same_float(None, 1.0)
    assert same_float(None, None)
