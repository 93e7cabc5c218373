"""Requests for timed runs: what is refused, with its fix, and what is implied."""

from __future__ import annotations

import pytest

from harness.config.errors import BadRequest
from harness.config.schema import CkptPolicy, MeasureMode
from tests.support.composing import compose


def refusals(*overrides: str) -> list[str]:
    with pytest.raises(BadRequest) as caught:
        compose(["measure=bench", *overrides])
    return [str(violation) for violation in caught.value.violations]


def test_timing_implies_what_it_needs() -> None:
    config = compose(["measure=bench"]).typed
    assert config.measure.mode is MeasureMode.bench
    assert config.ckpt.policy is CkptPolicy.none
    assert config.measure.capture_steps == []
    assert 3 <= config.measure.warmup_steps < config.train.steps


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("measure.capture_steps=[1]", "measure.capture_steps=[]"),
        ("measure.update_steps=[2]", "measure.update_steps=[]"),
        ("ckpt=last", "ckpt=none"),
        ("wandb=offline", "wandb=disabled"),
        ("train.steps=5", "train.steps=15"),
        ("train.steps=6", "train.steps=15"),
        ("measure.warmup_steps=2", "measure.warmup_steps=3"),
        ("train.param_norm_every=5", "measure=default"),
    ],
)
def test_a_refusal_names_its_knob_and_its_fix(override: str, fix: str) -> None:
    (found,) = refusals(override)
    assert found.startswith(override.partition("=")[0].replace("ckpt", "ckpt.policy").replace("wandb", "wandb.mode"))
    assert fix in found


@pytest.mark.parametrize(
    "overrides", [["train.steps=7"], ["measure.warmup_steps=3", "train.steps=5"], ["wandb=disabled", "ckpt=none"]]
)
def test_the_smallest_requests_that_are_fine(overrides: list[str]) -> None:
    compose(["measure=bench", *overrides])


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ("measure.trace_steps=[4,21]", "measure.trace_steps=[4]"),
        ("measure.trace_steps=[2,2]", "needs distinct steps"),
        ("measure=trace measure.trace_ranks=[2]", "numbers from 0 to 1; null: all"),
        ("measure=trace measure.trace_ranks=[]", "names no rank"),
        ("measure=trace measure.memory_snapshot=true", "on a CPU the trace itself has every allocation"),
        ("measure.memory_snapshot=true", "measure=trace"),
        ("measure.trace_ranks=null", "measure=trace"),
        ("measure=bench measure.trace_steps=[7]", "measure.trace_steps=[]"),
        ("measure=bench measure.validate_every=5", "has no effect"),
        ("ckpt.keep_best=1", "measure.validate_every=10"),
        ("measure.validation_batches=2", "measure.validate_every=10"),
        (
            "measure.validate_every=5 data=synthetic data.num_sequences=320",
            "data=synthetic has 20 batches of train.global_batch_size=16, of which train.steps=20 uses 20, and"
            " measure.validation_batches=1 are to be held out",
        ),
    ],
)
def test_what_no_profile_has_is_refused(overrides: str, fix: str) -> None:
    with pytest.raises(BadRequest) as caught:
        compose(overrides.split())
    assert any(fix in str(each) for each in caught.value.violations), str(caught.value)


def test_a_profile_of_all_ranks_and_of_cuda_memory() -> None:
    compose(["measure=trace", "measure.trace_ranks=null", "mesh.world_size=2"])
    with pytest.raises(BadRequest) as caught:
        compose(["measure=trace", "measure.memory_snapshot=true", "cluster.device=cuda", "mesh.world_size=4096"])
    assert "memory_snapshot" not in str(caught.value), "too few devices are all that is wrong"


@pytest.mark.parametrize("override", ["measure.warmup_steps=5", "study.order_seed=1"])
def test_settings_of_timing_have_no_effect_elsewhere(override: str) -> None:
    with pytest.raises(BadRequest, match="measure=bench"):
        compose([override])
