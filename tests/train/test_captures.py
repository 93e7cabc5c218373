"""A run that is left to choose captures its first and last steps whole; a verdict holds them to the rule."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from harness.config.schema import Config
from harness.engines.protocol import Microbatch
from harness.models.workload import TokenWorkload
from harness.parity.alone import optimizer
from harness.parity.outcome import Grade
from harness.parity.record import load
from harness.parity.tiers import bitwise
from harness.store.metrics import read_metrics
from tests.support.factory import freeze, small_config, train
from tests.train.runs import described

STEPS = 5
SPREAD = [1, STEPS]


def configured(**changes: object) -> Config:
    return small_config(train__steps=STEPS, measure__capture_steps=None, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one training, in two and in one microbatch."""
    paths = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    for path, size in zip(paths, (4, 8), strict=True):
        config = configured(train__microbatch_size=size, measure__step_checks=True)
        train(config, path)
        freeze(config, path)
    return paths


def test_first_last_and_some_between_are_captured_whole(runs: tuple[Path, Path]) -> None:
    for run in map(load, runs):
        assert run.config["measure.capture_steps"] == run.config["measure.update_steps"] == SPREAD
        assert sorted(run.captures) == sorted(run.updates) == sorted(run.weights) == SPREAD
        assert sorted(run.moments) == SPREAD[1:], "before step 1 there are none"
        assert [p for p in run.problems if "capture" in p] == []
        steps = {finding.step for finding in optimizer.check(run)}
        assert steps == set(SPREAD), "the rule is asked of whole tensors from any of them"
        assert all(finding.grade is Grade.ok for finding in optimizer.check(run))
    bits = bitwise.check(load(runs[0]), load(runs[1]), {}, {})[-1]
    assert (bits.check, bits.grade) == ("final weights", Grade.bad), "last weights are compared by their digests"


def test_weights_decay_where_the_workload_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one's own may leave a matrix alone; by the matrices it has, its update would be wrong."""
    own_rule = lambda self, name, shape: len(shape) > 1 and "embedding" not in name  # noqa: E731
    monkeypatch.setattr(TokenWorkload, "decays", own_rule)
    config = configured(optimizer__weight_decay=0.1)
    train(config, tmp_path)
    freeze(config, tmp_path)
    run = load(tmp_path)
    assert {finding.grade for finding in optimizer.check(run)} == {Grade.ok}
    silent = replace(run, summary={key: value for key, value in run.summary.items() if key != "decayed"})
    wrong = {finding.tensor for finding in optimizer.check(silent) if finding.grade is not Grade.ok}
    assert wrong == {"embedding.weight"}


def rewritten(source: Path, target: Path, change: Callable[[dict[str, np.ndarray], dict[str, Any]], object]) -> Path:
    """Copy of a run in which `change` edited tensors and description of every captured step."""
    shutil.copytree(source, target)
    for path in sorted((target / "capture").glob("step-*.safetensors")):
        tensors, facts = dict(load_file(path)), described(path)
        change(tensors, facts)
        save_file(tensors, path, {"harness": json.dumps(facts)})
    return target


GONE: dict[str, tuple[Callable[[dict[str, np.ndarray], dict[str, Any]], object], str]] = {
    "plan": (lambda _, facts: facts.pop("plan"), "which steps were to be captured is not known"),
    "a part of the plan": (lambda _, facts: facts["plan"].pop("updates"), "updates"),
    "a step": (lambda _, facts: facts["plan"]["gradients"].append(2), r"step-000002.safetensors is missing"),
    "the description": (lambda _, facts: facts.clear(), "its description is damaged"),
    "terms": (lambda _, facts: facts.pop("terms"), "damaged description: KeyError"),
    "terms of one": (lambda _, facts: facts["terms"].popitem(), "damaged description: KeyError"),
    "kinds of terms": (lambda _, facts: facts.update(terms=3), "its description is damaged: .*terms"),
}


@pytest.mark.parametrize("what", GONE)
def test_a_part_of_a_captured_step_that_is_gone_is_damage(runs: tuple[Path, Path], tmp_path: Path, what: str) -> None:
    change, said = GONE[what]
    problems = load(rewritten(runs[0], tmp_path / "run", change)).problems
    assert any(re.search(said, problem) for problem in problems), problems


# -- what captures cost ------------------------------------------------------------------------------------------------


HOOKS = ("_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_post_accumulate_grad_hooks")


def hooks_of(model: torch.nn.Module) -> int:
    return sum(
        len(getattr(each, kind, None) or ()) for each in [*model.modules(), *model.parameters()] for kind in HOOKS
    )


def test_a_step_that_is_not_captured_pays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hook, no look at the engine, no file; in a run that captures a step, only that step has any."""
    counts: dict[bool, list[int]] = {True: [], False: []}
    asked: list[str] = []
    captures = False

    def watch(engine: Any) -> Any:
        inner, seen, gradients = engine.forward_backward, engine.seen, engine.named_gradients

        def forward_backward(batch: Microbatch, *, last: bool) -> Tensor:
            counts[captures].append(hooks_of(engine.model))
            loss: Tensor = inner(batch, last=last)
            return loss

        monkeypatch.setattr(engine, "forward_backward", forward_backward)
        monkeypatch.setattr(engine, "seen", lambda: asked.append("seen") or seen())
        monkeypatch.setattr(engine, "named_gradients", lambda: asked.append("gradients") or gradients())
        return engine

    base = small_config(measure__capture_limit_mib=0, train__global_batch_size=2)
    train(base, tmp_path / "off", wrap_engine=watch)
    assert asked == []
    assert not (tmp_path / "off" / "capture").exists(), "beyond the limit"
    captures, base.measure.capture_limit_mib = True, 1
    base.measure.capture_steps = [2]
    train(base, tmp_path / "on", wrap_engine=watch)
    assert asked == ["seen", "gradients"]
    first, second, third = counts[True]
    assert first == third == counts[False][0]
    assert counts[False] == [first] * 3
    assert second > first
    on, off = (read_metrics(tmp_path / which / "metrics.jsonl") for which in ("on", "off"))
    assert [list(record) for record in on] == [list(record) for record in off]
    assert [record["loss"] for record in on] == [record["loss"] for record in off]


def test_a_witness_of_a_diverged_step_is_written(tmp_path: Path) -> None:
    """An engine that can be looked at, and a local gradient that is nan."""

    def poison(engine: Any) -> Any:
        engine.weights["head.norm.weight"].register_hook(lambda gradient: gradient * math.nan)
        return engine

    train(small_config(measure__capture_steps=[1], train__steps=1), tmp_path, wrap_engine=poison)
    facts = described(tmp_path / "capture/step-000001.safetensors")
    assert facts["terms"]["head.norm.weight"] == "nan"
    assert math.isfinite(facts["terms"]["embedding.weight"])
