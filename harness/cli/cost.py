"""Step times: of a timed study's arms (`bench STUDY`), and of a planned cell by four constants of a timed run (`plan
--calibrate RUN`).

A step is taken for the sum of its parts. A part is timed only where every setting that its constant depends on is that
of the run; sizes, and how much there is to do, may differ.
"""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from harness.bench import report, text
from harness.bench.record import Process, load
from harness.cli.runs import located, say_next
from harness.config.compose import Cell
from harness.config.errors import refuse
from harness.config.words import ask_again
from harness.store import screen
from harness.store.rundir import Store, flatten


def bench_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("study", metavar="STUDY", help="name of a study that was run with measure=bench, or its folder")
    parser.add_argument("--json", action="store_true", help="every row, ratio and run as JSON")


def run_bench(arguments: Namespace) -> int:
    arguments.root, name = located(arguments.root, arguments.study)
    found = report(arguments.root, name)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2, allow_nan=False))
        return found.exit_code
    print(text(found) + "\n")
    if found.exit_code:
        rerun = "launch.rerun=always" if found.mixed else "launch.rerun=stale"
        print(f"next: {ask_again(arguments.root, found.study, rerun)}")
    else:
        say_next(arguments, f"bench {shlex.quote(found.study)} --json")
    return found.exit_code


Plan = Mapping[str, Any]
Plans = Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]]
ALWAYS = ("engine.name", "cluster.device", "cluster.threads_per_rank", "mesh.world_size", "mesh.tp")


class Part(NamedTuple):
    """unit: what the constant counts a second. seconds: of the run's times. amount: of a plan; None where unknown.
    alike: settings that the constant depends on, beside `ALWAYS`."""

    unit: str
    seconds: Callable[[Mapping[str, Any]], float]
    amount: Callable[[Plan], float | None]
    alike: tuple[str, ...]


PARTS: Mapping[str, Part] = {
    "forward and backward": Part(
        "FLOP",
        lambda s: s["forward_s"] + s["backward_s"] - s["exposed_comm_s"],
        lambda plan: plan["flops"],
        ("dtype.compute", "dtype.fp8", "model.family", "model.activation_checkpointing"),
    ),
    "exposed communication": Part(
        "byte",
        lambda s: s["exposed_comm_s"],
        lambda plan: plan["sent"],
        ("sharding.strategy", "sharding.outer", "mesh.dp_outer", "cluster.nodes", "engine.transport"),
    ),
    "update": Part(
        "byte",
        lambda s: s["optimizer_s"],
        lambda plan: sum(plan["kept"][role] for role in ("compute_weights", "main_weights", "optimizer")),
        ("sharding.strategy", "dtype.compute", "dtype.main_params", "optimizer.name"),
    ),
    "data and the rest": Part("step", lambda s: s["data_s"] + s["other_s"], lambda plan: 1.0, ("data.kind",)),
}


class Calibration(NamedTuple):
    """plan: of the run itself."""

    run: Process
    plan: Plan

    @classmethod
    def of(cls, root: str, name: str, plans: Plans) -> Calibration:
        """Raises `BadRequest`: the run is not timed, or not planned. `StoreError`: there is no such run."""
        found = load(Store(root).find(name).path)
        (plan,) = [{"refused": found}] if isinstance(found, str) else plans([found.config])
        if isinstance(found, str) or "refused" in plan:
            raise refuse(f"--calibrate {name}", plan["refused"], fix="a planned run with measure=bench that is done")
        return cls(found, plan)

    def part(self, name: str, cell: Cell, plan: Plan) -> tuple[float | None, str]:
        """Seconds of a part of a step and where they come from, or why there are none."""
        part, there, here = PARTS[name], flatten(dict(self.run.config)), flatten(cell.config)
        run, times = self.run.facts["run"], self.run.facts["parts"]
        other = [key for key in (*ALWAYS, *part.alike) if there.get(key) != here.get(key)]
        if other:
            return None, f"not calibrated: {other[0]}={here.get(other[0])}, and {there.get(other[0])} in {run}"
        done, to_do = part.amount(self.plan), part.amount(plan)
        if to_do == 0:
            return 0.0, "nothing to do"
        if not done or to_do is None or None in times.values() or part.seconds(times) <= 0:
            return None, f"not calibrated: {run} does not tell"
        rate = done / part.seconds(times)
        return to_do / rate, f"{rate:.4g} {part.unit}/s, calibrated by {run}"

    def step(self, cell: Cell, plan: Plan) -> dict[str, Any]:
        """Seconds of a step and of its parts, each with its source; None where one is not calibrated."""
        if "refused" in plan:
            return {"step_s": None, "parts": {}}
        found = {name: self.part(name, cell, plan) for name in PARTS}
        seconds = [each for each, _ in found.values() if each is not None]
        step_s = sum(seconds) if len(seconds) == len(found) else None
        return {"step_s": step_s, "parts": found, "disturbance": self.run.facts["disturbance"]}

    def table(self, cell: Cell, plan: Plan) -> list[str]:
        step = self.step(cell, plan)
        rows = [[name, screen.ms(seconds, 2), source] for name, (seconds, source) in step["parts"].items()]
        rows.append(["together", screen.ms(step["step_s"], 2), ""])
        lines = screen.table(["part of a step", "ms", "from"], rows, screen.width(), flexible=(2,), folded=(2,))
        return [*lines, *self.caveats]

    @property
    def caveats(self) -> list[str]:
        """Other work of the machine while the constants were taken."""
        run, found = self.run.facts["run"], self.run.facts["disturbance"]
        return screen.fold(f"{run} was disturbed: {found}", screen.width(), screen.INDENT) if found else []
