"""T0 and T1: what must agree, what may differ, runs on which no verdict can stand; where a single bit counts."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.errors import BadRequest
from harness.config.schema import Config
from harness.parity import Outcome, Verdict, compare
from harness.parity.outcome import Finding, Grade
from harness.parity.record import load
from harness.parity.telling import wording
from harness.parity.tiers import comparable
from harness.parity.tiers.bitwise import same_float
from harness.parity.tiers.comparable import admissible, must_agree
from harness.store.rundir import flatten
from tests.parity.arms import Arm, broken
from tests.parity.conftest import Bench
from tests.parity.corpus import FP32, OURS
from tests.parity.edits import edit_config, edit_json, edit_lines, next_float
from tests.parity.lab import CLEAN
from tests.support.mutants import finds

Edit = Callable[[Path], object]
CAPTURE = "capture/step-000001.safetensors"


def judged(bench: Bench, tmp_path: Path, edit: Edit) -> Verdict:
    """The clean pair, with the arm's directory changed."""
    edit(arm := bench.copy(OURS, tmp_path))
    return bench.held(arm, FP32)


REFUSALS: dict[str, tuple[Edit, str]] = {
    "failed": (lambda run: edit_json(run / "status.json", state="failed", reason="boom"), "failed, not done (boom)"),
    "never started": (lambda run: (run / "status.json").unlink(), "never started"),
    "stale": (lambda run: edit_json(run / "provenance.json", sources_digest="f" * 64), "it is stale"),
    "provenance gone": (lambda run: (run / "provenance.json").unlink(), "no sources_digest"),
    "summary gone": (lambda run: (run / "summary.json").unlink(), "no summary.json"),
    "summary damaged": (lambda run: (run / "summary.json").write_text("{"), "not valid JSON"),
    "metrics gone": (lambda run: (run / "metrics.jsonl").unlink(), "does not hold steps 1 to 12"),
    "last step missing": (lambda run: edit_lines(run, lambda lines: lines.pop()), "does not hold steps 1 to 12"),
    "a step twice": (lambda run: edit_lines(run, lambda lines: lines.insert(3, lines[3])), "each of them once"),
    "loss missing": (lambda run: edit_lines(run, lambda lines: lines[2].pop("loss")), "step 3 has no loss"),
    "capture truncated": (lambda run: os.truncate(path := run / CAPTURE, path.stat().st_size - 4), "truncated"),
    "other data": (lambda run: edit_lines(run, lambda lines: lines[6].update(data_digest="0")), "digest at step 7"),
    "other tokens": (lambda run: edit_lines(run, lambda lines: lines[0].update(tokens=1)), "tokens at step 1"),
    "other schedule": (lambda run: edit_lines(run, lambda lines: lines[11].update(lr=1.0)), "lr at step 12"),
    "other initial weights": (lambda run: edit_json(run / "summary.json", initial_weights="a"), "initial weights is a"),
    "other torch": (lambda run: edit_json(run / "provenance.json", versions={"torch": "2.12.0"}), "torch version"),
    "other processor": (lambda run: edit_json(run / "provenance.json", cpu_model="another"), "cpu_model is another"),
    "other threads": (lambda run: edit_json(run / "provenance.json", threads_per_rank=2), "threads_per_rank is 2"),
    "other model": (lambda run: edit_config(run, "model", rope_theta=1.0), "model.rope_theta is 1.0"),
    "a dtype of the future": (lambda run: edit_config(run, "dtype", compute="fp4"), "dtype.compute=fp4"),
    "a setting of the future": (lambda run: edit_config(run, "engine", overlap=3), "overlap=3, which is no setting"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_must_agree_is_named_and_refused(bench: Bench, tmp_path: Path, name: str) -> None:
    edit, says = REFUSALS[name]
    verdict = judged(bench, tmp_path, edit)
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert verdict.exit_code == 4
    assert says in verdict.sentence
    assert verdict.commands


def with_kernels(bench: Bench, left: dict[str, str], right: dict[str, str]) -> list[Finding]:
    """Findings of T0 about two runs whose records have these switches."""
    arm, control = (
        replace(record, provenance={**record.provenance, "kernels": kernels})
        for record, kernels in ((load(bench.run(OURS)), left), (load(bench.run(FP32)), right))
    )
    return [found for found in comparable.check(arm, control) if found.grade is Grade.bad]


def test_switches_that_choose_kernels_must_agree(bench: Bench) -> None:
    assert not with_kernels(bench, {"mkldnn": "True"}, {"mkldnn": "True", "sdp": "math"})
    (found,) = with_kernels(bench, {"mkldnn": "True, then False"}, {"mkldnn": "True"})
    assert (found.check, found.observed, found.allowed) == ("torch's mkldnn", "True, then False", "True")


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        ("train", {"param_norm_every": 0}),
        ("model", {"name": "renamed", "activation_checkpointing": True}),
        ("engine", {"prefetch": 3}),
        ("cluster", {"slots": 9, "partition": "other"}),
    ],
)
def test_what_may_differ_may(bench: Bench, tmp_path: Path, group: str, changes: dict[str, object]) -> None:
    assert judged(bench, tmp_path, lambda run: edit_config(run, group, **changes)).exit_code == 0


