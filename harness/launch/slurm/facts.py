"""Checks against a cluster's facts before submission.

SLURM accepts a job that can never start, and lets it wait. Facts come from `sinfo`; without an answer nothing is
refused here.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.config.derived import gpus_of_gres
from harness.config.errors import BadRequest, Violation
from harness.config.hints import nearest
from harness.launch.slurm.commands import SlurmError, ask
from harness.launch.slurm.shape import Shape
from harness.store.screen import counted


@dataclass(frozen=True)
class Nodes:
    partition: str
    default: bool
    max_min: float
    """Time limit in minutes; may be infinite."""
    count: int
    cpus: int
    mem_mb: int
    gpus: int


@dataclass(frozen=True)
class Need:
    setting: str
    wanted: float
    has: Callable[[Nodes], float]
    unit: str


def check_facts(shapes: Sequence[Shape]) -> None:
    """Raises `BadRequest`: every violation of every shape."""
    found = partitions()
    violations = [v for shape in shapes for v in misfits(shape, found)] if found else []
    if violations:
        raise BadRequest(violations)


def partitions() -> tuple[Nodes, ...]:
    if shutil.which("sinfo") is None:
        return ()
    try:
        text = ask("sinfo", "--noheader", "--all", "--exact", "--format=%P|%l|%D|%c|%m|%G")
    except SlurmError:
        return ()
    return tuple(parse_sinfo(text))


def parse_sinfo(text: str) -> Iterator[Nodes]:
    """Nodes of `sinfo --exact --format=%P|%l|%D|%c|%m|%G`; other lines are skipped."""
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == 6 and all(field.isdigit() for field in fields[2:5]):
            name, limit, count, cpus, memory, gres = fields
            yield Nodes(
                partition=name.rstrip("*"),
                default=name.endswith("*"),
                max_min=minutes(limit),
                count=int(count),
                cpus=int(cpus),
                mem_mb=int(memory),
                gpus=sum(int(number) for number in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres)),
            )


def minutes(limit: str) -> float:
    """Minutes of SLURM's `days-hours:minutes:seconds`, `infinite` or `n/a`."""
    days, dash, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts) or (dash and not days.isdigit()):
        return float("inf")
    numbers = [int(part) for part in parts]
    if dash:
        hours, mins, seconds = (*numbers, 0, 0)[:3]
        return int(days) * 1440 + hours * 60 + mins + seconds / 60
    hours, mins, seconds = (0, 0, *numbers)[-3:] if len(numbers) > 1 else (0, numbers[0], 0)
    return hours * 60 + mins + seconds / 60


def misfits(shape: Shape, cluster: Sequence[Nodes]) -> Iterator[Violation]:
    names = list(dict.fromkeys(nodes.partition for nodes in cluster))
    wanted = shape.partition.split(",") if shape.partition else [n.partition for n in cluster if n.default][:1]
    if not wanted:
        yield Violation(
            "cluster.partition=null",
            "this cluster has no partition for jobs that name none",
            ", ".join(names),
            f"cluster.partition={names[0]}",
        )
        return
    missing = [name for name in wanted if name not in names]
    for name in missing:
        meant = nearest(name, names)
        fix = f"cluster.partition={(meant or names)[0]}"
        yield Violation(f"cluster.partition={name}", "this cluster has no such partition", ", ".join(names), fix)
    there = [nodes for nodes in cluster if nodes.partition in wanted]
    if there and not missing:
        yield from _too_much(shape, there, ",".join(wanted))


def _too_much(shape: Shape, there: Sequence[Nodes], where: str) -> Iterator[Violation]:
    limit = max(nodes.max_min for nodes in there)
    if shape.time_min > limit:
        yield Violation(
            f"cluster.time_min={shape.time_min}",
            f"is more than partition {where} allows",
            f"1 to {limit:.0f}",
            f"cluster.time_min={limit:.0f}",
        )
    needs = list(_needs(shape))
    short = [need for need in needs if max(map(need.has, there)) < need.wanted]
    for need in short:
        most = max(map(need.has, there))
        problem = f"and no node of partition {where} has more than {most:g} {need.unit}"
        yield Violation(
            need.setting, problem, f"up to {most:g}", "another cluster.partition, or ask for less of a node"
        )
    fitting = sum(nodes.count for nodes in there if all(need.has(nodes) >= need.wanted for need in needs))
    if not short and fitting < shape.nodes:
        asked = f", {', '.join(need.setting for need in needs)}" if needs else ""
        yield Violation(
            f"cluster.nodes={shape.nodes}{asked}",
            f"partition {where} has {fitting} such node{'s' * (fitting != 1)}",
            f"1 to {fitting}",
            f"cluster.nodes={fitting}",
        )


def _needs(shape: Shape) -> Iterator[Need]:
    ranks, each = shape.ranks_per_node, shape.cpus_per_rank
    need = f"need{'s' * (ranks == 1)} {counted(ranks * each, 'processor')}"
    cpus = f"{counted(ranks, 'rank')} a node with cluster.cpus_per_rank={each} {need}"
    yield Need(cpus, ranks * each, lambda nodes: nodes.cpus, "processors")
    gpus = shape.gpus_per_node if shape.gres is None else gpus_of_gres(shape.gres)
    if gpus:
        asked = f"cluster.gpus_per_node={gpus}" if shape.gres is None else f"cluster.gres={shape.gres}"
        yield Need(asked, gpus, lambda nodes: nodes.gpus, "GPUs")
    if shape.mem_gb:
        memory = f"cluster.mem_gb={shape.mem_gb:g}"
        yield Need(memory, shape.mem_gb, lambda nodes: nodes.mem_mb / 1024, "GiB of memory")
