"""`optimizer=muon`: equivalent to one process under every layout and dtype, and bit-equal where sums are exact.

Runs go on from a checkpoint of any other layout; what no engine can step rightly is refused before a rank starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.power.steps import BASE
from harness.config.compose import compose
from harness.config.schema import (
    AdjustLr,
    Config,
    EngineName,
    ModelFamily,
    Numerics,
    OptimizerConfig,
    OptimizerName,
    OuterStrategy,
    Strategy,
)
from harness.engines.adapters.single import SingleEngine
from harness.models.workload import workload_for
from harness.parity.alone import optimizer
from harness.parity.compare import compare
from harness.parity.outcome import Outcome
from harness.parity.record import load
from harness.store import check_stream
from harness.worker.describe import Unusable, try_model, try_optimizer
from tests.fsdp.muon.whole import Soap
from tests.study import short
from tests.support.covering import once
from tests.support.factory import ranks_of, small_config, stopping, train
from tests.support.mutants import finds
from tests.support.spawn import run_ranks
from tests.train.runs import Passing, summary
from tests.train.test_resume import numbers

MUON = (*BASE, "optimizer=muon", "measure.step_checks=true", "model.num_layers=2")
ONE = ("engine=single", "sharding=no_shard", "mesh=one")
FOUR = ("mesh=two_by_two", "train.microbatch_size=2")
CELLS = {
    **{strategy.name: (f"sharding={strategy.name}",) for strategy in Strategy},
    "hybrid": (*FOUR, "sharding=optim_grads"),
    "hfsdp": (*FOUR, "sharding=hfsdp"),
    "two microbatches": ("sharding=optim_grads_params", "train.microbatch_size=2"),
    "tensor parallel": ("mesh.world_size=4", "mesh.tp=2", "sharding=optim_grads_params"),
    "ddp": ("engine=ddp",),
    "bf16": ("dtype=bf16", "sharding=optim_grads_params"),
    "fp64": ("dtype=fp64", "sharding=optim_grads"),
    "experts": ("model=moe", "sharding=optim_grads_params"),
    "as torch adjusts": ("optimizer.adjust_lr_fn=original", "optimizer.lr=0.01", "sharding=optim"),
    "other settings": (
        "optimizer.nesterov=false", "optimizer.momentum=0.5", "optimizer.ns_steps=3",
        "optimizer.ns_coefficients=[3,-3.2,1.2]", "sharding=optim_grads_params",
    ),
}  # fmt: skip
SHARED = ("dtype=", "model=", "optimizer.", "train.microbatch_size")
"""What a control has as well."""


FEW = {"optim_grads_params", "tensor parallel", "experts"}
"""Of `make test`."""


def control_of(cell: tuple[str, ...]) -> tuple[str, ...]:
    return (*MUON, *ONE, *(each for each in cell if each.startswith(SHARED)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    @once
    def made(few: bool) -> dict[tuple[str, ...], Path]:
        cells = [cell for name, cell in CELLS.items() if (name in FEW) is few]
        wanted = {(*MUON, *cell) for cell in cells} | {control_of(cell) for cell in cells}
        return short.runs(sorted(wanted), tmp_path_factory.mktemp("muon"))

    return lambda name: (made(name in FEW)[*MUON, *CELLS[name]], made(name in FEW)[control_of(CELLS[name])])


@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each in FEW else pytest.mark.full) for each in CELLS])
def test_it_is_equivalent_to_one_process(runs: Callable[[str], tuple[Path, Path]], name: str) -> None:
    """Every matrix's update at captured steps, and one at each step, is what the rule makes of it."""
    paths = runs(name)
    verdict = compare(*paths)
    assert verdict.outcome in (Outcome.EQUAL, Outcome.EQUIVALENT), verdict.sentence
    for path in paths:
        found = [each for each in optimizer.check(load(path)) if each.check == "update by the rule"]
        stepped = {str(finding.tensor).removesuffix(".weight").rpartition(".")[2] for finding in found}
        assert stepped >= OF_BLOCKS
        assert max(finding.ratio for finding in found) < 0.75
        rule = rule_of(path)
        assert min(rule) > 0
        assert max(rule) < 0.75


def rule_of(run: Path) -> list[float]:
    """By step, how far the worst element and the matrix of its turn lie from the rule: 1 is the bound."""
    stream = check_stream.read(run)
    assert stream is not None
    found: list[float] = stream.column("rule")[:-1].tolist()
    return found


class TooFar(Passing):
    """An engine in which the second step changes matrices by half more than it should."""

    @torch.no_grad()
    def step(self, lr: float) -> float:
        matrices = [weight for name, weight in self.engine.weights.items() if ".0." in name]
        before = [weight.clone() for weight in matrices]
        norm = super().step(lr)
        for weight, old in zip(matrices, before, strict=True):
            if self.number == 3 and weight.dim() == 2:
                weight.add_(weight - old, alpha=0.5)
        return norm


def test_a_whole_matrix_is_looked_at_in_a_step_that_nobody_captured(tmp_path: Path) -> None:
    config = small_config(optimizer__name=OptimizerName.muon, measure__step_checks=True, model__num_layers=1)
    config.measure.capture_steps = []
    train(config, tmp_path, wrap_engine=TooFar)
    assert [rule > 1 for rule in rule_of(tmp_path)] == [False, True, False]


test_a_slip_of_the_sample_is_found = finds(
    "Muon's steps",
    test_a_whole_matrix_is_looked_at_in_a_step_that_nobody_captured="""
        no matrix: No matrix is small enough to be worked out
            train.pieces.MOST: 0
        after: None moves
            train.pieces.WholeMatrices.ratio: self.left * (1 => weight.local.double() * (1
    """,
)


