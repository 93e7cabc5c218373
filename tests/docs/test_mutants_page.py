"""docs/records/mutants.md has every mutant that a test declares, and none that no test declares any more."""

from __future__ import annotations

import json
from importlib import import_module

from benchmarks.pages.mutants import PAGE, merged, page, read
from tests.support.mutants import DECLARED, PROPERTY, Mutant, Recorder

MODULES = (
    "tests.analysis.test_analysis",
    "tests.checkpoint.test_foreign",
    "tests.checkpoint.test_tensor_file",
    "tests.cli.test_completion",
    "tests.cli.test_eighty_columns",
    "tests.cli.test_verbs",
    "tests.config.test_overrides",
    "tests.engines.test_mutants",
    "tests.fsdp.behaviours.test_behaviours",
    "tests.fsdp.fp8.test_hardware",
    "tests.fsdp.fp8.test_mutants",
    "tests.fsdp.fp8.test_portions",
    "tests.fsdp.fp8.test_two_payloads",
    "tests.fsdp.megatron.test_calls",
    "tests.fsdp.megatron.test_state",
    "tests.fsdp.megatron.test_steps",
    "tests.fsdp.megatron.test_weights",
    "tests.fsdp.ordinary.test_ordinary",
    "tests.fsdp.tensor_parallel.test_declared",
    "tests.fsdp.tensor_parallel.test_edges",
    "tests.fsdp.tensor_parallel.test_promises",
    "tests.fsdp.tensor_parallel.test_state",
    "tests.fsdp.test_clear_errors",
    "tests.fsdp.test_clear_errors_in_use",
    "tests.fsdp.test_clipping",
    "tests.fsdp.test_closing",
    "tests.fsdp.test_barred",
    "tests.fsdp.test_gathered",
    "tests.fsdp.test_gradient_access",
    "tests.fsdp.test_habits",
    "tests.fsdp.test_hidden_tensors",
    "tests.fsdp.test_kept",
    "tests.fsdp.test_long_wait",
    "tests.fsdp.test_loop_habits",
    "tests.fsdp.test_mutants",
    "tests.fsdp.test_many_ranks",
    "tests.fsdp.test_many_units",
    "tests.fsdp.test_notices",
    "tests.fsdp.test_optimizer_choices",
    "tests.fsdp.test_optimizers",
    "tests.fsdp.test_peer_memory",
    "tests.fsdp.test_rank_dependent",
    "tests.fsdp.test_rank_dependent_forwards",
    "tests.fsdp.test_deadlock",
    "tests.fsdp.test_released",
    "tests.fsdp.test_requires_grad",
    "tests.fsdp.test_saving",
    "tests.fsdp.test_sharded_twice",
    "tests.fsdp.test_step_cost",
    "tests.fsdp.test_step_habits",
    "tests.fsdp.test_store_requests",
    "tests.fsdp.test_timing",
    "tests.fsdp.test_two_optimizers",
    "tests.fsdp.test_unused",
    "tests.fsdp.test_wrapper",
    "tests.launch.test_ends",
    "tests.fsdp.test_wrong_loads",
    "tests.house.test_doors",
    "tests.house.test_records",
    "tests.launch.test_sbatch",
    "tests.launch.test_scheduler",
    "tests.launch.test_verbs",
    "tests.launch.test_waiting",
    "tests.mirror.test_mirror",
    "tests.mirror.test_sync",
    "tests.own.test_guide",
    "tests.parity.test_apart",
    "tests.parity.test_comparable",
    "tests.parity.test_mutants",
    "tests.parity.test_optimizer",
    "tests.parity.test_processes",
    "tests.parity.test_reach",
    "tests.parity.test_stability",
    "tests.parity.test_study",
    "tests.parity.test_structure",
    "tests.parity.test_vouched",
    "tests.parity.test_witness",
    "tests.parity.test_witnessed",
    "tests.probe.test_forward_watch",
    "tests.probe.test_meters",
    "tests.probe.test_sample",
    "tests.probe.test_sketch",
    "tests.report.test_report",
    "tests.store.test_commands",
    "tests.store.test_screen",
    "tests.store.test_show",
    "tests.store.test_vouching",
    "tests.streams.test_equal_chunks",
    "tests.streams.test_faults",
    "tests.streams.test_meetings",
    "tests.streams.test_numbers",
    "tests.study.test_files",
    "tests.study.test_late",
    "tests.train.test_stopping",
    "tests.train.test_again",
    "tests.train.test_callbacks",
    "tests.train.test_default_captures",
    "tests.train.test_drift",
    "tests.train.test_forward",
    "tests.train.test_left_out",
    "tests.train.test_resume",
    "tests.worker.test_signals",
)
"""All that declare mutants; in a run of the whole suite, one that is missing here is noticed."""


def test_the_page_names_every_mutant() -> None:
    for module in MODULES:
        import_module(module)
    recorded = {Mutant(row["room"], row["name"], row["breaks"]) for row in read()}
    assert recorded == set(DECLARED), "run python benchmarks/pages/mutants.py"


def test_the_page_is_made_from_the_data() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read())


def test_rows_of_files_that_were_not_run_are_kept() -> None:
    rows = [{"room": "r", "test": f"tests/{name}::test", "seconds": 1.0} for name in ("a/test_x.py", "a/y.py", "b.py")]
    again = [rows[0] | {"seconds": 2.0}]
    assert merged(rows, again, ["tests/a"]) == [again[0], rows[2]]
    assert merged(rows, again, []) == again


class Report:
    """Of a test that says it has killed something."""

    when, nodeid, duration = "call", "tests/test_x.py::test_y[z]", 7.0

    def __init__(self, passed: bool, *properties: tuple[str, object]) -> None:
        self.passed, self.user_properties = passed, list(properties)


def test_only_what_was_killed_is_recorded_with_its_own_seconds(tmp_path) -> None:
    told = (PROPERTY, ["room", "name", "breaks"])
    recorder = Recorder(tmp_path / "found.json")
    for report in (Report(True, told), Report(True, told, ("seconds", 0.5)), Report(False, told), Report(True)):
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish()
    assert [row["seconds"] for row in json.loads((tmp_path / "found.json").read_text())] == [7.0, 0.5]
