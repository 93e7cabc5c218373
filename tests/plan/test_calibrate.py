"""Step times by constants of a timed run: a sum of its parts, scaled by what there is to do, and nothing elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli.cost import Calibration
from harness.cli.main import main
from harness.plan.planned import planned
from tests.bench import lab
from tests.support.composing import compose
from tests.support.mutants import finds

WORDS = ("model=tiny", "data=synthetic", "mesh.world_size=2", "train.global_batch_size=16", "launch.dry_run=true")
PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "exposed_comm_s")
TIMES = dict(zip(PARTS, (1.0, 20.0, 50.0, 8.0, 3.0, 10.0), strict=True))


def by(disturbance: str = "", **times: float | None) -> Calibration:
    config = compose(WORDS).config
    facts = {"parts": {**TIMES, **times}, "run": "lab/timed", "disturbance": disturbance}
    run: Any = SimpleNamespace(config=config, facts=facts)
    return Calibration(run, planned(config))


def step(*words: str, calibration: Calibration | None = None) -> dict[str, Any]:
    cell = compose((*WORDS, *words))
    return (calibration or by()).step(cell, planned(cell.config))


def test_the_run_itself_takes_what_it_took() -> None:
    """Waits for collectives are a part of their own, not counted in forward and backward again."""
    assert step()["step_s"] == pytest.approx(1 + 20 + 50 + 8 + 3)
    assert step(calibration=by(exposed_comm_s=None))["step_s"] is None, "it does not tell its waits"


def test_parts_grow_with_what_there_is_to_do() -> None:
    there, here = by().plan, planned(compose((*WORDS, "model.num_layers=8")).config)
    found = {name: seconds for name, (seconds, _) in step("model.num_layers=8")["parts"].items()}
    assert found["forward and backward"] == pytest.approx(60 * here["flops"] / there["flops"])
    assert found["exposed communication"] == pytest.approx(10 * here["sent"] / there["sent"])
    assert 8 < found["update"] < 16
    assert found["data and the rest"] == 4


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("dtype=bf16",), {"forward and backward", "update"}),
        (("sharding=optim_grads",), {"exposed communication", "update"}),
        (("optimizer=sgd",), {"update"}),
        (("engine=fsdp2",), {"forward and backward", "exposed communication", "update", "data and the rest"}),
    ],
)
def test_a_part_without_a_constant_of_its_settings_has_no_time(words: tuple[str, ...], parts: set[str]) -> None:
    found = step(*words)
    told = {name: why for name, (seconds, why) in found["parts"].items() if seconds is None}
    assert set(told) == parts
    assert found["step_s"] is None
    assert all(why.startswith("not calibrated: ") and "in lab/timed" in why for why in told.values())
    assert all("calibrated by lab/timed" in why for _, why in found["parts"].values() if "not" not in why)


def test_constants_of_a_machine_with_other_work_say_so() -> None:
    cell = compose(WORDS)
    busy, quiet = by(disturbance="load average 9.0 with 2 ranks"), by()
    assert busy.table(cell, busy.plan)[-1].strip() == "lab/timed was disturbed: load average 9.0 with 2 ranks"
    assert len(busy.table(cell, busy.plan)) == len(quiet.table(cell, quiet.plan)) + 1
    assert [step(calibration=each)["disturbance"] for each in (busy, quiet)] == ["load average 9.0 with 2 ranks", ""]


test_a_constant_of_other_settings_is_found = finds(
    "Plans of memory and traffic",
    test_a_part_without_a_constant_of_its_settings_has_no_time="""
        another dtype's constant: Constants are used whatever the settings are
            cli.cost.Calibration.part: if there.get(key) != here.get(key) => if False
            (words=("optimizer=sgd",), parts={"update"})
    """,
)


def test_a_run_that_is_not_timed_is_refused(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = lab.write(tmp_path, lab.config("native", "optim", 0), [0.1] * lab.TIMED)
    (path / "metrics.jsonl").write_text("")
    assert main(["plan", *WORDS[:-1], "--root", str(tmp_path), "--calibrate", str(path)]) == 2
    assert "its record is not whole" in capsys.readouterr().err
