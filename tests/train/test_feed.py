"""What the engine is given is held against the data source: a loader that feeds anything else is found at its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from harness import control
from harness.config.schema import Config, DataKind, Dtype, EngineName, Strategy
from harness.data import reread
from harness.data.loader import Loader
from harness.data.order import sequence_at
from harness.data.sources import FileSource, SyntheticSource, open_source
from harness.parity import judgement
from harness.parity.alone import every_step
from harness.parity.outcome import Grade, Outcome, Stage
from harness.parity.record import Record, load
from harness.parity.tiers.arithmetic import Arithmetic
from tests.support.factory import freeze, small_config, train, with_dtypes
from tests.support.mutants import finds
from tests.support.spawn import made_by

STEPS, BEGINS = 8, 7
Batch = list[tuple[Any, Any]]
Wrong = Callable[[Batch], Batch]


def changed(batch: Batch, tokens: Any, targets: Any, only: int | None = None) -> Batch:
    return [
        (tokens(rows[0]), targets(rows[1])) if only in (None, number) else rows for number, rows in enumerate(batch)
    ]


def kept(rows: Any) -> Any:
    return rows


def rolled(rows: Any) -> Any:
    return np.roll(rows, 1, axis=1)


def another_first(rows: Any) -> Any:
    """Only the first of a row is another token: the last, which no other row tells of, is right."""
    return np.concatenate([(rows[:, :1] + 1) % 8, rows[:, 1:]], axis=1)


CASES: dict[str, tuple[Wrong, int]] = {
    "right": (kept, 1),
    "tokens": (lambda batch: changed(batch, rolled, kept), 1),
    "a token": (lambda batch: changed(batch, another_first, kept), 1),
    "targets": (lambda batch: changed(batch, kept, another_first), 1),
    "a microbatch": (lambda batch: changed(batch, rolled, rolled, only=len(batch) - 1), 1),
    "order": (lambda batch: batch[::-1], 1),
    "one rank": (lambda batch: changed(batch, rolled, rolled), 2),
}
"""What a loader does to a batch, and the first of the ranks on which it does."""


def wrong_loader(case: str, once: bool = False) -> Any:
    """In place of every loader's `batch` on a rank."""
    spoil, first = CASES[case]
    right = Loader.batch

    def batch(loader: Loader, step: int) -> Batch:
        acts = step == BEGINS if once else step >= BEGINS
        found = right(loader, step)
        return spoil(found) if acts and loader.rank + 1 >= first else found

    return mock.patch.object(Loader, "batch", batch)


def sources(root: Path) -> dict[type, Config]:
    """A run on each source of the harness; its sequences are read once."""
    np.random.default_rng(0).integers(0, 64, 3000).astype("<u2").tofile(root / "tokens.bin")
    tokens = {"data__kind": DataKind.tokens, "data__path": str(root / "tokens.bin")}
    return {SyntheticSource: config_of("one"), FileSource: config_of("one", **tokens)}


def wrong_source(source: type, config: Config) -> Any:
    """In place of every source of a class: what is first read in step 7 or later begins a token late."""
    right, first = source.__getitem__, (BEGINS - 1) * config.train.global_batch_size
    count = open_source(config).num_sequences
    early = {sequence_at(position, count, config.data.order_seed) for position in range(first)}

    def held(self: Any, index: int) -> Any:
        return right(self, index) if index in early else np.roll(right(self, index), -1)

    return mock.patch.object(source, "__getitem__", held)


class Own:
    """A user's data source."""

    num_sequences = 40

    def __init__(self, data: Any) -> None:
        self.seq_len = data.seq_len

    def __getitem__(self, index: int) -> Any:
        return (np.arange(self.seq_len + 1) * (index + 3)) % 61


ENGINES: dict[str, dict[str, Any]] = {
    "native": {"engine__name": EngineName.native, "sharding__strategy": Strategy.optim_grads_params},
    "fsdp2": {"engine__name": EngineName.fsdp2, "sharding__strategy": Strategy.optim_grads_params},
    "ddp": {"engine__name": EngineName.ddp, "data__kind": DataKind.ext, "data__target": f"{__name__}:Own"},
    "tensor-parallel": {"engine__name": EngineName.native, "mesh__tp": 2},
}


PAIRS = [(engine, case) for engine in ENGINES for case in CASES if engine == "native" or case in ("right", "one rank")]
PAIRS += [(engine, "targets") for engine in ENGINES if engine != "native"]


def config_of(engine: str, **changes: Any) -> Config:
    usual = {"train__steps": STEPS, "measure__capture_steps": [], "train__microbatch_size": 2}
    return small_config(**{**usual, **ENGINES.get(engine, {}), **changes})


def trains(rank: int, folder: Path) -> None:
    for engine, case in PAIRS:
        with wrong_loader(case):
            run(config_of(engine, mesh__world_size=2), folder / engine / case, rank)
    with wrong_loader("tokens", once=True):
        run(config_of("native", mesh__world_size=2), folder / "native" / "once", rank)
    config = with_dtypes(config_of("native", mesh__world_size=2, **HOT), Dtype.bf16, Dtype.fp32)
    for case in ("right", "targets"):
        with wrong_loader(case):
            run(config, folder / "hot" / case, rank)


HOT = {"measure__step_checks": True, "measure__capture_steps": None, "optimizer__lr": 0.3}


def run(config: Config, path: Path, rank: int = 0) -> None:
    freeze(config, path)
    train(config, path, rank)


runs = made_by(trains, 2)


def found(run_dir: Path) -> list[tuple[int | None, Stage, int]]:
    wrong = [each for each in every_step.check_data(load(run_dir)) if each.grade is Grade.bad]
    return [(each.step, each.stage, each.count) for each in wrong]


