"""Numbers alone: imported from five kinds of files, and judged beside the noise of earlier runs."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from harness.cli.main import main
from harness.parity import Outcome
from harness.parity.outcome import SeedVerdict
from harness.parity.series import Series, against_history, judge_series
from harness.wandb_sync import series as readers
from harness.wandb_sync.series import import_series
from tests.support.mutants import finds
from tests.support.wandb_file import only_file

STEPS = 60
LOSS = {"loss": "train/loss", "step": "iteration"}


def curve(seed: int, *, shift: float = 0.0, spike: int = 0, noise: float = 0.01, every: int = 1) -> dict[int, float]:
    """A loss that falls from 4 to 2; a run has an offset of its own beside the noise of its steps."""
    rng = np.random.default_rng(seed)
    own = 1 + noise * rng.standard_normal() + shift
    rng = np.random.default_rng((seed, round(1e6 * shift)))
    return {
        step: float((2 + 2 * np.exp(-step / 15)) * own + 0.2 * noise * rng.standard_normal())
        * (3 if step == spike else 1)
        for step in range(every, STEPS + 1, every)
    }


def write_csv(path: Path, values: dict[int, float]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["iteration", "train/loss", "note"])
        writer.writerows((step, value, "x") for step, value in values.items())
    return path


def made(folder: Path, name: str, values: dict[int, float]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    import_series(write_csv(folder / f"{name}.csv", values), folder / "runs" / name, LOSS)
    return folder / "runs" / name


def history(folder: Path, count: int = 6, **keywords: Any) -> list[Path]:
    return [made(folder, f"old-{number}", curve(number, **keywords)) for number in range(count)]


# -- files -------------------------------------------------------------------------------------------------------------


def jsonl(path: Path, values: dict[int, float]) -> Path:
    lines = [{"iteration": step, "train/loss": value} for step, value in values.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"event": "begins"}, *lines]))
    return path


def golden(path: Path, values: Any) -> Path:
    head = {"start_step": 1, "end_step": STEPS, "step_interval": 1}
    path.write_text(json.dumps({"train/loss": {**head, "values": values}}))
    return path


def wandb_file(folder: Path, values: dict[int, float]) -> Path:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True)) as run:
        for step, value in values.items():
            run.log({"iteration": step, "train/loss": value})
    wandb.teardown()  # its own process writes the file, and ends here
    return only_file(folder).parent


def tensorboard(folder: Path, values: dict[int, float]) -> Path:
    summary = pytest.importorskip("tensorboard.summary")
    writer = summary.Writer(str(folder / "events"))
    for step, value in values.items():
        writer.add_scalar("train/loss", value, step)
    writer.close()
    return folder / "events"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "csv": lambda folder: write_csv(folder / "a.csv", curve(0)),
    "jsonl": lambda folder: jsonl(folder / "a.jsonl", curve(0)),
    "golden": lambda folder: golden(folder / "a.json", curve(0)),
    "former golden": lambda folder: golden(folder / "a.json", [*curve(0).values()]),
    "wandb": lambda folder: wandb_file(folder, curve(0)),
    "tensorboard": lambda folder: tensorboard(folder, curve(0)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_file_has_its_numbers(kind: str, tmp_path: Path) -> None:
    columns = {"loss": "train/loss"} | ({"step": "iteration"} if kind == "wandb" else {})
    import_series(SOURCES[kind](tmp_path), tmp_path / "runs" / "a", columns)
    found = Series.of(tmp_path / "runs" / "a")
    assert found.values["loss"] == (pytest.approx(curve(0), rel=1e-6) if kind == "tensorboard" else curve(0))


def test_a_long_record_of_wandb_is_put_together() -> None:
    """Records that cross blocks of 32 KiB; a torn end is left out."""
    first, second = b"a" * 40_000, b"b" * 100
    rest = readers.BLOCK - 2 * readers.HEADER
    parts = [(readers.FIRST, first[:rest]), (readers.LAST, first[rest:]), (readers.FULL, second)]
    data = b":W&B\0\0\0" + b"".join(struct.pack("<IHB", 0, len(part), kind) + part for kind, part in parts)
    assert list(readers.frames(data)) == [first, second]
    assert list(readers.frames(data[:-1])) == [first]


MISUSES: dict[str, tuple[str, str, Sequence[str], str]] = {
    "missing": ("a.csv", "", ["loss=train/loss"], "does not exist"),
    "wrong column": ("a.csv", "step,train/loss\n1,2\n", ["loss=train/los"], "is no column of"),
    "no step": ("a.csv", "a,train/loss\n1,2\n", ["loss=train/loss"], "say --columns step=COLUMN"),
    "empty": ("a.csv", "", ["loss=train/loss"], "is empty"),
    "no JSON": ("a.jsonl", "{\n", ["loss=train/loss"], "cannot be read as jsonl"),
    "no wandb": ("a.wandb", "nothing", ["loss=loss"], "does not begin as wandb's files do"),
    "unknown": ("a.parquet", "x", ["loss=loss"], "no kind of series that is known"),
    "no loss": ("a.csv", "step,train/loss\n1,2\n", ["lr=train/loss"], "must name the column of a loss"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_ends_in_one_message(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, text, columns, says = MISUSES[name]
    if name != "missing":
        (tmp_path / file).write_text(text)
    assert main(["import-series", str(tmp_path / file), "--into", str(tmp_path / "runs"), "--columns", *columns]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert says in told
    assert "Traceback" not in told
    assert not (tmp_path / "runs").exists()


def test_a_run_is_not_imported_over_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, "a", curve(0))
    words = ["import-series", str(tmp_path / "a.csv"), "--into", str(tmp_path / "runs"), "--columns", "loss=train/loss"]
    assert main([*words, "step=iteration"]) == 2
    assert "is there already" in capsys.readouterr().err


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_a_shift_beyond_noise_is_different(tmp_path: Path) -> None:
    found = against_history([made(tmp_path, "new", curve(50, shift=0.1))], history(tmp_path))
    assert found.outcome is Outcome.DIFFERENT, found.sentence
    assert "with a noise of" in found.sentence


def test_noise_alone_is_undecided_without_a_margin_and_equivalent_with_a_wide_one(tmp_path: Path) -> None:
    new, old = [made(tmp_path, f"new-{n}", curve(50 + n)) for n in range(2)], history(tmp_path)
    found = against_history(new, old)
    assert found.outcome is Outcome.UNDECIDED, found.sentence
    assert "--margin" in found.sentence or "no number of runs" in found.sentence
    wide = against_history(new, old, {"loss": 0.1})
    assert wide.outcome is Outcome.EQUIVALENT, wide.sentence
    narrow = against_history(new, old, {"loss": 0.005})
    assert narrow.outcome is Outcome.UNDECIDED
    assert f"{narrow.seeds_needed} runs on each side would decide it" in narrow.sentence


def test_two_series_alone_certify_nothing(tmp_path: Path) -> None:
    one, other = (made(tmp_path, name, curve(seed)) for name, seed in (("a", 0), ("c", 1)))
    found = against_history([one], [other])
    assert found.outcome is Outcome.UNDECIDED
    assert "a single pair has no noise" in found.sentence


def test_a_history_without_noise_asks_for_a_margin(tmp_path: Path) -> None:
    old = [made(tmp_path, f"old-{n}", curve(0)) for n in range(3)]
    new = [made(tmp_path, "new", {step: value * (1 + 1e-6) for step, value in curve(0).items()})]
    found = against_history(new, old)
    assert found.outcome is Outcome.UNDECIDED
    assert "--margin loss=SIZE" in found.sentence
    assert against_history(new, old, {"loss": 1e-4}).outcome is Outcome.EQUIVALENT


def test_only_common_steps_count(tmp_path: Path) -> None:
    old = history(tmp_path, 5)
    found = against_history([made(tmp_path, "new", curve(50, every=10))], old)
    assert "over 3 of 6 common steps" in found.sentence


def test_the_verbs_judge_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history(tmp_path / "old")
    new = made(tmp_path / "new", "new", curve(50, shift=0.1))
    words = ["verdict", str(tmp_path / "new" / "runs"), "--history", str(tmp_path / "old" / "runs")]
    assert main(words) == 1
    assert "DIFFERENT: runs/new beside 6 earlier runs" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--json", "--margin", "loss=50%"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "EQUIVALENT"
    assert main(["show", str(new)]) == 0
    assert "csv file new.csv: loss is train/loss" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--margin", "loss=much"]) == 2
    assert "loss=0.5%" in capsys.readouterr().err
    assert main(["baseline", str(new), "--out", str(tmp_path / "no.json")]) == 2
    assert "series of numbers" in capsys.readouterr().err
    assert main(["verdict", str(new), "--control", str(new.parents[2] / "old" / "runs" / "old-0")]) == 2
    assert "verdict NEW --history OLD" in capsys.readouterr().err
    assert main(["compare", str(new), str(new.parents[2] / "old" / "runs" / "old-0")]) == 2
    assert "verdict NEW --history OLD" in capsys.readouterr().err
    assert main(["verdict", str(new), "--history", str(new)]) == 2
    assert "both sides" in capsys.readouterr().err


def clean_job(number: int, margins: Mapping[str, float] = MappingProxyType({})) -> SeedVerdict:
    """A new run of a job beside six earlier ones."""
    runs = [
        Series(Path(str(n)), str(n), {"loss": curve(7 * number + n, noise=0.02), "grad_norm": {}}) for n in range(7)
    ]
    return judge_series(runs[:1], runs[1:], margins)


def test_false_alarms_are_as_many_as_promised() -> None:
    """Of clean jobs no more than 5 % are DIFFERENT, up to the chance of 400 draws."""
    alarms = sum(clean_job(number).outcome is Outcome.DIFFERENT for number in range(400))
    assert 3 < alarms < 37, "0.05 * 400 = 20, and four standard deviations"


def test_a_spike_is_named(tmp_path: Path) -> None:
    old = history(tmp_path, 8)
    found = against_history([made(tmp_path, "new", curve(3, spike=7))], old[4:], {"loss": 0.2})
    assert found.outcome is Outcome.UNDECIDED
    assert "at step 7, loss of" in found.sentence


def test_bands_hold_clean_runs() -> None:
    """Of 40 clean jobs hardly one has a number outside."""
    assert sum("where earlier runs lie" in clean_job(number).sentence for number in range(40)) < 8


def test_a_broken_run_is_different(tmp_path: Path) -> None:
    found = against_history([made(tmp_path, "new", curve(50) | {9: float("inf")})], history(tmp_path))
    assert found.outcome is Outcome.DIFFERENT
    assert "at step 9, loss of runs/new is inf" in found.sentence


def test_the_last_row_of_a_step_counts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss\n1,4.0\n2,3.0\n2,2.0\n3,\n")
    import_series(tmp_path / "a.csv", tmp_path / "runs" / "a", {"loss": "loss"})
    assert Series.of(tmp_path / "runs" / "a").values["loss"] == {1: 4.0, 2: 2.0}


test_a_mutant_is_found = finds(
    "Series",
    test_noise_alone_is_undecided_without_a_margin_and_equivalent_with_a_wide_one="""
        the noise of a new run: A new run has no noise
            parity.tiers.equivalence.unpaired_test: 1 / len(arm) + 1 / len(control) => 1 / len(control) ** 3
    """,
    test_a_spike_is_named="""
        spikes: No number leaves a band
            parity.series.Measure.band: half = times => half = 1e9 * times
    """,
    test_bands_hold_clean_runs="""
        many steps: Each step has 20 % of false alarms
            parity.series.Measure.band: 1 - ALPHA / (2 * tests) => 1 - 2 * ALPHA
    """,
    test_a_broken_run_is_different="""
        no number: An infinite loss passes
            parity.series._without_tests: ~np.isfinite(each.new) => np.isnan(each.new)
    """,
    test_the_last_row_of_a_step_counts="""
        resumed rows: The first row of a step counts
            wandb_sync.series._of_rows: column[int(place)] = found => column.setdefault(int(place), found)
    """,
)
