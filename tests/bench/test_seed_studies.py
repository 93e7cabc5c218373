"""The page of published experiments, from made-up runs: figures side by side, nothing shown that was not measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import seed_evidence, seed_studies
from benchmarks.pages.seed_evidence import Arm, Found
from benchmarks.pages.seed_published import SEEDS, Seed
from harness.parity.outcome import Outcome, Verdict
from harness.parity.record import Record
from harness.store.identity import signature
from harness.store.rundir import RunDir, flatten
from harness.store.study import write_study
from tests.bench import lab

Change = Callable[[dict[str, Any]], None]
GRAD_BUFFER, POLICIES, HYBRID = (
    next(seed for seed in SEEDS if seed.study == name) for name in ("grad_buffer", "dtype_policies", "hybrid")
)


def config(study: str, change: Change = lambda values: None, *, seed: int = 0, block: int = 0) -> dict[str, Any]:
    """A cell of native ZeRO-3 in a study."""
    values = lab.config("native", "optim_grads_params", block)
    values["study"]["name"] = study
    values["train"]["seed"] = seed
    change(values)
    return values


def stored(root: Path, values: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The cell with a finished run of it."""
    lab.write(root, values, more.pop("seconds", [0.1] * lab.TIMED), **more)
    return values


def asked(root: Path, configs: list[dict[str, Any]], controls: dict[int, int]) -> None:
    """Write what the study was asked for: by place, an arm's control."""
    pairs = {signature(configs[arm]): signature(configs[control]) for arm, control in controls.items()}
    write_study(root, [lab.Cell(values) for values in configs], pairs)


