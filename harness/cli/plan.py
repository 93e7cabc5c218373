"""`plan ...overrides`: memory and traffic of a cell, or of each cell of a study, before anything runs.

Where a cell does not fit into cluster.device_memory, the nearest requests that do: one setting changed, or two; each is
planned.
"""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness.cli.cost import Calibration
from harness.config.compose import Cell
from harness.config.errors import BadRequest, refuse
from harness.config.own import environment
from harness.config.schema import Config, OuterStrategy, Strategy
from harness.store import commands, screen
from harness.study.replay import replay
from harness.study.request import cells_asked

MIB, GIB = 2**20, 2**30


def plan_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "words",
        metavar="KEY=VALUE",
        nargs="*",
        help="as after run.py; study=NAME, and values with commas, plan a table of cells",
    )
    parser.add_argument("--calibrate", metavar="RUN", help="tell step times too, by constants of this timed run")
    parser.add_argument("--json", action="store_true", help="every number as JSON")


def run_plan(arguments: Namespace) -> int:
    cells = cells_asked(arguments.words)
    plans = made([cell.config for cell in cells])
    by = arguments.calibrate and Calibration.of(arguments.root, arguments.calibrate, made)
    if arguments.json:
        rows = [
            {"name": cell.name, "overrides": list(cell.overrides), **plan, **(by.step(cell, plan) if by else {})}
            for cell, plan in zip(cells, plans, strict=True)
        ]
        print(json.dumps(rows, indent=2))
        return 0
    if len(cells) == 1 and "refused" in plans[0]:
        raise refuse("plan", plans[0]["refused"])
    lines = tabled(cells, plans, by)
    if len(cells) == 1:
        times = ["", *by.table(cells[0], plans[0])] if by else []
        lines = [*told(cells[0], plans[0]), *times, *advised(cells[0], plans[0])]
    print("\n".join(lines))
    words = " ".join(map(shlex.quote, arguments.words))
    print(f"next: {commands.request(f'-m {words}' if len(cells) > 1 else words)}")
    return 0


