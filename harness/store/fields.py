"""Fields of `metrics.jsonl`: every metric declared once, with its unit, meaning and readers.

The recorder writes these, in this order, and refuses any other; the copy and the rehearsal use the
declarations, and docs/metrics.md is made from them (`benchmarks/pages/metrics_page.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    path: str
    """Keys from the line inwards, joined by slashes; `*` stands for keys that the run chooses."""
    unit: str
    meaning: str
    cost: bool = False
    """True for `COSTS`."""
    synced: bool = True

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


RESULTS = """
step (steps): Counted from 1.
loss (nats a token): Mean over the global batch: microbatch losses summed in global order in fp64, divided by their
    number.
grad_norm: Euclidean norm of the averaged gradient, before clipping.
param_norm: Euclidean norm of the main weights after the update; null in all but every `train.param_norm_every`-th
    step.
validation/loss (nats a token): Mean over the held-out batches, after the update; null in all but every
    `measure.validate_every`-th step.
validation/perplexity: e to the power of `validation/loss`.
lr: Learning rate of this step.
tokens (tokens): Tokens of the whole global batch.
loss_scale: Factor by which the loss was multiplied; null if there is none (`dtype.loss_scale`).
skipped: Whether gradients overflowed under a dynamic loss scale, so that no weight changed in this step; `grad_norm`
    is NaN then.
data_digest: Hash (16 hex digits) of all tokens that the data source holds for the step; the same in every layout.
fed_digest: The same hash of the tokens and targets that the engine was given; another one where a rank was fed
    wrongly.
"""
"""Metrics with the same bits in an interrupted and resumed run: path, unit and meaning."""
COSTS = """
step_time_s (seconds): Loading the batch, forward, backward and update, on rank 0; work between steps, and checks
    within them, are not counted.
time/data_s (seconds): Loading this step's batch.
time/forward_s (seconds): All forwards; null for engines that do not show where a forward begins.
time/backward_s (seconds): All backwards, with the reductions that run meanwhile; null if `forward_s` is null.
time/exposed_comm_s (seconds): The part of the other times in which rank 0's host waited for a collective: 0 with one
    rank; null on CUDA and for engines that do not report their waits.
time/optimizer_s (seconds): Norm, clipping and update.
time/other_s (seconds): What is left of `step_time_s` beside `data_s`, `forward_s`, `backward_s` and `optimizer_s`;
    with all forwards and backwards if `forward_s` is null.
memory/allocated (bytes): Most memory that tensors took in the step, by CUDA's allocator; null on CPU.
memory/reserved (bytes): Most memory that CUDA's allocator reserved in the step; null on CPU.
memory/alloc_retries (retries): Retries of CUDA's allocator since the process began; null on CPU.
memory/accounted (bytes): What the engine keeps between steps, by its own account.
memory/persistent_tensor_bytes (bytes): Tensor storage between steps: on CUDA always, on CPU only in the last warm-up
    step of `measure=bench`.
memory/peak_tensor_bytes (bytes): Most tensor storage within the step; null if `persistent_tensor_bytes` is null.
memory/rss (bytes): Resident set of rank 0's process.
counters/transient_peak_bytes (bytes): Most bytes of temporary buckets (gathered weights, unreduced gradients) alive
    at once in the step; null for engines that do not count them.
tflops_per_rank (TFLOP/s): The model's arithmetic per second; null for a model of your own.
mfu: `tflops_per_rank` divided by the device's peak; null if that is unknown.
comm/*/count (calls): Number of collectives of this kind that the engine issued on rank 0.
comm/*/bytes (bytes): Bytes that rank 0 sent in them.
"""
"""Metrics that differ between executions of a run."""
_DECLARED = re.compile(r"^(\S+?)(?: \((.+?)\))?: (.+(?:\n    .+)*)", re.MULTILINE)


def _declared(table: str, *, cost: bool) -> Iterator[Metric]:
    for path, unit, meaning in _DECLARED.findall(table):
        yield Metric(path, unit, " ".join(meaning.split()), cost, synced=not path.endswith("_digest"))


METRICS = (
    *_declared(RESULTS, cost=False),
    *_declared(COSTS, cost=True),
    Metric("own/*", "", "What the classes of `measure.callbacks` returned, by the names they give."),
)
_BY_PATH = {metric.path: metric for metric in METRICS}
_GIVEN = dict.fromkeys(metric.path.partition("/*")[0] for metric in METRICS)


def metric_of(path: str) -> Metric | None:
    """Declaration of a leaf of a line, such as `comm/all_gather/bytes`; None if undeclared."""
    keys = path.split("/")
    return _BY_PATH.get(path) or _BY_PATH.get("/".join([*keys[:1], "*", *keys[2:]]))


def members(group: str) -> list[Metric]:
    """Metrics directly below a key of the line, such as those of `counters`."""
    return [metric for metric in METRICS if metric.path == f"{group}/{metric.name}"]


def as_line(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested line from values by path, in the order of `METRICS`.

    A metric with `*` takes a mapping at the path before it. Raises `ValueError`: a metric has no value, or a value no
    metric.
    """
    missing, undeclared = _GIVEN.keys() - values.keys(), values.keys() - _GIVEN.keys()
    if missing or undeclared:
        raise ValueError(
            f"a line of metrics.jsonl lacks {', '.join(sorted(missing)) or 'nothing'} and has undeclared"
            f" {', '.join(sorted(undeclared)) or 'nothing'}; a metric is declared in harness/store/fields.py and"
            " measured in harness/train/record.py (StepRecords.line), or counted by the engine (counters)"
        )
    line: dict[str, Any] = {}
    for path in _GIVEN:
        *groups, name = path.split("/")
        inner = line
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = values[path]
    return line


def leaves(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def compared(record: Mapping[str, Any]) -> dict[str, Any]:
    declared = ((path, value, metric_of(path)) for path, value in leaves(record))
    return {path: value for path, value, metric in declared if metric is None or not metric.cost}


def synced(record: Mapping[str, Any]) -> dict[str, Any]:
    declared = ((path, value, metric_of(path)) for path, value in leaves(record) if value is not None)
    return {path: value for path, value, metric in declared if metric is None or metric.synced}
