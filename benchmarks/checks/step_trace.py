"""How far one step walks through the sources: Python calls, functions, files and changes of file.

    python benchmarks/checks/step_trace.py

A model of four blocks trains on two ranks under ZeRO-3. After warm steps every Python call of rank 0's main thread
into the engine's sources is noted. Counts are medians of several steps, as the moment at which a peer is ready changes
them; those of an earlier revision stay as they were counted. Writes benchmarks/data/step_trace.json and
docs/records/step_trace.md.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp

from benchmarks.pages import tables
from tests.support.spawn import run_ranks

DATA = "step_trace.json"
PAGE = tables.DOCS / "records" / "step_trace.md"
BEFORE = "5135ba6"
RANKS, BLOCKS, WIDTH, TOKENS, WARM, STEPS = 2, 4, 32, 8, 3, 7
SECOND = 1
"""Index of the block that is looked at: neither the first nor the last."""
SOURCES = {"native": ("/harness/fsdp/",), "fsdp2": ("/torch/distributed/fsdp/", "/torch/distributed/tensor/")}
PARTS = ("block's forward", "block's backward", "step")
COUNTS = ("calls", "functions", "files", "changes of file")


class Block(nn.Module):
    """A residual block: the unit of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, WIDTH]."""
        residual: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return residual


class Walk:
    """Calls into some sources, in order, while it is open; and how many there were at each mark."""

    def __init__(self, sources: tuple[str, ...]) -> None:
        self.sources = sources
        self.calls: list[tuple[str, str]] = []
        self.marks: dict[str, int] = {}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Called by `sys.setprofile`."""
        path = frame.f_code.co_filename
        if event == "call" and any(each in path for each in self.sources):
            self.calls.append((path, frame.f_code.co_qualname))

    @contextmanager
    def open(self) -> Iterator[None]:
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def mark(self, name: str) -> None:
        self.marks[name] = len(self.calls)

    def counts(self, begin: str, end: str) -> dict[str, int]:
        calls = self.calls[self.marks[begin] : self.marks[end]]
        files = [path for path, _ in calls]
        changes = sum(one != other for one, other in itertools.pairwise(files))
        return dict(zip(COUNTS, (len(calls), len(set(calls)), len(set(files)), changes), strict=True))


class Net(nn.Module):
    """Blocks between two linear layers; marks where the second block begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.walk: Walk | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, WIDTH]."""
        x, walk = self.first(x), self.walk
        for index, block in enumerate(self.blocks):
            if walk is None or index != SECOND:
                x = block(x)
                continue
            x.register_hook(lambda _: walk.mark("backward's end"))
            walk.mark("forward")
            x = block(x)
            walk.mark("forward's end")
            x.register_hook(lambda _: walk.mark("backward"))
        out: Tensor = self.last(x)
        return out


def native(net: Net) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    """Our engine: the model, its optimizer, and what clips."""
    from harness.fsdp import fully_shard_model, fully_shard_optimizer

    model = fully_shard_model(net, fsdp_unit_modules=[Block], zero_dp_strategy=3)
    optimizer = fully_shard_optimizer(model, torch.optim.AdamW(net.parameters(), lr=1e-3))
    return model, optimizer, lambda: model.clip_grad_norm_(1.0)


def fsdp2(net: Net) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    for block in net.blocks:
        torch_fsdp.fully_shard(block)
    torch_fsdp.fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return net, optimizer, lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0)


ENGINES = {"native": native, "fsdp2": fsdp2}


def trace(rank: int, engine: str) -> dict[str, dict[str, int]]:
    """Counts of a step's parts, medians over the warm steps."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer, clip = ENGINES[engine](net)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))
    walks = []
    for step in range(WARM + STEPS):
        walk = Walk(SOURCES[engine])
        net.walk = walk if step >= WARM else None
        with walk.open():
            walk.mark("step")
            loss = model(x).square().mean()
            loss.backward()
            clip()
            optimizer.step()
            optimizer.zero_grad()
            walk.mark("step's end")
        walks += [walk] * (step >= WARM)
    bounds = (("forward", "forward's end"), ("backward", "backward's end"), ("step", "step's end"))
    counted = {part: [walk.counts(*bound) for walk in walks] for part, bound in zip(PARTS, bounds, strict=True)}
    return {
        part: {count: int(statistics.median(row[count] for row in rows)) for count in COUNTS}
        for part, rows in counted.items()
    }


def counts() -> dict[str, dict[str, dict[str, int]]]:
    from benchmarks.checks import step_trace  # ranks import what they run by name

    return {engine: run_ranks(step_trace.trace, RANKS, engine)[0] for engine in ENGINES}


def render(found: dict[str, Any]) -> str:
    columns = {
        f"ours, {BEFORE}": found["before"]["native"],
        "ours, this checkout": found["now"]["native"],
        "FSDP2": found["now"]["fsdp2"],
    }
    rows = [
        (f"{part}: {count}", *(f"{each[part][count]:,}" for each in columns.values()))
        for part in PARTS
        for count in COUNTS
    ]
    with_what = f"{found['steps']} steps, torch {found['torch']}, Python {found['python']}:"
    return tables.made(PAGE, {"counts": f"{with_what}\n\n{tables.markdown_table(['', *columns], rows)}"})


def main() -> None:
    tables.parser(__doc__).parse_args()
    versions = {"torch": torch.__version__, "python": platform.python_version(), "steps": STEPS}
    found = tables.read(DATA) | versions | {"now": counts()}
    tables.write(DATA, found)
    PAGE.write_text(render(found), encoding="utf-8")
    print(render(found))


if __name__ == "__main__":
    main()
