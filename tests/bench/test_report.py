"""Reports on made-up runs: rows, ratios, what is left out, and what speaks against the numbers."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.bench import Report, report, text as folded
from harness.bench.report import COLUMNS, _mixed
from harness.cli.main import main
from harness.config.errors import BadRequest
from harness.store.identity import signature
from harness.store.study import write_study
from tests.bench import lab
from tests.parity.lab import Cell
from tests.support.mutants import finds


def row(found: Report, engine: str, strategy: str) -> Any:
    (match,) = [one for one in found.rows if (one["engine"], one["strategy"]) == (engine, strategy)]
    return SimpleNamespace(**match)


def studied(root: Path, **named: Any) -> Report:
    """The report on a made-up study."""
    lab.record(root, lab.study(root, **named))
    return report(root, "lab")


def name_of(row: dict[str, Any]) -> str:
    return " ".join(filter(None, (row["engine"], row["strategy"], row["detail"])))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A study of six arms and five blocks, each block slower than the one before."""
    lab.record(tmp_path, lab.study(tmp_path))
    return tmp_path


def test_rows_are_medians_over_processes_without_the_warm_up(root: Path) -> None:
    found = report(root, "lab")
    ddp = row(found, "ddp", "no_shard")
    middle = 0.100 * 1.02 * 1.0025
    assert ddp.step_s == pytest.approx(middle)
    assert ddp.iqr_blocks_s == pytest.approx(0.1 * 1.0025 * 0.02)
    assert ddp.iqr_steps_s == pytest.approx(0.102 * 0.0025)
    assert ddp.tokens_per_s == pytest.approx(1000 / middle)
    assert (ddp.peak_bytes, ddp.persistent_bytes, ddp.sent_bytes) == (310, 120, 2**20)
    assert ddp.parts["forward_s"] == pytest.approx(0.3 * middle)
    assert ddp.parts["exposed_comm_s"] is None, "what an engine does not tell is not zero"
    assert row(found, "native", "no_shard").parts["exposed_comm_s"] == 0.002
    assert ddp.is_reference
    assert ddp.ratio is None
    assert ddp.blocks == [0, 1, 2, 3, 4]
    native = row(found, "native", "optim_grads").ratio
    assert (native.low, native.value, native.high) == pytest.approx((1.5 * 1.0 / 1.0,) * 3, rel=0.03)
    assert not native.includes_one
    assert found.exit_code == 0


def text(found: Report) -> str:
    """What is told, in however many columns."""
    return " ".join(folded(found).split())


def test_what_is_not_told_apart_says_so(tmp_path: Path) -> None:
    noisy = {0: 1.2, 1: 0.9, 2: 1.0, 3: 1.1, 4: 0.8}
    factor = lambda engine, _, block: noisy[block] if engine == "native" else 1.0  # noqa: E731
    assert "includes 1" in text(studied(tmp_path, factor=factor))


def test_arms_of_two_models_are_told_apart(tmp_path: Path) -> None:
    configs = lab.study(tmp_path, dim=32, name="small") + lab.study(tmp_path, dim=64, name="large")
    lab.record(tmp_path, configs)
    found = report(tmp_path, "lab")
    assert [one["detail"] for one in found.rows] == ["model large"] * 6 + ["model small"] * 6
    assert all(one["ratio"] or one["is_reference"] for one in found.rows)


def test_a_missing_run_leaves_the_shared_blocks_and_is_named(root: Path) -> None:
    gone = next((root / "lab").glob("*native-no_shard*-r3-*"))
    (gone / "status.json").write_text(json.dumps(json.loads((gone / "status.json").read_text()) | {"state": "failed"}))
    never = next((root / "lab").glob("*native-no_shard*-r4-*"))
    shutil.rmtree(never)
    found = report(root, "lab")
    assert set(found.missing) == {gone.name, never.name}
    native = row(found, "native", "no_shard")
    assert native.blocks == [0, 1, 2]
    assert native.ratio.blocks == 3
    assert row(found, "fsdp1", "no_shard").ratio.blocks == 5
    assert found.exit_code == 3
    assert gone.name in text(found)
    assert "3 blocks cover at most 75.0 %" in text(found)


def test_disturbed_blocks_are_flagged_and_kept(tmp_path: Path) -> None:
    def busy(values: dict[str, Any]) -> dict[str, Any]:
        here = values["train"]["replicate"] == 2 and values["engine"]["name"] == "fsdp2"
        heavy = {"at_start": 1.0, "at_end": 3.5, "others_cores": 0.4, "timed_s": 1.0}
        return {"load": heavy} if here else {}

    found = studied(tmp_path, change=busy)
    (note,) = found.notes
    assert note.startswith("block 2 is disturbed: lab/tiny-fsdp2")
    assert "load average 3.5 with 2 ranks" in note
    assert "0.40 cores" in note
    assert row(found, "fsdp2", "optim_grads").blocks == [0, 1, 2, 3, 4]
    assert note in text(found)


def test_plans_stand_beside_what_was_measured_and_a_peak_off_its_plan_is_named(tmp_path: Path) -> None:
    def change(values: dict[str, Any]) -> dict[str, Any]:
        return {"planned": {"kept": 90, "peak": 2**19 if values["engine"]["name"] == "fsdp1" else 305, "sent": 2**20}}

    found = studied(tmp_path, blocks=1, change=change)
    assert len([note for note in found.notes if "leaves the plan by -99.9%" in note and "fsdp1" in note]) == 2
    shown = [(COLUMNS["planned peak"](row), COLUMNS["planned sent"](row)) for row in found.rows]
    assert set(shown) == {("0.00", "1.00"), ("0.50", "1.00")}


