"""ms/step is one number wherever it is printed: the median, without the first step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from harness.launch.terminal import progress_line
from harness.launch.watch import row
from harness.store import results, show
from harness.store.metrics import MetricsWriter
from harness.store.rundir import RunDir
from tests.support.factory import freeze, small_config
from tests.support.mutants import finds


def written(path: Path, times: list[float], median: float | None = None) -> RunDir:
    freeze(small_config(train__steps=9), path)
    with closing(MetricsWriter(path / "metrics.jsonl")) as writer:
        for step, seconds in enumerate(times, start=1):
            writer.write({"step": step, "loss": 1.0, "step_time_s": seconds, "tokens": 8})
    if median is not None:
        (path / "summary.json").write_text(json.dumps({"step": len(times), "step_time_s": {"median": median}}))
    return RunDir(path)


def wrong_medians(root: Path) -> Iterator[str]:
    for name, times, known, wanted in (
        ("running", [9.0, 0.2, 0.1, 0.4], None, 0.2),
        ("ended", [9.0, 0.2, 0.1, 0.4], 0.15, 0.15),
        ("just begun", [9.0], None, 9.0),
        ("long", [9.0, *[5.0] * 20, *[0.3] * 50], None, 0.3),
        ("not begun", [], None, None),
    ):
        run = written(root / "s" / name, times, known)
        if results.results(run)["step_time_s"] != wanted:
            yield f"{name}: {results.results(run)['step_time_s']}"
        shown = row(run, None, "").shown["ms/step"]
        if shown != ("" if wanted is None else f"{1e3 * wanted:.0f}"):
            yield f"watch, {name}: {shown}"
        told = show._progress(run).get("ms/step")
        if told != (None if wanted is None else f"{1e3 * wanted:.1f}"):
            yield f"show, {name}: {told}"
    message = {"step": 3, "loss": 1.0, "step_time_s": 7.0, "tokens": 100, "memory": {"allocated": 0}}
    line = progress_line(message, 5, None, 0.5)
    if " 500 ms/step  200 tokens/s " not in line:
        yield line


def odd_results(root: Path) -> Iterator[str]:
    """Results that are not those of a run of three steps, the first of which warms up."""
    freeze(small_config(train__steps=3), root)
    with closing(MetricsWriter(root / "metrics.jsonl")) as writer:
        for step, seconds in enumerate((8.0, 0.5, 1.5), start=1):
            line = {"step": step, "loss": 4.0 - step, "step_time_s": seconds, "tokens": 60, "mfu": 0.25}
            size = {"rss": 100 - step, "allocated": 10 * step, "peak_tensor_bytes": None}
            comm = {"all_gather": {"count": 1, "bytes": step}, "all_reduce": {"count": 2, "bytes": 4}}
            rest = {"time": {"exposed_comm_s": step / 4}, "validation": {"loss": 5.0 - step}}
            writer.write(line | {"memory": size, "comm": comm} | rest)
    (root / "summary.json").write_text(json.dumps({"accounted_bytes": {"weights": 3, "padding": 1}, "wall_s": 12.5}))
    wanted = {
        "steps_done": 3, "final_loss": 1.0, "held_out_loss": 2.0, "step_time_s": 1.0, "exposed_comm_s": 0.5,
        "tokens_per_s": 60.0, "mfu": 0.375, "tflops_per_rank": None, "accounted_bytes": 4, "peak_bytes": 30,
        "rss_bytes": 99, "sent_bytes": 7, "planned_peak_bytes": None, "leaves_plan": "", "wall_s": 12.5,
    }  # fmt: skip
    found = results.results(RunDir(root))
    yield from (f"{name}: {found[name]}, not {value}" for name, value in wanted.items() if found[name] != value)


test_a_mutant_is_found = finds(
    "ms/step",
    wrong_medians="""
        the first step: The first step counts
            store.results.median_step_time: times[1:] if => times if
        its own while it ends: No summary
            store.results.median_step_time: lines[-1]["step"] and => -1 and
        the last step: ms/step is not the median of steps
            store.results.median_step_time: statistics.median( => max(
    """,
    odd_results="""
        rates of the last step: Rates are of the last step's own time
            store.results.rates: (last.get("step_time_s") or 0.0) / seconds => 1.0
        the first held-out loss: The first loss on held-out data is called the newest
            store.results.results: held_out[-1] => held_out[0]
        the least memory: The smallest resident set is called the peak
            store.results.results: max(numbers(lines, "memory/rss") => min(numbers(lines, "memory/rss")
        one collective: Bytes of one kind of collective alone are counted
            store.results.results: sum(kind["bytes"] for => max(kind["bytes"] for
        nothing allocated: A peak is missing where only CUDA's allocator saw it
            store.results._peak: numbers(lines, "memory/allocated") => []
    """,
)
test_a_copied_mutant_is_found = finds(
    "wandb",
    odd_results="""
        resident set as peak: The resident set of the process is called the peak of tensor memory
            store.results._peak: "memory/peak_tensor_bytes" => "memory/rss"
    """,
)
