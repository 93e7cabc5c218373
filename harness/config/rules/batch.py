"""Rules of microbatches, ranks, machines and scheduled steps."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.derived import data_ranks
from harness.config.errors import Violation
from harness.config.rules.numbers import STEP_LISTS
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import Config


@rule("train.global_batch_size", "train.microbatch_size", "mesh.world_size", "mesh.tp")
def batch_is_whole_microbatches(request: Request) -> Iterator[Violation]:
    t, ranks = request.config.train, data_ranks(request.config)
    unit = t.microbatch_size * ranks
    if t.global_batch_size % unit == 0:
        return
    below = t.global_batch_size // unit * unit
    yield Violation(
        request.show("train.global_batch_size"),
        f"is not divisible by {_ranks(request.config)} * train.microbatch_size ="
        f" {ranks} * {t.microbatch_size} = {unit}",
        ", ".join(str(n) for n in (below, below + unit, below + 2 * unit) if n),
        f"train.global_batch_size={below or unit}{_smaller_microbatch(t.global_batch_size, ranks)}",
    )


def _ranks(config: Config) -> str:
    return "mesh.world_size" if config.mesh.tp == 1 else "mesh.world_size / mesh.tp"


def _smaller_microbatch(batch: int, ranks: int) -> str:
    if batch % ranks:
        return ""
    return f", or train.microbatch_size={batch // ranks}"


@rule("mesh.world_size", "cluster.nodes")
def ranks_are_even_over_machines(request: Request) -> Iterator[Violation]:
    ranks, nodes = request.config.mesh.world_size, request.config.cluster.nodes
    if ranks % nodes:
        yield Violation(
            request.show("mesh.world_size"),
            f"is not divisible by cluster.nodes={nodes}",
            f"multiples of {nodes}",
            f"mesh.world_size={max(ranks // nodes, 1) * nodes}",
        )


@rule("train.steps", "train.warmup_steps")
def warmup_ends(request: Request) -> Iterator[Violation]:
    t = request.config.train
    if t.warmup_steps > t.steps:
        yield Violation(
            request.show("train.warmup_steps"),
            f"is longer than the run, train.steps={t.steps}",
            f"0 to {t.steps}",
            f"train.warmup_steps={min(t.steps // 10 + 1, t.steps)}",
        )


@rule("train.steps", *STEP_LISTS)
def listed_steps_are_reached(request: Request) -> Iterator[Violation]:
    steps = request.config.train.steps
    for path in STEP_LISTS:
        wanted = request.value(path) or ()
        missed = [s for s in wanted if s > steps]
        if missed:
            kept = [s for s in wanted if s <= steps]
            yield Violation(
                request.show(path),
                f"names steps that train.steps={steps} never reaches: {missed}",
                f"steps from 1 to {steps}",
                f"{path}={kept}".replace(" ", ""),
            )


RULES: tuple[Rule, ...] = (
    batch_is_whole_microbatches,
    ranks_are_even_over_machines,
    warmup_ends,
    listed_steps_are_reached,
)