def test_two_machines_cannot_be_compared(tmp_path: Path) -> None:
    found = studied(tmp_path, change=lambda v: {"cpu_model": f"processor {v['train']['replicate'] % 2}"})
    assert found.exit_code == 4
    assert found.mixed == ["cpu_model: processor 0 and processor 1"]
    assert "NOT COMPARABLE: the runs differ in cpu_model" in text(found)


def test_runs_of_other_sources_are_left_out(tmp_path: Path) -> None:
    found = studied(tmp_path, change=lambda v: {"sources_digest": "older"} if v["train"]["replicate"] == 0 else {})
    assert len(found.missing) == 6
    assert {reason.split(":")[0] for reason in found.missing.values()} == {"stale"}
    assert row(found, "ddp", "no_shard").blocks == [1, 2, 3, 4]
    assert found.exit_code == 3


def test_arms_of_one_engine_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    configs = lab.study(tmp_path, engines={("ddp", "no_shard"): 0.1, ("native", "no_shard"): 0.1})
    more = []
    for values in [c for c in configs if c["engine"]["name"] == "native"]:
        other = json.loads(json.dumps(values))
        other["engine"]["prefetch"] = 3
        lab.write(tmp_path, other, [0.2] * lab.TIMED, ended="2026-01-01T00:00:00+00:00")
        more.append(other)
    lab.record(tmp_path, [*configs, *more])
    assert [name_of(one) for one in report(tmp_path, "lab").rows if one["engine"] == "native"] == [
        "native no_shard prefetch=1",
        "native no_shard prefetch=3",
    ]


def test_the_verb_prints_a_table_or_json_and_what_is_next(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lab", "--root", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "ms/step" in shown
    assert shown.splitlines()[-1] == f"next: python -m harness bench lab --json --root {shlex.quote(str(root))}"
    assert main(["bench", "lab", "--root", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["study"] == "lab"
    shutil.rmtree(next((root / "lab").glob("*native-no_shard*-r4-*")))
    assert main(["bench", "lab", "--root", str(root)]) == 3
    assert "next: python run.py -m study=lab" in capsys.readouterr().out


def test_a_study_that_is_not_there_or_not_timed_is_a_bad_request(root: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="valid: lab"):
        report(root, "typo")
    for path in (root / "lab").glob("*/config.yaml"):
        path.write_text(path.read_text().replace("mode: bench", "mode: record"))
    with pytest.raises(BadRequest, match=r"not timed.*\n.*measure: bench"):
        report(root, "lab")


def test_arms_stand_with_what_they_are_held_against(tmp_path: Path) -> None:
    """A dtype or an axis of the mesh is what an arm varies, where its control has another."""

    def cell(block: int, dtype: str, outer: int) -> dict[str, Any]:
        values = lab.config("native", "optim_grads_params", block)
        values["dtype"]["name"] = dtype
        values["mesh"] |= {"world_size": 4, "dp_outer": outer}
        return values

    controls, cells = {}, []
    for block in range(3):
        control = cell(block, "fp32", 1)
        arms = [cell(block, "bf16", 1), cell(block, "fp32", 2)]
        cells += [control, *arms]
        controls |= {signature(arm): signature(control) for arm in arms}
    for values in cells:
        seconds = [0.2 if values["mesh"]["dp_outer"] == 2 else 0.1] * lab.TIMED
        lab.write(tmp_path, values, seconds)
    write_study(tmp_path, [Cell(values) for values in cells], controls)
    names = {name_of(one): one for one in report(tmp_path, "lab").rows}
    assert set(names) == {"native optim_grads_params fp32", "native optim_grads_params bf16", "native hsdp"}
    assert names["native hsdp"]["ratio"].value == pytest.approx(2.0)
    assert names["native optim_grads_params fp32"]["is_reference"]


def test_arms_of_other_numbers_of_ranks_on_one_machine_are_compared() -> None:
    """Hosts are recorded one a rank."""

    def process(*hosts: str) -> Any:
        return SimpleNamespace(origin={"hosts": list(hosts)})

    assert list(_mixed([process("a", "a"), process("a", "a", "a", "a")])) == []
    assert list(_mixed([process("a", "b"), process("a", "a")])) == ["hosts: ['a', 'b'] and ['a']"]


test_a_mutant_is_noticed = finds(
    "Timed studies",
    test_rows_are_medians_over_processes_without_the_warm_up="""
        steps that warm up: Warm-up steps are timed
            bench.record._facts: lines[config["measure"]["warmup_steps"] :] => lines
    """,
    test_disturbed_blocks_are_flagged_and_kept="""
        a busy machine: No block is disturbed by a machine's load
            bench.record._facts: * (load > ranks + 1) => * False
    """,
    test_two_machines_cannot_be_compared="""
        two processors: Runs of two machines are compared
            bench.report._mixed: if len(found) > 1 => if len(found) > 2
    """,
    test_a_missing_run_leaves_the_shared_blocks_and_is_named="""
        a block that is missing: An arm is held against blocks that it has not
            bench.report._ratio: mine.keys() & theirs.keys() => mine.keys() | theirs.keys()
            ()
            KeyError
    """,
)