@pytest.mark.parametrize(("engine", "case"), PAIRS)
def test_a_loader_that_feeds_something_else_is_found(runs: Path, engine: str, case: str) -> None:
    """A tensor-parallel pair has one place among those with data: there is no second."""
    is_right = case == "right" or (engine, case) == ("tensor-parallel", "one rank")
    assert found(runs / engine / case) == ([] if is_right else [(BEGINS, Stage.data, 2)])


def test_once_is_one_step(runs: Path) -> None:
    assert found(runs / "native" / "once") == [(BEGINS, Stage.data, 1)]


def verdict_of(arm: Record, control: Record) -> Any:
    return judgement.Judgement(arm, control, []).verdict()


def test_in_hot_training_of_16_bits_it_is_different(runs: Path) -> None:
    right, wrong = load(runs / "hot" / "right"), load(runs / "hot" / "targets")
    for pair in ((wrong, right), (right, wrong)):
        verdict = verdict_of(*pair)
        first = verdict.findings[0]
        assert (verdict.outcome, first.check, first.step) == (Outcome.DIFFERENT, every_step.FED, BEGINS)
        assert f"in {wrong.name}, it was fed other tokens" in verdict.sentence
    clean = verdict_of(right, replace(right, name="another"))
    assert clean.outcome is Outcome.EQUAL


# -- mutants -----------------------------------------------------------------------------------------------------------


def wrong_feeds(root: Path) -> Iterator[str]:
    """Every case by one rank with four microbatches."""
    for case in CASES:
        with wrong_loader(case):
            run(config_of("one"), root / case)
        wanted = [] if case in ("right", "one rank") else [(BEGINS, Stage.data, 2)]
        if found(root / case) != wanted:
            yield f"{case}: {found(root / case)}"
    for source, config in sources(root).items():
        with wrong_source(source, config):
            run(config, root / source.__name__)
        if found(root / source.__name__) != [(BEGINS, Stage.data, 2)]:
            yield f"{source.__name__}: {found(root / source.__name__)}"


def wrong_ranks(_: Path) -> Iterator[str]:
    """What is read again is what every rank's loader gives, in every layout."""
    for ranks, size in ((1, 2), (2, 1), (2, 4), (4, 2)):
        config = config_of("native", mesh__world_size=ranks, train__microbatch_size=size)
        for rank, step in product(range(ranks), (1, 3, 20)):
            given = [np.c_[tokens, targets[:, -1:]] for tokens, targets in Loader(config, rank).batch(step)]
            if not np.array_equal(reread.Reread(config, rank).sequences(step), np.concatenate(given)):
                yield f"rank {rank} of {ranks} in step {step}"


def wrong_verdicts(root: Path) -> Iterator[str]:
    """A run that was fed wrongly, and two that do not say, or not of all steps, what they were fed."""
    with wrong_loader("targets"):
        run(config_of("one", measure__step_checks=True), root / "wrong")
    wrong = load(root / "wrong")
    if verdict_of(wrong, wrong).outcome is not Outcome.DIFFERENT:
        yield "two runs that were both fed wrongly pass"
    digests = list(wrong.columns["data_digest"])
    for known, until in ((0, 0), (4, 4), (8, 8)):
        columns = {**wrong.columns, "fed_digest": [*digests[:known], *[None] * (STEPS - known)]}
        mended = replace(wrong, columns=columns)
        if every_step.checked_until(mended, Arithmetic.of(mended.config)) != until:
            yield f"fed right in {known} steps, otherwise here"
    if every_step.checked_until(wrong, Arithmetic.of(wrong.config)) != BEGINS - 1:
        yield "checked, though fed wrongly"


def wrong_peers(_: Path) -> Iterator[str]:
    """Tensor-parallel ranks share their data: the one that got other data is heard."""
    right, wrong = [0, 5, 5, 0], [0, 5, 6, 0]
    for rows in ([right, wrong], [wrong, right]):
        if control._fed_otherwise(rows) != wrong:
            yield f"{rows}"
    if control._fed_otherwise([right, right]) != right:
        yield "the right ones"


test_a_mutant_is_found = finds(
    "What a run is fed",
    wrong_feeds="""
        the loader's word: All is right
            train.feed.Feed.digests: held if np.array_equal(fed, right) => held if True
        targets are not hashed: Of targets the last
            train.feed._sequences: targets[:, -1:] if shifted else targets => targets[:, -1:]
        tokens are not hashed: Targets are hashed
            train.feed._sequences: [tokens, targets => [np.roll(targets, 1, axis=1), targets
        one microbatch: One is hashed
            train.feed.joined: zip(*microbatches => zip(*microbatches[:1] * len(microbatches)
        another step's: Always step 1 is held against it
            train.feed.Feed.digests: sequences(step) => sequences(1)
        the source's word: What files hold is asked of a source of the class that fed the run
            data.reread.Reread.__init__: _Files(config)
                => __import__('harness.data.sources', fromlist=['']).open_source(config)
    """,
    wrong_ranks="""
        another rank's: All ranks are held against the first
            data.reread.Reread.first: self._data_rank * self._own => 0
    """,
    wrong_verdicts="""
        nobody asks: The verdict does not ask what a run was fed
            parity.judgement._alone: *every_step.check_data(run), =>
        fed wrongly and checked: A run that was fed wrongly is right given its past
            parity.alone.every_step.checked_until: right &= fed(run)[1][: len(right)] => pass
    """,
    wrong_peers="""
        the silent peer: Of tensor-parallel ranks the first is asked
            control._fed_otherwise: row[-3] != row[-2] => False
    """,
)