def made(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plans in the order of the configurations. Raises `RuntimeError`: the process that makes them failed."""
    command, asked = [sys.executable, "-P", "-m", "harness.plan.planned"], json.dumps(configs)
    done = subprocess.run(command, input=asked, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["without a word"]
        raise RuntimeError(f"planning failed: {lines[-1]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def told(cell: Cell, plan: Mapping[str, Any]) -> list[str]:
    """One cell: what is kept, what is alive at the peak, what is sent, and what is not planned."""
    room, kept, peak = screen.width(), plan["kept"], plan["peak"]
    rows = [[role.replace("_", " "), _bytes(num_bytes)] for role, num_bytes in kept.items() if num_bytes]
    rows.append(["together", _bytes(sum(kept.values()))])
    lines = [f"plan of {cell.name}, of each of {cell.typed.mesh.world_size:,} ranks", ""]
    lines += screen.table(["kept between steps", "bytes"], rows, room)
    if peak is not None:
        parts = [[part.replace("_", " "), _bytes(each)] for part, each in peak["parts"].items() if each]
        parts.append([f"peak, at: {peak['moment']}", _bytes(peak["total"])])
        lines += ["", *screen.table(["alive at the peak", "bytes"], parts, room)]
    if plan["wire"]:
        sent = [
            [axis, kind, f"{each['count']:,}", _bytes(each["bytes"])]
            for axis, kinds in plan["wire"].items()
            for kind, each in kinds.items()
        ]
        lines += ["", *screen.table(["axis", "collective", "messages a step", "bytes sent"], sent, room)]
    for why in dict.fromkeys(plan["left_out"].values()):
        missing = [{"wire": "traffic"}.get(part, part) for part, each in plan["left_out"].items() if each == why]
        lines += ["", *screen.fold(f"no {' and no '.join(missing)} is planned. {why}", room, screen.INDENT)]
    return lines


def advised(cell: Cell, plan: Mapping[str, Any]) -> list[str]:
    """A cell held against its device, and what fits where it does not."""
    room, fits = cell.typed.cluster.device_memory, plan["fits"]
    if fits is None or room is None:
        return []
    peak, memory = plan["peak"]["total"], f"cluster.device_memory={room} GiB"
    if fits:
        return ["", *screen.fold(f"fits: the peak is {_gib(peak)} of {memory}", screen.width(), screen.INDENT)]
    is_kept = sum(plan["kept"].values()) - plan["on_host"] > room * GIB
    binds = "what is kept between steps alone does not fit" if is_kept else "the peak of a step does not fit"
    lines = ["", *screen.fold(f"does not fit: {_gib(peak)} GiB, {memory}; {binds}", screen.width(), screen.INDENT)]
    rows = [
        [" ".join(words), _gib(found["peak"]["total"]), found["peak"]["moment"]]
        for words, found in nearest(cell, lambda cells: made([each.config for each in cells]))
    ]
    if not rows:
        return [*lines, "nothing that was tried fits, one change or two: more ranks, or a smaller model"]
    return [*lines, "", *screen.table(["what fits: change", "peak GiB", "peak at"], rows, screen.width())]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes >= GIB else f"{num_bytes / GIB:.2g}"


def _bytes(num_bytes: int) -> str:
    return f"{num_bytes:,} ({_gib(num_bytes)} GiB)" if num_bytes >= GIB // 100 else f"{num_bytes:,}"


def tabled(cells: Sequence[Cell], plans: Sequence[Mapping[str, Any]], by: Calibration | None = None) -> list[str]:
    """A study: a row a cell; - is not planned, or not calibrated."""
    rows, fits = [], {True: "yes", False: "NO", None: "-"}
    for cell, plan in zip(cells, plans, strict=True):
        kept, peak = plan.get("kept"), plan.get("peak")
        numbers = [kept and sum(kept.values()), peak and peak["total"], plan.get("sent")]
        moment = plan.get("refused") or (peak["moment"] if peak else plan["left_out"].get("peak", ""))
        rows.append([cell.name, *("-" if each is None else f"{each / MIB:,.2f}" for each in numbers)])
        rows[-1] += [*([screen.ms(by.step(cell, plan)["step_s"], 2)] if by else []), fits[plan.get("fits")], moment]
    head = ["cell", "kept MiB", "peak MiB", "sent MiB a step", *(["ms a step"] if by else []), "fits", "peak at"]
    told = [f"times: constants of {by.run.facts['run']}", *by.caveats] if by else []
    return [*screen.table(head, rows, screen.width()), *told]


Plans = Callable[[Sequence[Cell]], list[dict[str, Any]]]
SHOWN = 5


def changes(config: Config) -> Iterator[tuple[str, ...]]:
    """Settings that may be changed, the least intrusive first: recomputation, then the layout, then dtypes."""
    if not config.model.activation_checkpointing:
        yield ("model.activation_checkpointing=true",)
    strategies = list(Strategy)
    for stronger in strategies[strategies.index(config.sharding.strategy) + 1 :]:
        yield (f"sharding.strategy={stronger.name}",)
    outer = config.mesh.dp_outer
    if outer > 1:
        if config.sharding.outer is not OuterStrategy.optim:
            yield ("sharding.outer=optim",)
        yield ("mesh.dp_outer=1", "sharding.outer=no_shard")
    if config.train.microbatch_size > 1:
        yield ("train.microbatch_size=1",)
    if not config.engine.offload_optimizer:
        yield ("engine.offload_optimizer=true",)
    for dtype in ("bf16", "bf16_comm"):
        if config.dtype.name != dtype and config.dtype.compute.bytes >= 4:
            yield (f"dtype={dtype}",)


def nearest(cell: Cell, plans: Plans) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Changes after which a cell fits, each with its plan; two at once only where no single one does."""
    single = list(changes(cell.typed))
    pairs = [(*one, *other) for one, other in itertools.combinations(single, 2)]
    pairs = [words for words in pairs if len({word.partition("=")[0] for word in words}) == len(words)]
    for asked in (single, pairs):
        made = [(each, found) for each in asked if (found := _changed(cell, each)) is not None]
        planned = plans([found for _, found in made]) if made else []
        fitting = [(each, plan) for (each, _), plan in zip(made, planned, strict=True) if plan.get("fits")]
        if fitting:
            return fitting[:SHOWN]
    return []


def _changed(cell: Cell, words: Sequence[str]) -> Cell | None:
    """None where the change is refused."""
    try:
        return replay(cell.config, cell.overrides, words)
    except BadRequest:
        return None