@pytest.fixture(autouse=True)
def _judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are records by what their notes say, and arms with the same loss are equal."""

    def load(path: Path, _: str | None) -> Record:
        values = RunDir(path).config()
        loss, *rows = json.loads(values["notes"] or "[4.0]")
        columns = {"step": [1], "loss": [loss], "grad_norm": [2.0 * loss]}
        summary = {"collectives": [{"bucket": name, "bytes": size} for name, size in rows]}
        origin = {"cpu_model": "a processor", "cpu_count": 2, "hosts": ["secret"], "versions": {"torch": "2.13.0"}}
        flat = flatten(values)
        return Record(
            path=path,
            name=path.name,
            config=flat,
            provenance=origin,
            summary=summary,
            columns=columns,
            captures={},
            updates={},
            weights={},
            moments={},
            witnesses={},
            moves={},
            draws=0,
            attempts=1,
            final=None,
            forward=None,
            stream=None,
            problems=(),
        )

    def judge(arm: Record, control: Record) -> Verdict:
        same = arm.series("loss") == control.series("loss")
        outcome = Outcome.EQUAL if same else Outcome.EQUIVALENT
        return Verdict(outcome, f"{outcome.value}: so it is.", "", "", "T1", "")

    monkeypatch.setattr(seed_evidence, "load", load)
    monkeypatch.setattr(seed_evidence, "judge", judge)


def flat_buffer(values: dict[str, Any]) -> None:
    values["engine"]["grad_buffer"] = "flat"


def concat_buffer(values: dict[str, Any]) -> None:
    values["engine"]["grad_buffer"] = "concat"


def timed(root: Path, blocks: int, **more: Any) -> None:
    """A timed half: flat is faster and smaller."""
    configs: list[dict[str, Any]] = []
    for block in range(blocks):
        for change, seconds, peak in ((concat_buffer, 0.2, 400), (flat_buffer, 0.1, 300)):
            tensors = {"step": 2, "persistent": [100 << 20], "peak": [peak << 20], "growth": [0]}
            values = config("grad_buffer_time", change, block=block)
            configs.append(stored(root, values, seconds=[seconds] * lab.TIMED, tensors=tensors, **more))
    asked(root, configs, {2 * block + 1: 2 * block for block in range(blocks)})


def ours(found: Found) -> dict[str, str]:
    return {what: here for what, _, here in seed_studies.figures(found)}


def test_a_study_and_its_timed_half_stand_beside_the_published_figures(tmp_path: Path) -> None:
    configs = [stored(tmp_path, config("grad_buffer", change)) for change in (concat_buffer, flat_buffer)]
    asked(tmp_path, configs, {1: 0})
    timed(tmp_path, 3)
    found = seed_evidence.find(GRAD_BUFFER, str(tmp_path))
    here = ours(found)
    assert here["loss"] == "1 EQUAL"
    assert here["memory at the peak, flat over concat"] == "300.00 / 400.00 MiB at the peak: -25 %; kept: 0"
    assert here["throughput"].startswith("0.500 [0.500, 0.500]")
    assert [arm.detail for arm in found.arms] == ["engine.grad_buffer=concat", "engine.grad_buffer=flat"]
    assert [arm.is_control for arm in found.arms] == [True, False]
    page = seed_studies.markdown([found])
    assert "Times not measured" not in page
    assert "15.1 / 17.4 GB" in page
    assert "a processor, 2 cores" in page


@pytest.mark.parametrize(
    ("blocks", "load", "says"),
    [
        (2, {}, "2 whole blocks, 3 are the least"),
        (3, {"at_start": 9.0, "at_end": 9.0, "others_cores": 0.0, "timed_s": 1.0}, "other programs disturbed 6 of 6"),
        (0, {}, "never run"),
    ],
)
def test_times_that_nothing_stands_on_are_not_shown_and_bytes_are(
    tmp_path: Path, blocks: int, load: dict[str, float], says: str
) -> None:
    if blocks:
        timed(tmp_path, blocks, **({"load": load} if load else {}))
    found = seed_evidence.find(GRAD_BUFFER, str(tmp_path))
    assert says in ours(found)["throughput"]
    assert says in seed_studies.markdown([found])
    whole = json.dumps(seed_studies.as_json([found]))
    assert "step_s" not in whole
    if blocks:
        assert "300.00 / 400.00 MiB" in ours(found)["memory at the peak, flat over concat"]


def test_seeds_of_an_arm_are_one_row(tmp_path: Path) -> None:
    def policy(name: str, loss: float, sent: int) -> Change:
        def change(values: dict[str, Any]) -> None:
            values["dtype"]["name"], values["notes"] = name, json.dumps([loss, ["unit", sent]])

        return change

    configs = []
    for seed, loss in ((1, 4.004), (2, 3.998)):
        configs.append(stored(tmp_path, config("dtype_policies", policy("bf16", 4.0, 400), seed=seed)))
        configs.append(stored(tmp_path, config("dtype_policies", policy("bf16_comm", loss, 300), seed=seed)))
    asked(tmp_path, configs, {1: 0, 3: 2})
    found = seed_evidence.find(POLICIES, str(tmp_path))
    here = ours(found)
    assert len(found.arms) == 2
    assert here["loss at step 100, bf16 over fp32 wire"] == "+0.025 % (-0.05 % to +0.1 % over 2 seeds)"
    assert here["bytes a step"] == "300 / 400: 0.7500"
    assert here["is it the same run; under ZeRO-1"] == "2 EQUIVALENT; not run"


def test_bytes_along_the_axes_are_told_apart(tmp_path: Path) -> None:
    def hybrid(values: dict[str, Any]) -> None:
        values["dtype"]["name"] = "bf16"
        values["mesh"] |= {"world_size": 4, "dp_outer": 2}
        values["sharding"]["outer"] = "optim"
        values["notes"] = json.dumps([4.0, ["unit", 2 << 20], ["unit outer", 1 << 20]])

    def plain(values: dict[str, Any]) -> None:
        values["mesh"]["world_size"] = 4
        values["notes"] = json.dumps([4.0, ["unit", 3 << 20]])

    def full(values: dict[str, Any]) -> None:
        hybrid(values)
        values["dtype"]["name"] = "fp32"

    configs = [stored(tmp_path, config("hybrid", change)) for change in (plain, hybrid, full)]
    asked(tmp_path, configs, {1: 0, 2: 0})
    found = seed_evidence.find(HYBRID, str(tmp_path))
    assert [arm.strategy for arm in found.arms] == ["optim_grads_params", "hfsdp", "hfsdp"]
    assert ours(found)["bytes inside and outside"] == "2.00 and 1.00 MiB; FSDP 3.00 over all four"


def test_a_fault_of_a_released_engine_is_linked_to_its_report() -> None:
    text = "DIFFERENT: a against b: 4 x the control's: N = 4, not divided by the ranks."
    arm = Arm("megatron_fsdp", "hfsdp", "", 4, False, ["DIFFERENT"], [text], 4.0, 1.0, [0.0], [3.0], 1, None, {})
    assert seed_studies._odd(arm) == [f"- {text} [[hfsdp_sums_gradients](upstream/hfsdp_sums_gradients.md)]"]


def test_what_was_not_run_is_named_and_the_page_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [stored(tmp_path, config("grad_buffer", concat_buffer)), config("grad_buffer", flat_buffer)]
    asked(tmp_path, configs, {1: 0})
    monkeypatch.setattr(seed_studies, "NAN_GUARD", tmp_path / "none")
    assert seed_studies.main(["--root", str(tmp_path), "--out", str(tmp_path)]) == 3
    page = (tmp_path / "docs/records/seed_studies.md").read_text()
    data = json.loads((tmp_path / "benchmarks/data/seed_studies.json").read_text())
    assert all(f"`study={seed.study}`" in page for seed in SEEDS)
    assert "never started" in page
    assert [study["study"] for study in data["studies"]] == [seed.study for seed in SEEDS]
    assert "secret" not in json.dumps(data)
    assert str(tmp_path) not in page + json.dumps(data)


def test_one_command_asks_for_every_study_and_then_for_its_timed_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[list[str]] = []
    monkeypatch.setattr(seed_studies.subprocess, "run", lambda words, **_: asked_for.append(words[1:]))
    assert seed_studies.main(["--run", "--root", str(tmp_path), "--out", str(tmp_path)]) == 3
    studies = [words[2].removeprefix("study=") for words in asked_for]
    names = [seed.study for seed in SEEDS]
    assert studies == names + [seed.study for seed in SEEDS if seed.timed]
    assert all("measure=bench" in words for words in asked_for[len(names) :])
    assert sum(seed.minutes for seed in SEEDS) < 20


@pytest.mark.parametrize("seed", SEEDS, ids=[seed.study for seed in SEEDS])
def test_every_study_has_figures_before_it_was_run(tmp_path: Path, seed: Seed) -> None:
    lines = seed_studies.figures(seed_evidence.find(seed, str(tmp_path)))
    assert lines
    assert all(published and here for _, published, here in lines)
