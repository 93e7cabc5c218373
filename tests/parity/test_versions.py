"""Two versions of the code: what may differ, what is owed, and whose fault it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from harness.parity import Outcome, Verdict
from harness.parity.compare import ONE_VERSION, compare_versions
from tests.parity.arms import Arm, broken
from tests.parity.conftest import Bench
from tests.parity.edits import edit_config, edit_json

PLAIN = Arm(numerics="ordered", witnessed=True)
DOUBLED = broken(PLAIN, reduced=lambda mean, own, arm: {name: 2 * value for name, value in mean.items()})
Edit = Callable[[Path], None]


def version(bench: Bench, target: Path, arm: Arm, *edits: Edit) -> Path:
    """A run of an arm by other sources than every other one's."""
    shutil.copytree(bench.run(arm), target)
    edit_json(target / "provenance.json", sources_digest=target.name.ljust(64, "0"))
    for edit in edits:
        edit(target)
    return target


def judged(
    bench: Bench, tmp_path: Path, arm: Arm, *edits: Edit, control: Arm = PLAIN, bitwise: bool = False
) -> Verdict:
    new = version(bench, tmp_path / "lab" / "new", arm, *edits)
    old = version(bench, tmp_path / "lab" / "old", control)
    return compare_versions(new, old, ("HEAD (1a)", "main (2b)"), bitwise=bitwise)


def forget(group: str, key: str) -> Edit:
    """As if a version had never known a setting."""

    def edit(run: Path) -> None:
        config = yaml.safe_load((run / "config.yaml").read_text())
        del config[group][key]
        (run / "config.yaml").write_text(yaml.safe_dump(config))

    return edit


def test_equal_bits_of_other_sources_are_equal(bench: Bench, tmp_path: Path) -> None:
    found = judged(bench, tmp_path, PLAIN)
    assert found.outcome is Outcome.EQUAL
    assert found.sentence.startswith("EQUAL: HEAD (1a) against main (2b) agrees")


def test_other_bits_are_owed_by_one_code_or_on_demand(bench: Bench, tmp_path: Path) -> None:
    """Sums made in another order, as a rewritten reduction may make them."""
    other = Arm(numerics="ordered", witnessed=True, strategy="optim")
    same = lambda run: edit_config(run, "sharding", strategy="optim_grads_params")  # noqa: E731
    one_code = lambda run: edit_json(run / "provenance.json", sources_digest="old".ljust(64, "0"))  # noqa: E731
    for edits, bitwise, outcome, said in (
        ([same], False, Outcome.EQUIVALENT, "T2: two versions of the code"),
        ([same], True, Outcome.DIFFERENT, "T1: --bitwise"),
        ([same, one_code], False, Outcome.DIFFERENT, "no source that can change a number differs"),
    ):
        found = judged(bench, tmp_path / said, other, *edits, bitwise=bitwise)
        assert found.outcome is outcome
        assert said in found.admissible


@pytest.mark.parametrize(("new", "old", "whose"), [(DOUBLED, PLAIN, "HEAD (1a)"), (PLAIN, DOUBLED, "main (2b)")])
def test_a_fault_of_one_version_is_named(bench: Bench, tmp_path: Path, new: Arm, old: Arm, whose: str) -> None:
    found = judged(bench, tmp_path, new, control=old)
    assert found.outcome is Outcome.DIFFERENT
    assert f"in {whose}" in found.sentence


@pytest.mark.parametrize(
    ("group", "key"), [("train", "warmup_steps"), ("measure", "update_steps"), ("dtype", "compute")]
)
def test_a_setting_of_one_version_is_a_part_of_the_code(bench: Bench, tmp_path: Path, group: str, key: str) -> None:
    found = judged(bench, tmp_path, PLAIN, forget(group, key))
    assert found.outcome is Outcome.EQUAL
    told = [row.note for row in found.evidence if row.check == ONE_VERSION]
    assert told == ([] if group == "measure" else [f"{group}.{key}: part of the code"])


@pytest.mark.parametrize(("group", "key", "value"), [("optimizer", "lr", 0.5), ("dtype", "grad_comm", "bf16")])
def test_a_changed_default_is_another_configuration(
    bench: Bench, tmp_path: Path, group: str, key: str, value: object
) -> None:
    """Axes of other studies too: here the code alone may differ."""
    change = lambda run: edit_config(run, group, **{key: value})  # noqa: E731
    found = judged(bench, tmp_path, PLAIN, change)
    assert found.outcome is Outcome.NOT_COMPARABLE
    assert f"{group}.{key} is {value}" in found.sentence
