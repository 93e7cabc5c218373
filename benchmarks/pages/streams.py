"""Write docs/records/streams.md: what streams wait for, what breaks without each of these edges, and what overlaps.

    python benchmarks/checks/streams.py
    python benchmarks/pages/streams.py

The first command records trainings on a CPU and writes benchmarks/data/streams.json, which the page is made of.
"""

from __future__ import annotations

from typing import Any

from benchmarks.pages.tables import DOCS, markdown_table, read
from tests.streams.edges import REASONS

PAGE = DOCS / "records" / "streams.md"
HEAD = """# What streams wait for

*Record. Which waits the CUDA path of the engine has, what breaks without each, and what overlaps. Made by
`python benchmarks/checks/streams.py && python benchmarks/pages/streams.py`; the data are in
[streams.json](../../benchmarks/data/streams.json).*

No GPU was used. The CUDA path of the engine runs on a CPU with a recorder in place of `torch.cuda` and process groups
that order their collectives as NCCL does ([tests/streams](../../tests/streams)). Every operation is logged with its
stream and the bytes that it reads and writes, every event with record and waits, every allocation as the caching
allocator may hand it out again at the earliest. Vector clocks over streams and host then find each pair of accesses to
the same bytes, one of them a write, that nothing orders: a *race*. What a wait costs on a device is not measured here.
"""
EDGES = """An *edge* is a line of the engine that makes a stream wait for an event or for a collective, or the host for
a stream. All its waits are left out of a training's log, and races are looked for anew. Where a training races without
an edge, one such race is shown: the buffer, what the host issued first, and what then runs too early. The engine calls
`record_stream` nowhere. A number that the host reads is no edge, for it could not go on without it."""
COSTS = """The same log, and a cost for each operation and byte, tell when a step would end. torch's own FSDP2 runs on
the same recorder, with the same model, optimizer (fused AdamW) and clipping, as the yardstick. The host
needs {launch_us:g} us for a launch and a fifth of that for an event or a wait; the device's memory moves
{memory:g} TB/s, products of matrices run at {flops:g} TFLOP/s, and a collective takes its latency and the
bytes of a ring, whatever else is on the link. The model is a Llama of {layers} blocks in the proportions of
the 8B shape, with bf16 weights in use, fp32 main weights and one microbatch a step, on {ranks} ranks. What
is recorded is narrow; times are those of the sizes that the columns name. They are the model's, and no
GPU's. A step takes from the end of everything of the step before to that of its own. *Exposed* is what it
would be shorter by if collectives took no time.

Under a bf16 wire FSDP2 has NCCL sum in bf16; the engine sums in fp32. Under `optim_grads` FSDP2 gathers in
the forward and keeps that for the backward; the engine gathers after the update, and each unit waits for its
own weights."""
RECORDED = """{trainings:,} trainings of two steps on two to six ranks, {operations:,} operations on\
 streams, torch {torch}: {count} race{s}.
Among them are those of CI, which hold every pair of values of strategy, hybrid, microbatches,\
 prefetch, plain, double or user buffers, offload, recomputation, clipping, stream of the backward and dtype\
 policy, and some with what is not combined with everything: weights of 8 bits under every recipe, an inner\
 axis of one rank, programs that read or load weights; and {parts} of {of} parts of the\
 product of all these, which has {product:,}."""
Facts = dict[str, Any]


def page(facts: Facts) -> str:
    races, costs, machine = facts["races"], facts["costs"], facts["costs"]["machine"]
    told = COSTS.format(
        launch_us=machine["launch_s"] * 1e6,
        memory=machine["bytes_per_s"] / 1e12,
        flops=machine["flops"] / 1e12,
        layers=costs["layers"],
        ranks=costs["ranks"],
    )
    parts = [
        f"{HEAD}\n## What was recorded\n",
        RECORDED.format(**facts | {"count": len(races) or "no", "s": "s" * (len(races) != 1)}),
        *(f"- {race}" for race in races),
        f"\n## What breaks without each edge\n\n{EDGES}\n",
        edges(facts["edges"].values()),
        f"\n## What overlaps\n\n{told}\n",
        launches(costs["rows"]),
        "",
        times(costs),
    ]
    return "\n".join(parts) + "\n"


def launches(rows: Any) -> str:
    head = ["kernels", "model's", "beside it", "collectives", "events and waits", "host stops"]
    cells = []
    for row in rows:
        beside = row["engine"] + row["update"]
        total = row["compute"] + beside + row["collectives"]
        counts = [total, row["compute"], beside, row["collectives"], row["orders"], sum(row["stops"].values())]
        cells.append([*_arm(row), *counts])
    return markdown_table([*ARM, *head], cells)


def times(costs: Facts) -> str:
    columns = [f"{size}, {link}: step / exposed, ms" for size in costs["sizes"] for link in costs["links"]]
    rows = [
        [*_arm(row), *(f"{each['step_ms']:.1f} / {each['exposed_ms']:.1f}" for each in row["times"])]
        for row in costs["rows"]
    ]
    return markdown_table([*ARM, *columns], rows)


ARM = ("engine", "strategy", "wire")


def _arm(row: Facts) -> tuple[str, str, str]:
    return row["name"], f"`{row['strategy']}`", row["wire"]


def edges(rows: Any) -> str:
    """The table of edges, most used first."""
    head = ["edge", "what waits", "trainings with it", "of which race without it", "what breaks"]
    cells = []
    for row in sorted(rows, key=lambda row: -row["trainings"]):
        place = f"`{row['file'].removeprefix('harness/fsdp/')}`, `{row['function']}`: `{row['source']}`"
        cells.append([place, row["kind"], f"{row['trainings']:,}", f"{row['racing']:,}", broken(row)])
    return markdown_table(head, cells)


def broken(row: Facts) -> str:
    """A race there is without an edge, or what the edge is for."""
    example = row["example"]
    if example is None:
        return f"No access to memory: {REASONS[row['function']]}"
    then = example["then"].removeprefix("the next use of its memory, ")
    return f"{example['buffer'].replace(' | ', ' and ')}: {_short(example['first'])}; then {_short(then)}"


def _short(what: str) -> str:
    return what.replace("harness/fsdp/", "").replace(" at tests/streams/programs.py (forward)", " in the forward")


if __name__ == "__main__":
    PAGE.write_text(page(read("streams.json")), encoding="utf-8")