def by_muon(family: ModelFamily, *, tied: bool = False) -> set[str]:
    """Suffixes of parameters that have Muon's state in one process."""
    config = small_config(model__family=family, model__tie_embeddings=tied, optimizer__name=OptimizerName.muon)
    engine = SingleEngine(workload_for(config), config, ranks_of(config))
    keys = [key.removeprefix("optimizer/") for key in engine.state().tensors if key.startswith("optimizer/")]
    entries = {name: {key.rpartition("/")[2] for key in keys if key.startswith(f"{name}/")} for name in engine.trained}
    assert all(each in ({"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}) for each in entries.values())
    matrices = [name for name, each in entries.items() if each == {"momentum_buffer"}]
    return {name.removesuffix(".weight").rpartition(".")[2] for name in matrices}


OF_BLOCKS = {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    assert by_muon(ModelFamily.llama) == by_muon(ModelFamily.llama, tied=True) == OF_BLOCKS
    assert by_muon(ModelFamily.moe) == OF_BLOCKS | {"router"}
    assert by_muon(ModelFamily.odd) == {"lift_DQ", "w_up", "w_down", "side"}


test_a_slip_of_the_groups_is_found = finds(
    "Muon's groups",
    test_muon_steps_matrices_and_adamw_the_rest="""
        heads: A head is a matrix
            models.workload.NOT_ORTHOGONALIZED: re.compile("embedding")
        vectors: Vectors are Muon's
            models.workload.TokenWorkload.orthogonalizes: == 2 => < 2
            ()
            ValueError
        all: Muon steps nothing
            engines.optim.groups_of: is_muon and => not is_muon and
    """,
)


# -- another layout goes on --------------------------------------------------------------------------------------------


def exact(own: bool, strategy: Strategy, outer: OuterStrategy | None = None) -> Config:
    """own: of an optimizer of a user's own that needs matrices whole."""
    config = small_config(
        engine__name=EngineName.native, mesh__world_size=4, sharding__strategy=strategy,
        train__steps=5, train__param_norm_every=1, optimizer__name=OptimizerName.muon, optimizer__momentum=0.95,
        optimizer__adjust_lr_fn=AdjustLr.match_rms_adamw, numerics__mode=Numerics.exact,
    )  # fmt: skip
    if own:
        config.optimizer = OptimizerConfig(name=OptimizerName.ext, target="tests.fsdp.muon.whole:Shampoo")
    if outer is not None:
        config.mesh.dp_outer, config.sharding.outer = 2, outer
    return config


LAYOUTS = [(Strategy.optim_grads_params,), (Strategy.optim, OuterStrategy.optim), (Strategy.no_shard,)]


def moved(rank: int, root: Path, pairs: list[tuple[Config, Config]]) -> None:
    for place, (before, after) in enumerate(pairs):
        train(before, root / str(place), rank, should_stop=stopping(2))
        train(after, root / str(place), rank)


@pytest.mark.parametrize("own", [False, True], ids=["Muon", "Shampoo"])
def test_a_run_goes_on_under_any_other_layout_to_the_bits_of_one_process(own: bool, tmp_path: Path) -> None:
    alone = exact(own, Strategy.no_shard)
    alone.engine.name, alone.mesh.world_size = EngineName.single, 1
    train(alone, tmp_path / "one")
    pairs = [*itertools.permutations([exact(own, *each) for each in LAYOUTS], 2)]
    run_ranks(moved, 4, tmp_path, pairs)
    keys = "loss", "grad_norm", "param_norm"
    expected = [{key: line[key] for key in keys} for line in numbers(tmp_path / "one")]
    left = summary(tmp_path / "one")["final_weights"]
    for place in range(len(pairs)):
        run = tmp_path / str(place)
        assert [{key: line[key] for key in keys} for line in numbers(run)] == expected
        assert summary(run)["final_weights"] == left


# -- what is refused ---------------------------------------------------------------------------------------------------


class Bare:
    """A workload without a base, as the protocol was before Muon."""

    unit_classes, may_leave_unused = (), False
    build = initial_weight = materialise_buffers = loss = decays = lambda self: None


def test_a_workload_that_does_not_say_what_muon_steps_is_refused() -> None:
    config = small_config(optimizer__name=OptimizerName.muon)
    with pytest.raises(Unusable, match="lacks orthogonalizes"):
        try_model(Bare, config)


# -- an optimizer of one's own that needs matrices whole ---------------------------------------------------------------

OWN = ("optimizer=ext", "optimizer.target=tests.fsdp.muon.whole:Shampoo")


@pytest.mark.parametrize(
    "words", ["sharding=optim_grads_params", "sharding=hsdp mesh=two_by_two", "engine=single mesh=one"]
)
def test_it_is_taken(words: str) -> None:
    assert compose([*OWN, *words.split()]).typed.optimizer.target == OWN[1].partition("=")[2]


def test_one_that_keeps_numbers_or_lists_cannot_be_saved() -> None:
    config = small_config(optimizer__name=OptimizerName.ext, optimizer__target="tests.fsdp.muon.whole:Soap")
    with pytest.raises(Unusable, match="keeps 'step' of a weight as a int"):
        try_optimizer(Soap, config)


def goes_on(path: Path) -> None:
    config = exact(True, Strategy.no_shard)
    config.engine.name, config.mesh.world_size = EngineName.single, 1
    train(config, path, should_stop=stopping(2))
    train(config, path)


test_state_without_a_place_is_found = finds(
    "Optimizers of one's own",
    goes_on="""
        no room: State that a step would make has no place
            engines.optim.make_room: {}): => {}) or True:
            ()
            ValueError: .*unexpected optimizer/
    """,
)
