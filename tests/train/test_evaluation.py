"""Loss on held-out data: the same in every layout, without a trace in training, resumed, and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from harness.config.data_source import held_out_batches
from harness.config.schema import Fp8
from harness.engines.adapters import native
from harness.engines.adapters.single import SingleEngine
from harness.engines.base import evaluating
from harness.store.metrics import read_metrics
from harness.train.callbacks import Callback, EarlyStop
from tests.support.factory import layouts, small_config, train
from tests.support.mutants import kills
from tests.support.spawn import made_by, run_ranks
from tests.train.runs import assert_same_run, summary

SHARDED = layouts(
    native="no_shard optim optim_grads optim_grads_params", fsdp2="optim_grads_params", fsdp1="optim_grads_params",
    ddp="no_shard", megatron_fsdp="optim optim_grads_params", deepspeed="optim optim_grads_params",
)  # fmt: skip
CASES = SHARDED | {
    "native, fp8": {**SHARDED["native-optim_grads_params"], "dtype__fp8": Fp8.current},
    "fsdp2, fp8": {**layouts(fsdp2="optim_grads")["fsdp2-optim_grads"], "dtype__fp8": Fp8.current},
}
KEPT = ("loss", "grad_norm", "param_norm", "lr", "data_digest", "comm", "counters")
"""What training has with an evaluation as without."""


def both(rank: int, folder: Path, cases: Iterable[str]) -> None:
    """Every case with an evaluation after each step, and with none."""
    for case, every in product(cases, (0, 1)):
        changes = {"mesh__world_size": 2, "train__steps": 4, "train__param_norm_every": 1, **CASES[case]}
        train(small_config(measure__validate_every=every, **changes), folder / f"{case}-{every}", rank)


folder = made_by(both, 2, list(CASES))


def differences(folder: Path, case: str) -> list[Any]:
    plain, evaluated = (folder / f"{case}-{every}" for every in (0, 1))
    pairs = zip(read_metrics(plain / "metrics.jsonl"), read_metrics(evaluated / "metrics.jsonl"), strict=True)
    kept = [key for key in KEPT if key != "comm" or "fp8" not in case]  # maxima with FP8 are exchanged before
    found: list[Any] = [(a["step"], key, a[key], b[key]) for a, b in pairs for key in kept if a[key] != b[key]]
    weights = [summary(each)["final_weights"] for each in (plain, evaluated)]
    return found if weights[0] == weights[1] else [*found, weights]


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_with_and_without(folder: Path, case: str) -> None:
    assert differences(folder, case) == []


def test_layouts_agree_with_one_process(folder: Path, tmp_path: Path) -> None:
    train(small_config(train__steps=4, measure__validate_every=1), tmp_path)
    right = [each["validation"]["loss"] for each in read_metrics(tmp_path / "metrics.jsonl")]
    assert len(set(right)) == 4
    for case in ("native-no_shard", "fsdp2-optim_grads_params", "ddp-no_shard"):
        found = [each["validation"]["loss"] for each in read_metrics(folder / f"{case}-1" / "metrics.jsonl")]
        assert found == pytest.approx(right, rel=1e-6)


def test_held_out_batches_are_never_trained_on(tmp_path: Path) -> None:
    config = small_config(train__steps=3, measure__validation_batches=2)
    assert list(held_out_batches(config, 64)) == [7, 8], "of eight, of which three are trained on"
    with pytest.raises(ValueError, match=r"has 4 batches .* train.steps=3 uses 3, and measure.validation_batches=2"):
        held_out_batches(config, 32)
    config.measure.validation_path = "other.txt"
    assert list(held_out_batches(config, 16)) == [1, 2]


class Noisy(Callback):
    """Draws random numbers, as a dropout would."""

    def step(self, step: int, record: Mapping[str, Any], engine: Any) -> Mapping[str, float]:
        return {"drawn": torch.rand(1).item()}


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    config = small_config(train__steps=5, measure__validate_every=2, ckpt__keep_best=1)
    config.measure.callbacks = [f"{__name__}:Noisy"]
    torch.manual_seed(5)
    train(config, tmp_path / "straight")
    asked = iter([False, False, True])
    torch.manual_seed(5)
    train(config, tmp_path / "resumed", should_stop=lambda: next(asked))
    train(config, tmp_path / "resumed")
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
    runs = [read_metrics(tmp_path / each / "metrics.jsonl") for each in ("straight", "resumed")]
    assert [each["validation"] for each in runs[0]] == [each["validation"] for each in runs[1]]
    assert [each["validation"]["loss"] is None for each in runs[0]] == [True, False, True, False, True]
    told = summary(tmp_path / "resumed")["validation"]
    best = min((each for each in runs[0] if each["validation"]["loss"]), key=lambda each: each["validation"]["loss"])
    assert (told["best_step"], told["best_loss"]) == (best["step"], best["validation"]["loss"])
    assert told["perplexity"] == pytest.approx(torch.tensor(told["loss"]).exp().item(), rel=1e-5)


class Impatient(EarlyStop):
    patience = 2


def test_patience_counts_evaluations_without_a_fall() -> None:
    stop: Any = Impatient(small_config())
    losses = {2: 3.0, 4: 2.0, 6: 2.5, 8: 1.5, 10: 1.6, 12: 1.5}
    asked = [stop.evaluation(last, {s: loss for s, loss in losses.items() if s <= last}, None) for last in losses]
    assert asked == [False, False, False, False, False, True]


def test_a_run_stops_early_and_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([4.0, 3.0, 2.0, 2.5, 2.25])
    monkeypatch.setattr(SingleEngine, "evaluate", lambda self, batches: [next(told)])
    config = small_config(train__steps=7, measure__validate_every=1, ckpt__keep_best=2)
    config.measure.callbacks = [f"{__name__}:Impatient"]
    outcome = train(config, tmp_path)
    assert (outcome.status, outcome.step, outcome.saved) == ("done", 5, True)
    assert summary(tmp_path)["validation"] == pytest.approx(
        {"loss": 2.25, "perplexity": 9.487735836, "best_loss": 2.0, "best_step": 3}
    )
    assert sorted(int(each.name.removeprefix("step-")) for each in (tmp_path / "ckpt").iterdir()) == [3, 5]


def test_modes_and_random_numbers_are_as_before() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1).eval())
    before, modes = torch.get_rng_state(), [each.training for each in module.modules()]
    with evaluating(module, torch.device("cpu")):
        assert not any(each.training for each in module.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())
    assert [each.training for each in module.modules()] == modes == [True, True, False]


def unsent(rank: int, folder: Path) -> None:
    def evaluate(self: Any, batches: Any) -> list[float]:
        with native.evaluating(self.model, self.device):
            return [self.workload.loss(self.model, batch).item() for batch in batches]

    with mock.patch.object(native.NativeEngine, "evaluate", evaluate):
        both(rank, folder, ["native-optim"])


@kills("Held-out data", "gathers left out", "The step after an evaluation lacks the gathers of updated weights")
def test_a_step_that_sends_less_is_found(tmp_path: Path) -> None:
    run_ranks(unsent, 2, tmp_path)
    assert "comm" in json.dumps(differences(tmp_path, "native-optim"))
