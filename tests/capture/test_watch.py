"""A watched program trains as it does unwatched, and runs of programs under other parallelisms are EQUIVALENT."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.capture import watch
from harness.capture.parts import FOLDER
from harness.cli.main import main
from harness.parity.compare import compare
from harness.parity.gate import gate, made as made_golden
from harness.parity.outcome import Outcome, Verdict
from harness.parity.record import Record, load
from harness.store.metrics import read_metrics
from harness.store.rundir import RunDir
from harness.store.show import show
from tests.capture import loops
from tests.parity.edits import edit_json
from tests.support.spawn import run_ranks


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a watched run of every layout, by its name."""
    folder = tmp_path_factory.mktemp("runs") / "study"
    for name in loops.LAYOUTS:
        loops.made(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def golden(study: Path) -> Path:
    (study.parent / "golden.npz").write_bytes(made_golden(study / "ddp"))
    return study.parent / "golden.npz"


@pytest.mark.parametrize("layout", loops.LAYOUTS)
def test_no_bit_of_training_is_another_where_it_is_watched(layout: str, tmp_path: Path) -> None:
    jobs = [(loops.train, (layout, path), {"steps": 3}) for path in (tmp_path / "run", None)]
    for watched, alone in run_ranks(loops.everywhere, loops.LAYOUTS[layout].ranks, jobs):
        assert watched == alone
    assert load(tmp_path / "run").problems == ()


@pytest.mark.parametrize("layout", [name for name in loops.LAYOUTS if name != "single"])
def test_every_parallelism_is_equivalent_to_one_process(layout: str, study: Path) -> None:
    verdict = compare(study / layout, study / "single")
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.sentence
    run = load(study / layout)
    assert run.summary["unplaced"] == {}
    assert run.captures.keys() == {1, 10}
    assert run.captures[1].tensors.keys() == load(study / "single").captures[1].tensors.keys()
    assert not (study / layout / FOLDER).exists()


def test_two_programs_with_the_same_sums_are_equal(study: Path) -> None:
    assert compare(study / "fsdp2", study / "ddp").outcome is Outcome.EQUAL


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp2", "hsdp"])
def test_local_gradients_are_seen_before_they_are_reduced(layout: str, study: Path) -> None:
    stream = load(study / layout).stream
    assert stream is not None
    for j in range(stream.sketches):
        local, reduced = stream.column(f"local_{j}"), stream.column(f"reduced_{j}")
        assert abs(local - reduced).max() < 1e-5 * abs(reduced).max()


def test_show_tells_of_another_program(study: Path) -> None:
    told = show(RunDir(study / "ddp"))
    assert "another program" in told
    assert "stale" not in told


def test_time_and_memory_are_recorded(study: Path) -> None:
    lines = read_metrics(study / "ddp" / "metrics.jsonl")
    assert all(line["step_time_s"] > 0 and line["memory"]["rss"] > 1 << 24 for line in lines)


def scaled(end: str, at: int, step: int, model: Any, optimizer: Any) -> None:
    if step == at:
        loops.gradient_of(model, end).mul_(1.5)


DOWN = "blocks.1.down.weight"


@pytest.mark.parametrize(
    ("event", "at", "stage"),
    [
        ({"before_update": partial(scaled, DOWN, 5)}, 5, "reduction"),
        ({"before_update": partial(scaled, DOWN, 1)}, 1, "reduction"),
        ({"after_update": partial(loops.moved, DOWN, 10)}, 10, "optimizer"),
    ],
    ids=["gradient at step 5", "gradient at step 1", "update at step 10"],
)
def test_a_fault_is_named_by_step_stage_and_tensor(
    event: dict[str, Any], at: int, stage: str, study: Path, golden: Path, tmp_path: Path
) -> None:
    """Of a golden file, which has no whole tensors, it is in doubt after the first step."""
    run = loops.made(tmp_path / "study" / "faulty", "fsdp2", **event)
    found = gate(run, golden)
    assert found.outcome is Outcome.DIFFERENT or (at > 1 and found.outcome is Outcome.UNDECIDED), found.sentence
    assert f"at step {at}, " in found.sentence
    assert DOWN in found.sentence
    verdict = compare(run, study / "ddp")
    assert verdict.outcome is Outcome.DIFFERENT, verdict.sentence
    for word in (f"at step {at}, ", DOWN, stage):
        assert word in verdict.sentence
    assert not any("run.py" in command for command in verdict.commands), "another program is no request of ours"


@pytest.mark.parametrize(
    ("options", "outcome", "said"),
    [
        (
            {"before_update": partial(loops.moved, DOWN, 4)},
            Outcome.DIFFERENT,
            ("weights between steps", "at step 4, ", DOWN),
        ),
        ({"fed": False}, Outcome.EQUIVALENT, ("what study/other was fed is not known",)),
        ({"seed": 2}, Outcome.NOT_COMPARABLE, ("data_digest at step 1",)),
        (
            {"optimizer": loops.sgd},
            Outcome.NOT_COMPARABLE,
            ("optimizer.name is sgd in the one and adamw in the other",),
        ),
    ],
    ids=["weights between steps", "data unknown", "other data", "another optimizer"],
)
def test_what_another_run_does_is_named(
    options: dict[str, Any], outcome: Outcome, said: tuple[str, ...], tmp_path: Path, study: Path
) -> None:
    verdict = compare(loops.made(tmp_path / "study" / "other", "fsdp2", **options), study / "fsdp2")
    assert verdict.outcome is outcome, verdict.sentence
    for words in said:
        assert words in verdict.sentence


def test_two_versions_of_torch_are_named_and_not_hidden(study: Path, tmp_path: Path) -> None:
    other = shutil.copytree(study / "fsdp2", tmp_path / "study" / "other")
    edit_json(other / "provenance.json", versions={**load(other).provenance["versions"], "torch": "2.99"})
    verdict = compare(other, study / "fsdp2")
    assert verdict.outcome is Outcome.EQUIVALENT, "equal bits of two versions are no proof"
    assert "torch 2.99 and" in verdict.sentence


def test_without_gradients_the_verdict_says_so(tmp_path: Path) -> None:
    """Of a program whose optimizer nobody can watch weights and losses alone are known."""
    for name in ("one", "other"):
        loops.made(tmp_path / "study" / name, steps=4, told=False, captures=[])
    verdict: Verdict = compare(tmp_path / "study" / "one", tmp_path / "study" / "other")
    assert verdict.outcome is Outcome.EQUIVALENT
    assert "no gradients" in verdict.sentence


def accumulated(rank: int, path: Path) -> None:
    torch.manual_seed(0)
    model = loops.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = watch(model, optimizer, path)
    for batch in loops.batches(loops.STEPS):
        for number, rows in enumerate(batch.chunk(2)):
            loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            (loss / 2).backward()
            if number:
                optimizer.step()
                optimizer.zero_grad()
            run.step(loss=loss, data=rows)
    run.close()


def test_calls_without_an_update_are_microbatches_of_one_step(tmp_path: Path, study: Path) -> None:
    accumulated(0, tmp_path / "study" / "accumulated")
    record: Record = load(tmp_path / "study" / "accumulated")
    assert record.length == loops.STEPS
    verdict = compare(record.path, study / "fsdp2")
    assert verdict.outcome in (Outcome.EQUAL, Outcome.EQUIVALENT), verdict.sentence


# -- golden files, and a folder of watched runs ------------------------------------------------------------------------


def test_against_its_golden_file_the_run_itself_is_equal_and_another_layout_equivalent(
    study: Path, golden: Path
) -> None:
    assert golden.stat().st_size < 200_000
    assert load(golden).is_watched
    assert gate(study / "ddp", golden).outcome is Outcome.EQUAL
    for name in ("single", "hsdp"):
        found = gate(study / name, golden)
        assert found.outcome is Outcome.EQUIVALENT, found.sentence
        assert "gradient distance, sketched" in {row.check for row in found.evidence}


def test_bits_are_not_demanded_of_another_program(
    study: Path, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", str(golden), str(study / "ddp"), "--bitwise"]) == 2
    assert "promises no bits" in capsys.readouterr().err


def test_a_folder_of_watched_runs_is_judged_and_reported(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = [str(study), "--control", str(study / "ddp")]
    assert main(["verdict", *words]) == 0
    told = capsys.readouterr().out
    assert "EQUIVALENT: runs held against one control, 5 comparisons" in told
    assert main(["report", *words]) == 0
    page = (study / "report.html").read_text()
    assert all(name in page for name in ("single", "hsdp", "EQUIVALENT"))
    assert main(["report", str(study)]) == 0
    assert "--control RUN says which" in (study / "report.html").read_text()
