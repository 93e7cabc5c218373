"""Every step of every engine that can be seen is checked, and a later fault is found there, at its step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config.schema import CkptPolicy, Config, Dtype, EngineName, OptimizerName, OuterStrategy, Strategy
from harness.engines.protocol import Engine
from harness.parity.alone import optimizer as rule
from harness.parity.outcome import Finding, Grade
from harness.parity.record import Record, load
from harness.probe.step_checks.sketch import SKETCHES, Signs, Sketch
from harness.store import check_stream
from harness.store.check_stream import ONCE, Stream
from harness.store.rundir import RunDir, read_summary
from tests.support.factory import freeze, layouts, small_config, train, with_dtypes
from tests.support.spawn import run_ranks
from tests.train.runs import Passing

ROUNDED = 5e-7
"""Relative to the terms: what sums of a few fp32 numbers may be off by in one of some hundred projections."""

SEEN: dict[str, dict[str, Any]] = {
    **layouts(
        native="no_shard optim optim_grads optim_grads_params",
        fsdp1="no_shard optim_grads_params",
        deepspeed="optim optim_grads optim_grads_params",
        megatron_fsdp="optim optim_grads_params",
    ),
    "native-hybrid": {
        "engine__name": EngineName.native,
        "sharding__strategy": Strategy.optim_grads_params,
        "sharding__outer": OuterStrategy.optim,
        "mesh__dp_outer": 2,
    },
    "fsdp2": {"engine__name": EngineName.fsdp2, "sharding__strategy": Strategy.optim_grads_params},
    "ddp": {"engine__name": EngineName.ddp},
}


def configured(kind: str, **changes: Any) -> Config:
    usual = {"mesh__world_size": 2, "measure__step_checks": True, "measure__again": 0.0, "train__steps": 5}
    return small_config(**{**usual, **SEEN[kind], **changes})


def trains(rank: int, folder: str, kinds: list[str], changes: dict[str, Any]) -> None:
    for kind in kinds:
        train(configured(kind, **changes), Path(folder, kind), rank)
        if kind != "fsdp1-no_shard":  # microbatches are added up in bf16
            train(with_dtypes(configured(kind, **changes), Dtype.bf16, Dtype.fp32), Path(folder, f"{kind}-bf16"), rank)


def read(run_dir: Path) -> Stream:
    found = check_stream.read(run_dir)
    assert found is not None
    return found


UNEVEN = {"model__vocab_size": 65, "model__ffn_dim": 47, "optimizer__weight_decay": 0.1}
"""Rows that two ranks cannot share evenly: FSDP2 pads them in its first forward, and has other memory from then on."""


FEW = ["native-no_shard", "native-optim_grads_params", "fsdp2"]
"""For further optimizers; `make test-all` takes every engine with each."""


@pytest.mark.parametrize(
    ("optimizer", "changes", "kinds"),
    [
        pytest.param(OptimizerName.adamw, {}, list(SEEN), id="adamw"),
        pytest.param(OptimizerName.sgd, {}, FEW, id="sgd, few"),
        pytest.param(OptimizerName.adam, UNEVEN, FEW, id="adam, uneven rows, few"),
        pytest.param(OptimizerName.sgd, {}, list(SEEN), id="sgd", marks=pytest.mark.full),
        pytest.param(OptimizerName.adam, UNEVEN, list(SEEN), id="adam, uneven rows", marks=pytest.mark.full),
    ],
)
def test_every_step_of_every_engine_is_checked(
    tmp_path: Path, optimizer: OptimizerName, changes: dict[str, Any], kinds: list[str]
) -> None:
    usual = {"optimizer__name": optimizer, "optimizer__clip_norm": 0.5, "measure__capture_steps": [4]}
    changes = {**usual, "measure__update_steps": [4], **changes}
    run_ranks(trains, 2, str(tmp_path), kinds, changes)
    for run in tmp_path.iterdir():
        stream = read(run)
        assert len(stream.steps) == 6, "five, and one at the end"
        assert (stream.column("sum")[:5] <= ROUNDED).all(), (run.name, stream.column("sum"))
        assert (stream.column("gather")[:5] <= 1e-12).all(), (run.name, stream.column("gather"))
        assert (stream.column("kept") == 0).all(), run.name
        assert (stream.column("replicas")[:5] <= 1e-12).all(), run.name
        is_ahead = "megatron" in run.name and optimizer is not OptimizerName.sgd  # its Adam is one step ahead
        assert (stream.column("rule")[:5] <= 1).all() != is_ahead, (run.name, stream.column("rule"))
        assert (stream.column("rule")[:5] > 0).all(), run.name
        assert (stream.column("norm")[:5] <= 1e-6).all(), run.name
        assert np.flatnonzero(~np.isnan(stream.column("again"))).tolist() == [3], "the last captured step"
        for once in ONCE:
            assert np.flatnonzero(~np.isnan(stream.column(once))).tolist() == [3], "the last captured step"
            most = 20 * ROUNDED if run.name == "deepspeed-optim_grads_params" else ROUNDED  # adds in another order
            assert stream.column(once)[3] <= (1e-9 if run.name.endswith("bf16") else most), (run.name, once)
    for kind in PLACED.intersection(kinds):
        freeze(configured(kind, **changes), tmp_path / kind)
        assert wrong_updates(load(tmp_path / kind)) == [], kind


PLACED = {"native-optim_grads_params", "native-hybrid", "fsdp2", "ddp"}
"""Layouts whose captured updates are held to the rule whole, by the weights and moments that they began with."""


def wrong_updates(run: Record) -> list[Finding]:
    """Findings of captured updates that do not pass; each tensor has one."""
    found = rule.check(run)
    assert {(each.tensor, each.step) for each in found} == {(name, 4) for name in run.captures[4].tensors}
    assert run.config["optimizer.name"] == "sgd" or rule.check(replace(run, moments={})) == [], "not taken for nought"
    return [each for each in found if each.grade is not Grade.ok]


def looks_or_not(rank: int, folder: str) -> None:
    for kind in ("native-no_shard", "native-hybrid"):
        for looks in (True, False):
            captured = [5] if looks else []
            config = configured(kind, measure__step_checks=looks, measure__capture_steps=captured)
            train(config, Path(folder, f"{kind}-{looks}"), rank)


def test_who_looks_changes_nothing_of_what_is_counted(tmp_path: Path) -> None:
    """The second leg of an all-reduce is the engine's, whoever asks for the gradients first."""
    run_ranks(looks_or_not, 2, str(tmp_path))
    for kind in ("native-no_shard", "native-hybrid"):
        looked, left = (read_summary(RunDir(tmp_path / f"{kind}-{looks}")) for looks in (True, False))
        assert looked is not None
        assert left is not None
        assert looked["collectives"] == left["collectives"]
        assert sum(row["bytes"] for row in looked["collectives"]) > 0


