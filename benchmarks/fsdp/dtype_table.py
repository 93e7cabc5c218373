"""Which dtype a gradient really had at each station, for every dtype policy and strategy. Writes docs/dtypes.md.

    python benchmarks/fsdp/dtype_table.py

Nothing in the table is read from a policy: two ranks train two microbatches and one update, and every station is
watched from outside: what the forward computes with, what is handed to *encode*, every message sent, every addition
made while ranks are summed (seen at torch's dispatcher), the buffer that keeps the sum, what the optimizer steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pages.tables import DOCS, made, markdown_table
from harness.config.schema import Dtype, DtypeConfig
from harness.engines.protocol import TORCH_DTYPES
from harness.fsdp import Fp8, Fp8Linear, MixedPrecisionPolicy, Strategy, fully_shard
from harness.fsdp.comm import reduction
from tests.support.spawn import run_ranks

PAGE = DOCS / "dtypes.md"
STATIONS = ("forward", "unreduced", "sent", "summed", "sums sent", "kept", "stepped")
HEADINGS = (
    *("weights in the forward", "gradient before encode", "on the wire", "running sum over ranks"),
    *("second leg of an all-reduce", "main gradient", "stepped weights"),
)
EXTRA = {
    "fp16_comm": ("fp16", "fp32", "fp32", "fp16", None),
    "bf16_sums": ("bf16", "fp32", "fp32", "bf16", "bf16"),
    "fp32_in_fp64": ("fp32", "fp64", "fp64", "fp32", "fp64"),
}
"""Policies without a file in conf/dtype: compute, main weights, main gradients, wire, sum."""
NAMES = {dtype: short.name for short, dtype in TORCH_DTYPES.items()} | {torch.float8_e4m3fn: "e4m3"}

Trace = dict[str, set[str]]
"""Station -> dtypes seen there."""


class Additions(TorchDispatchMode):
    """Collects the dtype of every running sum: the left side of additions in place, or into a place that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; note additions."""
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.out):
            self.left.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(trace: Trace) -> Iterator[None]:
    encode, sum_in_order = reduction.Floating.encode, reduction.sum_in_order
    exchange, spread = reduction.Reduction.exchange, reduction.Reduction.spread

    def note(station: str, tensor: Tensor) -> None:
        trace[station].add(NAMES[tensor.dtype])

    def noting_encode(self: Any, gradients: Tensor) -> Tensor:
        note("unreduced", gradients)
        return encode(self, gradients)

    def noting_sum(contributions: list[Tensor], target: Tensor, accum: torch.dtype, **how: Any) -> None:
        with Additions() as seen:
            sum_in_order(contributions, target, accum, **how)
        between_ranks = seen.left[: len(contributions) - 1]  # the next one, if any, adds to what is kept
        trace["summed"].update(NAMES[dtype] for dtype in between_ranks)

    def note_parts(station: str, parts: Any) -> None:
        for part in parts:
            if part.tensor.dtype.is_floating_point:
                note(station, part.tensor)

    def noting_exchange(self: Any, parts: Any, label: Any, factor: float = 1.0) -> Any:
        note_parts("sent", parts)
        return exchange(self, parts, label, factor)

    def noting_leg(self: Any, spreading: Any, whole: Any) -> Any:
        note_parts("sums sent", whole)
        return spread(self, spreading, whole)

    with (
        mock.patch.object(reduction.Floating, "encode", noting_encode),
        mock.patch.object(reduction, "sum_in_order", noting_sum),
        mock.patch.object(reduction.Reduction, "exchange", noting_exchange),
        mock.patch.object(reduction.Reduction, "spread", noting_leg),
    ):
        yield


def trace_of(
    rank: int, policy: MixedPrecisionPolicy, compute: torch.dtype, strategy: str, recipe: Fp8 | None = None
) -> Trace:
    trace: Trace = {station: set() for station in STATIONS}
    torch.manual_seed(0)
    width = 8 if recipe is None else recipe.multiple
    module = nn.Linear(width, width, bias=False, dtype=compute)
    if recipe is not None:
        Fp8Linear.convert(module, recipe)
    module.register_forward_pre_hook(lambda m, args: trace["forward"].add(NAMES[m.weight.dtype]))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def stepping(opt: torch.optim.Optimizer, *_: Any) -> None:
        params = [param for group in opt.param_groups for param in group["params"]]
        trace["stepped"].update(NAMES[each.dtype] for param in params for each in (param, param.grad))

    with watching(trace):
        model, _ = fully_shard(  # what is sent can be watched; what is read has the same dtype
            module, optimizer, zero_dp_strategy=strategy, mixed_precision_policy=policy, transport="backend"
        )
        optimizer.register_step_pre_hook(stepping)
        for last in (False, True):
            model.set_model_auto_sync(last)
            model(torch.full((1, width), 1.0 + rank, dtype=compute)).sum().backward()
        model.finish_grad_sync()
        trace["kept"].update(NAMES[piece.dtype] for bucket in model.engine.buckets for piece in bucket.grad_shards)
        optimizer.step()
    model.close()
    return trace


def policies() -> dict[str, DtypeConfig]:
    from harness.config.compose import compose

    folder = Path(__file__).resolve().parents[2] / "conf" / "dtype"
    found = {
        path.stem: compose([f"dtype={path.stem}", "model=tiny_wide", "launch.dry_run=true"]).typed.dtype
        for path in sorted(folder.glob("*.yaml"))
    }
    for name, roles in EXTRA.items():
        dtypes = [None if each is None else Dtype[each] for each in roles]
        found[name] = DtypeConfig(name, *dtypes, True)
    return found


def traces(rank: int) -> dict[str, dict[str, Trace]]:
    found = {}
    for name, d in policies().items():
        roles = (d.main_params, d.main_grads, d.grad_comm, d.grad_accum)
        dtypes = [None if each is None else TORCH_DTYPES[each] for each in roles]
        policy = MixedPrecisionPolicy(*dtypes, d.allow_low_precision_grads)
        found[name] = {s.name: trace_of(rank, policy, TORCH_DTYPES[d.compute], s.name, d.fp8) for s in Strategy}
    return found


def asked(d: DtypeConfig) -> str:
    roles = ("compute", "main_params", "main_grads", "grad_comm", "grad_accum")
    said = " ".join(f"{role}={'null' if getattr(d, role) is None else getattr(d, role).name}" for role in roles)
    return said if d.fp8 is None else f"{said} fp8={d.fp8.name}"


def page(found: dict[str, dict[str, Trace]]) -> str:
    parts = []
    for name, d in policies().items():
        cells = {s: [" and ".join(sorted(trace[each])) or "-" for each in STATIONS] for s, trace in found[name].items()}
        rows = [(f"`{strategy}`", *row) for strategy, row in cells.items()]
        parts.append(f"## {name}\n\n`{asked(d)}`\n\n{markdown_table(('strategy', *HEADINGS), rows)}")
    return made(PAGE, {"policies": "\n\n".join(parts)})


def main(run: Callable[..., list[Any]] = run_ranks) -> str:
    """The page, from two ranks that must have seen the same."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    first, second = run(traces, 2)
    if first != second:
        raise RuntimeError("the two ranks saw different dtypes")
    return page(first)


if __name__ == "__main__":
    from benchmarks.fsdp import dtype_table  # ranks import what they run by name

    PAGE.write_text(dtype_table.main())
