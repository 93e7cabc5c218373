"""Adding a metric touches two places: where it is declared and where it is measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from harness.store.fields import METRICS, as_line, compared, leaves, metric_of, synced
from tests.architecture.places import SMALLEST, Copy

FIELDS, RECORD = "harness/store/fields.py", "harness/train/record.py"
DECLARED = "params_per_rank (parameters): Mean over ranks.\n"
MEASURED = '                "params_per_rank": 12.5 * step,\n'

READERS = """
import json, sys
from harness.store.fields import compared, metric_of, synced
line, metric = json.loads(open(sys.argv[1]).readline()), metric_of("params_per_rank")
told = "params_per_rank" in compared(line), synced(line)["params_per_rank"], [metric.unit, metric.meaning]
print(json.dumps(told))
"""


def trained(copy: Copy) -> subprocess.CompletedProcess[str]:
    return copy.run("run.py", *SMALLEST, "train.steps=2")


def test_a_metric_is_added_in_two_places(tmp_path: Path) -> None:
    """It is written, synced, left out of what a resume compares, and documented; one place alone is refused."""
    copy = Copy(tmp_path)
    copy.insert(FIELDS, DECLARED, before="tflops_per_rank (TFLOP/s)")
    refused = trained(copy)
    assert refused.returncode != 0
    assert "a line of metrics.jsonl lacks params_per_rank" in refused.stdout + refused.stderr
    copy.insert(RECORD, MEASURED, before='                "tflops_per_rank"')
    assert copy.changed() == [FIELDS, RECORD]
    done = trained(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (each for each in copy.folder.glob("runs/*/*/metrics.jsonl") if each.stat().st_size)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["params_per_rank"] for line in lines] == [12.5, 25.0]
    told = copy.run("-c", READERS, str(path))
    is_compared, sent, said = json.loads(told.stdout)
    assert (is_compared, sent) == (False, 12.5)
    assert said == ["parameters", "Mean over ranks."]


def test_a_line_has_every_metric_and_no_other_in_the_order_of_the_table() -> None:
    paths = dict.fromkeys(each.path.partition("/*")[0] for each in METRICS)
    values = {path: {} if path in ("comm", "own") else 1 for path in reversed(paths)}
    assert [path for path, _ in leaves(as_line(values))] == [path for path in paths if path not in ("comm", "own")]
    with pytest.raises(ValueError, match="lacks lr and has undeclared lrr"):
        as_line({path if path != "lr" else "lrr": value for path, value in values.items()})


def test_costs_are_not_compared_and_what_nothing_declares_is() -> None:
    line = {"loss": 1.0, "step_time_s": 2.0, "time": {"data_s": 3.0}, "comm": {"all_gather": {"bytes": 4}}, "new": 5}
    assert compared(line) == {"loss": 1.0, "new": 5}
    assert synced(line | {"data_digest": "f", "mfu": None}) == dict(leaves(line))


def test_open_keys_have_a_declaration() -> None:
    found = metric_of("comm/reduce_scatter/bytes")
    assert found is not None
    assert (found.unit, metric_of("comm/bytes"), metric_of("comm/a/b/bytes")) == ("bytes", None, None)