def passes(rank: int, folder: str, kinds: list[str]) -> dict[str, float]:
    """How often a step looks at a weight's elements, by engine."""
    looked, sketch = [0], Signs.sketch

    def counting(signs: Signs, name: str, shape: Any, piece: Tensor, *args: Any, **named: Any) -> Sketch:
        looked[0] += piece.numel()
        return sketch(signs, name, shape, piece, *args, **named)

    found, Signs.sketch = {}, counting  # type: ignore[method-assign] # in this rank alone
    for kind in kinds:
        counts = []
        for steps in (3, 5):
            looked[0] = 0
            once = {"train__global_batch_size": 4, "measure__capture_steps": [1]}
            config = configured(kind, train__steps=steps, **once)
            train(config, Path(folder, f"{kind}-{steps}"), rank)
            counts.append(looked[0])
        found[kind] = (counts[1] - counts[0]) / 2
    return found


def test_weights_in_their_place_are_looked_at_once_before_an_update(tmp_path: Path) -> None:
    """Local gradients, weights in the forward and after the update, and half of the averaged gradients a rank: what
    the step begins with is what its forward computes with. Of FSDP2's it is looked at in shards."""
    one, other = run_ranks(passes, 2, str(tmp_path), ["native-no_shard", "ddp", "fsdp2"])
    whole = sum(math.prod(tensor.shape) for tensor in read(tmp_path / "ddp-3").tensors)
    assert {kind: (one[kind] + other[kind]) / whole for kind in one} == {"native-no_shard": 7, "ddp": 7, "fsdp2": 7}