def test_the_same_data_on_each_rank_is_other_data(bench: Bench, tmp_path: Path) -> None:
    verdict = bench.held(broken(OURS, same_data=True), FP32)
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert "data_digest at step 1" in verdict.sentence


def test_every_setting_that_trains_must_agree() -> None:
    """By name, so that a new setting of these groups is refused until somebody frees it."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(OmegaConf.structured(Config), enum_to_str=True)
    assert isinstance(plain, dict)
    free = {key for key in flatten(plain) if not must_agree(key)}
    held_groups = {"model", "data", "optimizer", "train"}
    assert {key for key in free if key.split(".")[0] in held_groups} == {
        "model.name",
        "model.activation_checkpointing",
        "train.microbatch_size",
        "train.replicate",
        "train.param_norm_every",
    }


def test_sources_may_be_the_same_old_ones_in_both(bench: Bench, tmp_path: Path) -> None:
    """An archived pair is compared on request, never by default."""
    arm, control = bench.run(OURS), bench.run(FP32)
    assert compare(arm, control).outcome is Outcome.NOT_COMPARABLE
    assert compare(arm, control, sources=None).exit_code == 0
    verdict = judged(bench, tmp_path, lambda run: edit_json(run / "provenance.json", sources_digest="other"))
    assert "stale" in verdict.sentence
    assert "launch.rerun=stale" in verdict.commands[0]


@pytest.mark.parametrize(
    ("damage", "word"),
    [("never started", ""), ("stale", "launch.rerun=stale"), ("summary gone", "launch.rerun=always")],
)
def test_the_command_after_a_refusal_makes_the_run_again(damage: str, word: str, bench: Bench, tmp_path: Path) -> None:
    """A run that is done is not started by asking again, whatever its folder lost."""
    (command,) = judged(bench, tmp_path, REFUSALS[damage][0]).commands
    words = shlex.split(command)
    assert words[words.index("--from") + 2 :] == ([word] if word else [])


test_a_command_that_starts_nothing_is_found = finds(
    "The terminal",
    test_the_command_after_a_refusal_makes_the_run_again="""
        next: of a damaged run: The command after a damaged record starts nothing
            parity.telling.wording.ALWAYS: "launch.rerun=stale"
            (damage="summary gone", word="launch.rerun=always")
    """,
)
test_a_mutant_is_found = finds(
    "The comparator",
    test_switches_that_choose_kernels_must_agree="""
        kernels unread: Runs are compared whose program has chosen other kernels
            parity.tiers.comparable._kernels: lambda arm, control: []
            ()
            ^(AssertionError|ValueError)
    """,
    test_what_must_agree_is_named_and_refused="""
        words of the future: A verdict on a run with an unknown engine or dtype is a traceback
            parity.record.unknown_words: lambda _: []
            (name="a dtype of the future")
            ^KeyError: .*fp4
        settings of the future: A verdict passes over an engine's setting that nobody knows
            parity.record.unknown_settings: lambda _: []
            (name="a setting of the future")
    """,
)


def test_one_run_named_twice_is_a_bad_request(bench: Bench) -> None:
    with pytest.raises(BadRequest, match="named twice"):
        compare(bench.run(OURS), bench.run(OURS))


ORDERED = replace(OURS, numerics="ordered", strategy="optim", k=1)


def test_a_repetition_is_equal(bench: Bench) -> None:
    verdict = bench.held(replace(ORDERED, replicate=1), ORDERED)
    assert verdict.outcome is Outcome.EQUAL
    assert "every recorded bit" in verdict.sentence
    run, rows = load(bench.run(ORDERED), CLEAN), [row for row in verdict.evidence if row.tier == "T1"]
    (count,) = (row.count for row in rows if row.check == "gradient bits")
    several = wording.right_of(Outcome.EQUAL, run, run, [*rows, *rows], None, {}, (0, 0))
    assert re.findall(r"(\d+) gradient", several) == [str(2 * count)], "of several steps: one number"
    assert verdict.admissible.startswith("T1")


def test_bits_are_owed_across_strategies_only_while_sums_are_in_one_order(bench: Bench) -> None:
    """Real sums: ZeRO-1 and ZeRO-3 agree bit for bit at k = 1, and differ within rounding at k = 2."""
    for k, expected in ((1, Outcome.EQUAL), (2, Outcome.EQUIVALENT)):
        arm, control = (replace(ORDERED, k=k, strategy=s) for s in ("optim_grads_params", "optim"))
        assert bench.held(arm, control).outcome is expected
    wrong = replace(ORDERED, strategy="optim_grads_params")
    assert bench.held(wrong, replace(ORDERED, k=2)).outcome is Outcome.EQUIVALENT


def config(**changes: Any) -> dict[str, object]:
    return flatten(replace(Arm(), **changes).config())


IN_ORDER: dict[str, object] = {"numerics": "ordered"}
DETERMINISTIC: dict[str, object] = {"numerics": "deterministic"}
TIERS: list[tuple[str, dict[str, object], dict[str, object], str]] = [
    ("T2", {}, {}, "promises no order"),
    ("T1", DETERMINISTIC, DETERMINISTIC | {"replicate": 1}, "run twice"),
    ("T1", IN_ORDER | {"captures": (1, 2)}, IN_ORDER, "run twice"),
    ("T2", IN_ORDER, DETERMINISTIC, "one arm is numerics=ordered"),
    ("T2", DETERMINISTIC | {"strategy": "optim"}, DETERMINISTIC, "sharding.strategy differ"),
    ("T1", IN_ORDER | {"k": 1, "strategy": "no_shard"}, IN_ORDER | {"k": 1}, "rank order"),
    ("T1", IN_ORDER | {"strategy": "no_shard"}, IN_ORDER | {"strategy": "optim"}, "before ranks"),
    ("T1", IN_ORDER | {"strategy": "optim_grads"}, IN_ORDER, "before microbatches"),
    ("T2", IN_ORDER | {"strategy": "optim"}, IN_ORDER, "with k = 2"),
    ("T2", IN_ORDER | {"ranks": 4, "k": 1}, IN_ORDER | {"ranks": 2, "k": 1}, "world_size"),
    ("T2", IN_ORDER | {"ranks": 4, "k": 1}, IN_ORDER | {"ranks": 2, "k": 2}, "world_size"),
    ("T2", IN_ORDER | {"wire": "bf16"}, IN_ORDER, "dtype.grad_comm"),
    ("T2", IN_ORDER | {"engine": "single"}, IN_ORDER, "engine.name"),
    ("T2", IN_ORDER | {"engine": "deepspeed", "strategy": "optim"}, IN_ORDER | {"engine": "deepspeed"}, "differ"),
]


@pytest.mark.parametrize(("tier", "arm", "control", "says"), TIERS)
def test_the_tier_follows_from_the_configurations(
    tier: str, arm: dict[str, object], control: dict[str, object], says: str
) -> None:
    left, right = config(**arm), config(**control)
    assert admissible(left, right).tier == admissible(right, left).tier == tier
    assert says in admissible(left, right).reason


@pytest.mark.parametrize(("device", "tier"), [("cpu", "T1"), ("cuda", "T2")])
def test_user_buffers_choose_kernels_on_nccl_alone(device: str, tier: str) -> None:
    control = config(numerics="deterministic") | {"cluster.device": device}
    assert admissible(control | {"nccl_ub.mode": "auto"}, control).tier == tier


def test_floats_are_compared_by_bits() -> None:
    nan = float("nan")
    assert all(same_float(each, each) for each in (1.0, nan, None))
    assert not any(same_float(*pair) for pair in ((0.0, -0.0), (1.0, next_float(1.0)), (None, 1.0)))
