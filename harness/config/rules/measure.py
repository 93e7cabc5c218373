"""Rules of timed runs: exclusions and length."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.captured import captured
from harness.config.errors import Violation
from harness.config.rules.numbers import STEP_LISTS
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import CkptPolicy, Device, Dtype, EngineName, MeasureMode, WandbMode
from harness.store.screen import counted

LEAST_WARM_UP = 3


def _is_bench(request: Request) -> bool:
    return request.config.measure.mode is MeasureMode.bench


@rule(*STEP_LISTS)
def timed_runs_do_nothing_else(request: Request) -> Iterator[Violation]:
    if not _is_bench(request):
        return
    c = request.config
    for path in STEP_LISTS:
        if request.value(path):
            yield _beside(request, path, "[]")
    if c.ckpt.policy is not CkptPolicy.none:
        yield _beside(request, "ckpt.policy", "none", fix="ckpt=none")
    if c.wandb.mode is not WandbMode.disabled:
        yield _beside(request, "wandb.mode", "disabled", fix="wandb=disabled")


def _beside(request: Request, path: str, valid: str, fix: str = "") -> Violation:
    return Violation(
        request.show(path),
        "runs during the steps that measure=bench times",
        valid,
        f"{fix or f'{path}={valid}'}, or measure=default",
    )


@rule("train.steps", "measure.warmup_steps")
def warm_up_leaves_steps_to_time(request: Request) -> Iterator[Violation]:
    steps, warm_up = request.config.train.steps, request.config.measure.warmup_steps
    if not _is_bench(request):
        return
    if warm_up < LEAST_WARM_UP:
        yield Violation(
            request.show("measure.warmup_steps"),
            "is too short: the first step makes what later ones keep, and memory is read in the last",
            f"{LEAST_WARM_UP} or more",
            f"measure.warmup_steps={LEAST_WARM_UP}",
        )
    if steps - warm_up < 2:
        yield Violation(
            request.show("train.steps"),
            f"leaves {counted(max(steps - warm_up, 0), 'step')} to time after measure.warmup_steps={warm_up}",
            f"{warm_up + 2} or more; ten timed steps make a median",
            f"train.steps={warm_up + 10}",
        )


@rule("measure.rounding_draws", "measure.capture_steps")
def only_the_reference_is_perturbed(request: Request) -> Iterator[Violation]:
    """Perturbations follow the operations of one fp64 process, at the step whose gradients it captures."""
    config = request.config
    if config.measure.rounding_draws == 0:
        return
    exact = config.dtype.compute is Dtype.fp64 and config.dtype.main_grads is Dtype.fp64
    if config.engine.name is not EngineName.single or not exact:
        yield Violation(
            request.show("measure.rounding_draws"),
            f"perturbs the fp64 reference; this is engine={config.engine.name.name} with "
            f"dtype.compute={config.dtype.compute.name}",
            "0, or any number with engine=single dtype=fp64 mesh=one",
            "measure.rounding_draws=0",
        )
    elif 1 not in captured(config).gradients or config.cluster.device is not Device.cpu:
        yield Violation(
            request.show("measure.rounding_draws"),
            "needs the gradients of step 1 on cluster.device=cpu",
            fix="measure.capture_steps=[1] cluster.device=cpu",
        )


@rule("measure.trace_ranks")
def traced_ranks_are_there(request: Request) -> Iterator[Violation]:
    last, asked = request.config.mesh.world_size - 1, request.config.measure.trace_ranks
    if asked is not None and not (asked and set(asked) <= set(range(last + 1))):
        problem = f"are not all ranks of mesh.world_size={last + 1}" if asked else "names no rank"
        yield Violation(
            request.show("measure.trace_ranks"),
            problem,
            f"numbers from 0 to {last}; null: all",
            "measure.trace_ranks=[0]",
        )


@rule("measure.memory_snapshot", "cluster.device")
def snapshots_are_of_cuda(request: Request) -> Iterator[Violation]:
    if request.config.measure.memory_snapshot and request.config.cluster.device is Device.cpu:
        yield Violation(
            request.show("measure.memory_snapshot"),
            "records CUDA's allocator, and cluster.device=cpu has none: on a CPU the trace itself has every allocation",
            fix="leave it out, or cluster.device=cuda",
        )


RULES: tuple[Rule, ...] = (
    timed_runs_do_nothing_else,
    warm_up_leaves_steps_to_time,
    only_the_reference_is_perturbed,
    traced_ranks_are_there,
    snapshots_are_of_cuda,
)
