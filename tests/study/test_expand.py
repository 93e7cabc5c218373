"""Points of a study: grid, zip, base, skip_if, replicates, controls; the command line wins."""

from __future__ import annotations

import pytest

from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides
from harness.config.schema import StudyConfig
from harness.study.cells import Point, expand, normalise
from tests.support.mutants import each_found_by


def points(study: StudyConfig, *words: str) -> list[Point]:
    return expand(study, check_overrides(words, multirun=True))


ARMS = {
    "typed axes make a product in the order typed": (
        StudyConfig(),
        "sharding=optim,no_shard train.seed=1,2",
        [f"sharding={strategy} train.seed={seed}" for strategy in ("optim", "no_shard") for seed in (1, 2)],
    ),
    "grid and zip multiply": (
        StudyConfig(
            grid={"sharding": ["optim", "no_shard"]}, zip={"train.seed": ["1", "2"], "train.steps": ["5", "6"]}
        ),
        "",
        [
            f"sharding={strategy} train.seed={n} train.steps={4 + n}"
            for strategy in ("optim", "no_shard")
            for n in (1, 2)
        ],
    ),
    "the command line wins over base, grid and zip": (
        StudyConfig(
            base={"train.steps": "5", "dtype": "fp32"},
            grid={"sharding": ["optim", "no_shard"]},
            zip={"train.seed": ["1", "2"], "optimizer.lr": ["0.1", "0.2"]},
        ),
        "train.steps=7 sharding=optim_grads train.seed=3",
        [f"dtype=fp32 optimizer.lr={rate} train.steps=7 sharding=optim_grads train.seed=3" for rate in (0.1, 0.2)],
    ),
    "skip_if leaves out cells that have all of a line": (
        StudyConfig(
            grid={"sharding": ["optim", "no_shard"], "dtype": ["fp32", "bf16"]},
            skip_if=["sharding=no_shard dtype=bf16"],
        ),
        "",
        ["sharding=optim dtype=fp32", "sharding=optim dtype=bf16", "sharding=no_shard dtype=fp32"],
    ),
    "replicates are an axis": (StudyConfig(replicates=2), "", ["train.replicate=0", "train.replicate=1"]),
    "unless they are typed": (StudyConfig(replicates=2), "train.replicate=5", ["train.replicate=5"]),
}


@pytest.mark.parametrize("name", ARMS)
def test_arms(name: str) -> None:
    study, words, expected = ARMS[name]
    assert [" ".join(point.overrides) for point in points(study, *words.split())] == expected


BOTH = {"sharding": ["optim", "no_shard"]}
CONTROLS = {
    "is its arm with the control's overrides, one for both stages": (
        StudyConfig(
            control={"engine": "ddp", "sharding": "no_shard"}, base={"engine": "native"}, grid=BOTH, replicates=2
        ),
        "train.steps=5",
        [f"engine=ddp sharding=no_shard train.steps=5 train.replicate={replicate}" for replicate in (0, 1)] * 2,
    ),
    "pairs up along an axis that it does not name": (
        StudyConfig(control={"dtype": "fp32"}, grid=BOTH | {"dtype": ["bf16"]}),
        "",
        ["sharding=optim dtype=fp32", "sharding=no_shard dtype=fp32"],
    ),
    "survives a pin of its own axis": (
        StudyConfig(control={"sharding": "no_shard"}, grid=BOTH),
        "sharding=optim",
        ["sharding=no_shard"],
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control(name: str) -> None:
    study, words, expected = CONTROLS[name]
    assert [" ".join(point.control or ()) for point in points(study, *words.split())] == expected


def test_mistakes_in_a_file_are_told_at_once_with_hints() -> None:
    study = StudyConfig(
        name="x",
        control={"engin": "ddp"},
        base={"train.stps": "5"},
        grid={"sharding": ["zero3", "optim"]},
        zip={"train.seed": ["1"], "train.steps": ["5", "6"]},
        skip_if=["sharding=optm"],
    )
    with pytest.raises(BadRequest) as caught:
        points(study)
    message = str(caught.value)
    for part in ("study=x: engin", "train.steps", "sharding=optim_grads_params", "differ in length", "sharding=optm"):
        assert part in message
    assert len(caught.value.violations) == 5


@pytest.mark.parametrize(
    "study", [StudyConfig(grid={"sharding": []}), StudyConfig(base={"dtype": "fp32"}, skip_if=["dtype=fp32"])]
)
def test_a_study_without_cells_is_refused(study: StudyConfig) -> None:
    with pytest.raises(BadRequest, match="has no cells"):
        points(study)


def test_a_file_reads_as_yaml_is_written() -> None:
    raw = {
        "control": {"data.path": None},
        "base": {"optimizer.betas": [0.9, 0.95], "model.tie_embeddings": True, "optimizer.lr": 1e-3},
        "grid": {"sharding": "optim", "train.seed": [1, 2], "optimizer.clip_norm": [None, 1.0]},
    }
    assert normalise(raw, "here") == {
        "name": "here",
        "control": {"data.path": "null"},
        "base": {"optimizer.betas": "[0.9,0.95]", "model.tie_embeddings": "true", "optimizer.lr": "0.001"},
        "grid": {"sharding": ["optim"], "train.seed": ["1", "2"], "optimizer.clip_norm": ["null", "1.0"]},
    }
    assert normalise({"name": "given"}, "here")["name"] == "given"


def test_nothing_asked_is_one_cell_and_a_study_of_too_many_is_refused_before_they_are_made() -> None:
    assert points(StudyConfig()) == [Point((), None)]
    rates = [str(number) for number in range(1, 301)]
    with pytest.raises(BadRequest, match="makes 2,999,700 cells"):
        expand(StudyConfig(grid={"optimizer.lr": rates}, replicates=9_999), [])


test_a_mutant_is_found = each_found_by(
    "Points of a study",
    """
    the base wins: The base of a study wins over its axes
        study.cells.expand: arm |= assignment => arm = assignment | arm
    a typed axis multiplies: An axis of the file stays beside what is typed for it
        study.cells.expand: study.grid.items() if key not in typed] => study.grid.items() if key]
    a typed key stays zipped: A zipped axis keeps a key that is typed
        study.cells.expand: study.zip.items() if key not in typed} => study.zip.items() if key}
    replicates from 1: Replicates count from 1
        study.cells.expand: range(study.replicates) => range(1, study.replicates + 1)
    a typed replicate multiplies: Replicates of the file multiply a typed one
        study.cells.expand: and "train.replicate" not in typed =>
    any of a line: One word of a line of skip_if leaves a cell out
        study.cells.expand: line <= set(overrides) => line & set(overrides)
    the arm wins: An arm's own overrides win over its control's
        study.cells.expand: arm | study.control => study.control | arm
    two lengths: Zipped axes of two lengths are let through
        study.cells._check_file: study.zip.values())}) > 1 => study.zip.values())}) > 2
    nothing is left: A study whose cells are all left out has none, in silence
        study.cells.expand: if not points => if not axes
    the file's name: A study is called like its file, whatever it says
        study.cells.normalise: {"name": name, **raw} => {**raw, "name": name}
    """,
    test_arms,
    test_a_control,
    test_a_file_reads_as_yaml_is_written,
    test_mistakes_in_a_file_are_told_at_once_with_hints,
    test_a_study_without_cells_is_refused,
)