def test_sketches_of_all_layouts_agree(tmp_path: Path) -> None:
    """To what their own sums are rounded by: the layouts add local gradients in other orders."""
    run_ranks(trains, 2, str(tmp_path), list(SEEN), {"train__steps": 2, "optimizer__name": OptimizerName.sgd})
    alike = len(check_stream.tensor_columns(SKETCHES)) - len(check_stream.MOMENTS)  # which are of one run alone
    rows = {kind: read(tmp_path / kind).kept[1][..., :alike] for kind in SEEN}
    first = rows.pop("ddp")
    for kind, found in rows.items():
        assert found.shape == first.shape
        np.testing.assert_allclose(found[0], first[0], rtol=2e-4, atol=1e-6, err_msg=kind)


# -- late faults -------------------------------------------------------------------------------------------------------

FAULTY_FROM = 3


class Faulty(Passing):
    """Does something wrong from a step on, at one place of it."""

    def __init__(self, engine: Engine, when: str, fault: Callable[[Faulty], None]) -> None:
        super().__init__(engine)
        self.when, self.fault = when, fault

    def at(self, place: str, number: int) -> None:
        if place == self.when and number >= FAULTY_FROM:
            with torch.no_grad():
                self.fault(self)

    def step(self, lr: float) -> float:
        norm = super().step(lr)
        self.at("after step", self.number - 1)
        return norm

    def forward_backward(self, batch: Any, *, last: bool) -> Tensor:
        self.at("before forward", self.number)
        loss = self.engine.forward_backward(batch, last=last)
        self.at("after backward", self.number if last else 0)
        return loss

    def held(self, kind: str) -> list[Tensor]:
        """This rank's weights, or moments of a kind."""
        found = self.engine.state().tensors.items()
        return [getattr(t, "_local_tensor", t) for key, t in found if key.startswith(kind) or key.endswith(kind)]


def rounds_reduced_gradients(engine: Faulty) -> None:
    for gradient in engine.local_gradients().values():
        gradient.copy_(gradient.bfloat16())


def rounds_momentum(engine: Faulty) -> None:
    for moment in engine.held("/exp_avg"):
        moment.copy_(moment.bfloat16())


def alters_an_element(engine: Faulty) -> None:
    """After the step was looked at for what it begins with."""
    if engine.number == 4:
        engine.held("weights/")[-1].view(-1)[5] += 1e-3


