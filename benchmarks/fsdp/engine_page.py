"""Fills in the made parts of docs/engine.md.

    python benchmarks/fsdp/engine_page.py

The prose is written by hand; what stands between `<!-- made: NAME -->` and `<!-- end -->` is made here, and what a
block of code prints is put into the `text` block below it: all blocks run in order, on two ranks, in one namespace.
`tests/docs/test_engine_page.py` fails when the page is not what this makes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from omegaconf import OmegaConf

from benchmarks.fsdp.engine_formulas import Setup, formula, kept, kept_formula, sent, transient
from benchmarks.pages import tables
from benchmarks.pages.tables import DOCS, ROOT, markdown_table
from harness.config.schema import Config
from harness.fsdp import FixedPoint, MixedPrecisionPolicy, Placements
from harness.fsdp.megatron import UNBUILT
from harness.fsdp.options import OuterStrategy, Strategy
from harness.fsdp.runtime.units import plan_units
from harness.fsdp.storage.layout import BucketLayout, ParamSpec, plan_bucket
from harness.fsdp.storage.placement import ON_INNER, ON_OUTER, OPERATIONS, Axis, Step
from harness.models.workload import LlamaWorkload
from tests.support.spawn import run_ranks

PAGE = DOCS / "engine.md"
PAIRS = tuple(itertools.product([s.name for s in Strategy], [s.name for s in OuterStrategy]))
GIB = 2.0**30
INNER, OUTER, MICROBATCHES = 8, 8, 4

# -- placements --------------------------------------------------------------------------------------------------------


def placements() -> str:
    buffers = [each.name.replace("grads", "gradients").replace("_", " ") for each in fields(Placements)]
    rows = []
    for axis, table in ((Axis.inner, ON_INNER), (Axis.outer, ON_OUTER)):
        for strategy, row in table.items():
            name = "none, or one rank" if strategy is None else f"`{strategy.name}`"
            rows.append((axis.name, name, *(each.value for each in row)))
    return markdown_table(["axis", "strategy", *buffers], rows)


def operations() -> str:
    rows = [(one.value, other.value, each.value) for (one, other), each in OPERATIONS.items()]
    return markdown_table(["from", "to", "operation"], rows)


def routes() -> str:
    """The routes of each pair through the tables, by when they are taken."""
    rows = []
    for inner, outer in PAIRS:
        placed = Placements.of(Strategy[inner], OuterStrategy[outer])
        each = placed.reductions[False]
        found = (each, placed.reductions[True][len(each) :], placed.unshard, placed.install)
        rows.append((f"`{inner}`", f"`{outer}`", *map(_route, found)))
    heads = ["inner", "outer", "each microbatch", "each step's end", "each use of a unit", "after the update"]
    return markdown_table(heads, rows)


def _route(steps: tuple[Step, ...]) -> str:
    return "; ".join(f"{step.operation.value} {step.axis.name}" for step in steps) or "-"


def sent_table() -> str:
    rows = []
    for inner in Strategy:
        for outer in (None, *OuterStrategy):
            placed = Placements.of(inner, outer)
            name = "none" if outer is None else f"`{outer.name}`"
            rows.append((f"`{inner.name}`", name, formula(placed, Axis.inner), formula(placed, Axis.outer)))
    return markdown_table(["inner", "outer", "inside", "outside"], rows)


def kept_table() -> str:
    rows = [
        (f"`{inner.name}`", *(kept_formula(Placements.of(inner, outer)) for outer in OuterStrategy))
        for inner in Strategy
    ]
    return markdown_table(["inner", "outer `no_shard`", "outer `optim`"], rows)


# -- numbers -----------------------------------------------------------------------------------------------------------


def llama_units() -> dict[str, list[ParamSpec]]:
    """Units of the Llama 3 8B shape (`model=llama_8b`) with names and shapes of their parameters."""
    config = Config()
    sizes: Any = OmegaConf.load(ROOT / "conf" / "model" / "llama_8b.yaml")  # no machine at hand need hold it
    for name, value in sizes.items():
        setattr(config.model, name, value)
    workload = LlamaWorkload(config)
    module = workload.build("meta", torch.bfloat16)
    return {
        plan.name: [ParamSpec(name, tuple(p.shape)) for members in plan.buckets.values() for name, p in members]
        for plan in plan_units(module, workload.unit_classes)
        if plan.buckets
    }


def layouts(num_ranks: int) -> list[BucketLayout]:
    align = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16).resolve(torch.bfloat16).align_elements
    return [plan_bucket(specs, num_ranks, align) for specs in llama_units().values()]


def lcm_padding(specs: list[ParamSpec], num_ranks: int) -> float:
    """What is added where one row grid holds all matrices: a multiple of ranks x the lcm of their row lengths."""
    grid = num_ranks * math.lcm(*(p.row_numel for p in specs if len(p.shape) > 1))
    numel = sum(p.numel for p in specs)
    return -(-numel // grid) * grid / numel - 1


def padding() -> str:
    specs = next(each for name, each in llama_units().items() if name.endswith("0") and len(each) > 2)
    rows = []
    for num_ranks in (8, 64, 256, 512, 1024):
        layout = plan_bucket(specs, num_ranks, 128)
        ours = sum(s.numel for s in layout.segments) / layout.param_numel - 1
        rows.append((num_ranks, f"{ours:.3%}", f"{lcm_padding(specs, num_ranks):.2%}"))
    return markdown_table(["ranks", "padding of one block", "with one grid of rows"], rows)


def example() -> str:
    units = layouts(INNER)
    travels = [sum(s.numel for s in each.segments) for each in units]
    moved, last = sum(travels), travels[-1]
    largest = max(each.bucket_numel for each in units)
    told = (
        f"P = {moved:,} elements as they travel over {INNER} ranks ({moved / sum(u.param_numel for u in units) - 1:.4%}"
        f" padding), U = {largest:,} in the largest unit; I = {INNER}, O = {OUTER}, k = {MICROBATCHES}; w = 2, c = 2,"
        " g = 4, m = 4, o = 8. GiB a rank:"
    )
    rows = []
    for inner, outer in PAIRS:
        s = Setup(inner, outer, INNER, OUTER, MICROBATCHES, c=2)
        traffic = [sent(s, Axis.inner, moved, last), sent(s, Axis.outer, moved)]
        numbers = [*traffic, *kept(s, moved).values(), transient(s, largest)]
        rows.append((f"`{inner}`", f"`{outer}`", *(f"{number / GIB:.2f}" for number in numbers)))
    roles = ["sent inside", "sent outside", "weights", "main weights", "main gradients", "optimizer", "transient"]
    return f"{told}\n\n{markdown_table(['inner', 'outer', *roles], rows)}"


def fixed_point() -> str:
    heads = ["exact_bits", "resolution", "an element of a microbatch stays below, with 64 terms", "with 4096 terms"]
    rows = [
        (bits, f"{2.0**-bits:.2g}", *(f"{FixedPoint(bits, terms).limit:g}" for terms in (64, 4096)))
        for bits in (36, 40, 44, 48)
    ]
    return markdown_table(heads, rows)


def unbuilt() -> str:
    rows = [(f"`{name}`", f"`{value}`") for name, value in UNBUILT.items()]
    return markdown_table(["argument", "accepted value, which asks for nothing"], rows)


# -- the page ----------------------------------------------------------------------------------------------------------

CODE = re.compile(r"```python\n(.*?)```\n(?:\n```text\n.*?```\n)?", re.S)


def run_code(rank: int, blocks: list[str]) -> list[str]:
    """Run all blocks in order in one namespace; what each printed. A module, so that classes can be found by name."""
    namespace: dict[str, Any] = {"rank": rank, "__name__": "docs_engine"}
    printed = []
    for block in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, "docs/engine.md", "exec"), namespace)
        printed.append(out.getvalue())
    return printed


def render(page: str, run: Callable[..., list[Any]] = run_ranks) -> str:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = {
        "padding": padding(), "example": example(), "fixed_point": fixed_point(), "unbuilt": unbuilt(),
        "placements": placements(), "operations": operations(), "routes": routes(), "sent": sent_table(),
        "kept": kept_table(),
    }  # fmt: skip
    for name, text in made.items():
        page = tables.put(page, name, text)
    printed = iter(run(run_code, 2, [match[1] for match in CODE.finditer(page)])[0])

    def with_output(match: re.Match[str]) -> str:
        output = next(printed)
        return f"```python\n{match[1]}```\n" + (f"\n```text\n{output}```\n" if output else "")

    return CODE.sub(with_output, page)


if __name__ == "__main__":
    from benchmarks.fsdp import engine_page  # ranks import what they run by name

    PAGE.write_text(engine_page.render(PAGE.read_text()))