def alters_rows(engine: Faulty, half: int) -> None:
    """Of the second rank's averaged gradients alone."""
    if torch.distributed.get_rank() == 1:
        for gradient in engine.local_gradients().values():
            rows = gradient.view(len(gradient), -1)
            rows[half * len(rows) // 2 : (half + 1) * len(rows) // 2] *= 1.01


LATE = {
    "rounds_reduced_gradients": ("after backward", rounds_reduced_gradients, "sum", 3),
    "rounds_momentum": ("after step", rounds_momentum, "rule", 3),
}
"""A fault of gradients and one of the optimizer; those of the corpus are found so in tests/study/test_late.py."""
OF_A_COPY = {
    "rows_that_it_looks_at": ("after backward", partial(alters_rows, half=1), "sum", 3),
    "rows_that_the_other_looks_at": ("after backward", partial(alters_rows, half=0), "replicas", 3),
}
"""Where ranks keep copies, each looks at some of the rows of gradients; all of the weights that come of them."""
ELEMENT = "before forward", alters_an_element
FAULTS = {
    "native-optim_grads_params": LATE | {"an_element": (*ELEMENT, "gather", 4)},
    "ddp": LATE | OF_A_COPY | {"an_element": (*ELEMENT, "kept", 4)},  # its forwards compute with what it keeps
}


def faulty(rank: int, folder: str, kind: str) -> None:
    for name, (when, fault, *_) in FAULTS[kind].items():
        wrong = lambda engine, when=when, fault=fault: Faulty(engine, when, fault)  # noqa: E731
        train(configured(kind), Path(folder, name), rank, wrap_engine=wrong)


@pytest.mark.parametrize("kind", FAULTS)
def test_what_goes_wrong_later_is_there_at_its_step(tmp_path: Path, kind: str) -> None:
    run_ranks(faulty, 2, str(tmp_path), kind)
    limits = {"sum": ROUNDED, "gather": 1e-9, "kept": 1e-9, "replicas": 1e-9, "rule": 1.0}
    for name, (*_, column, step) in FAULTS[kind].items():
        stream = read(tmp_path / name)
        first = {check: np.flatnonzero(~(stream.column(check) <= limit)) for check, limit in limits.items()}
        beyond = {check: int(found[0]) + 1 for check, found in first.items() if len(found) and found[0] < 5}
        assert beyond.get(column) == step, (name, beyond)
        assert min(beyond.values()) == step, (name, beyond)


# -- resuming ----------------------------------------------------------------------------------------------------------


SPOILED = {"weights": [f"after_{number}" for number in range(SKETCHES)], "moments": [check_stream.MOMENTS[1]]}
"""Columns of what a step left, by what a checkpoint that was saved wrong is made to differ in."""


def resumes(rank: int, folder: str, spoil: str) -> None:
    config = configured("native-optim_grads", ckpt__policy=CkptPolicy.last)
    stopping = iter([False, False, True])
    train(config, Path(folder), rank, should_stop=lambda: next(stopping))
    if spoil and rank == 0:
        path = Path(folder, "step_checks", "tensors.f64")
        names = check_stream.tensor_columns(SKETCHES)
        table = np.fromfile(path).reshape(-1, len(names))
        table[:, [names.index(name) for name in SPOILED[spoil]]] *= 1 + 1e-6
        path.write_bytes(table.tobytes())
    torch.distributed.barrier()
    train(config, Path(folder), rank)


@pytest.mark.parametrize("spoil", ["", *SPOILED])
def test_a_resumed_run_begins_with_what_its_last_step_left(tmp_path: Path, spoil: str) -> None:
    run_ranks(resumes, 2, str(tmp_path), spoil)
    kept = read(tmp_path).column("kept")
    assert len(kept) == 6
    assert (kept[3] > 1e-9) == bool(spoil), kept
    assert not np.isnan(kept).any()


def clips_wrongly(rank: int, folder: str, optimizer: OptimizerName) -> None:
    changes = {"optimizer__name": optimizer, "optimizer__momentum": 0.9, "optimizer__clip_norm": 0.1}
    config = configured(
        "native-optim_grads", fault__name="tests.faults.update:clip_bound", fault__begins_at=3, **changes
    )
    train(config, Path(folder), rank)


@pytest.mark.parametrize("optimizer", [OptimizerName.sgd, OptimizerName.adamw])
def test_gradients_clipped_by_another_bound_are_no_fault_of_the_rule(tmp_path: Path, optimizer: OptimizerName) -> None:
    """Clipped to twice what was asked for, from step 3 on."""
    run_ranks(clips_wrongly, 2, str(tmp_path), optimizer)
    stream = read(tmp_path)
    assert (stream.column("norm")[:2] <= 1e-6).all()
    np.testing.assert_allclose(stream.column("norm")[2:5], 1.0, rtol=1e-5)
    assert (stream.column("rule")[:5] <= 1).all(), stream.column("rule")
