"""Rules of launching, checkpoints, timed runs, a user's own classes, and settings without an effect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness.config.capabilities import ENGINES
from harness.config.captured import captured
from harness.config.catalog import load_catalog
from harness.config.derived import devices_per_node
from harness.config.doc import as_typed, settings
from harness.config.errors import Violation
from harness.config.hints import explain_option
from harness.config.own import described, trials
from harness.config.rules.request import STEP_LISTS, Request, refusal, rule
from harness.config.schema import (
    NO_FAULT,
    Backend,
    CkptPolicy,
    Device,
    Dtype,
    EngineName,
    MeasureMode,
    OptimizerName,
    WandbMode,
)
from harness.store.reading import folder_names
from harness.store.redaction import redactor
from harness.store.rundir import checkpoint_folder
from harness.store.screen import counted


@rule()
def own_things_can_be_used(request: Request) -> Iterator[Violation]:
    yield from (found for found in trials(request.config).values() if isinstance(found, Violation))


@rule()
def parameters_are_counted(request: Request) -> Iterator[Violation]:
    if "model.parameters" in request.named:
        typed = request.named["model.parameters"]
        yield Violation(f"model.parameters={typed}", "is counted from the model and cannot be set", fix="leave it out")


@rule()
def the_engine_takes_the_optimizer(request: Request) -> Iterator[Violation]:
    config, name = request.config, request.config.optimizer.name.name
    if config.optimizer.name not in (OptimizerName.ext, OptimizerName.muon):
        return
    if not request.can.own_optimizers:
        takers = [f"engine={name.name}" for name, can in ENGINES.items() if can.own_optimizers]
        why = ", which steps parts of matrices, or adds their products in an order of its own" * (name == "muon")
        problem = f"is not taken by engine={config.engine.name.name}{why}"
        yield Violation(f"optimizer={name}", problem, ", ".join(takers), "engine=native, or optimizer=adamw")
        return
    found = described("optimizer", config)
    if found is not None and config.engine.name is EngineName.native and not found.answer["elementwise"]:
        yield Violation(
            f"optimizer.target={found.name}",
            "is not known to update each element on its own, and engine=native steps rows of parameters",
            fix="elementwise = True in the class if it does; needs_whole(param), if it needs some whole; or engine=ddp",
        )


@rule("fault.name", "engine.name", "mesh.tp")
def sample_acts(request: Request) -> Iterator[Violation]:
    config = request.config
    name, subject = config.fault.name, request.show("fault.name")
    if name == NO_FAULT or ":" in name:
        return
    if name not in load_catalog()["fault"]:
        yield replace(explain_option("fault", name), subject=subject)
    elif config.engine.name is not EngineName.native:
        text = f"is put into our own engine, and engine={config.engine.name.name} is another"
        yield Violation(subject, text, fix="engine=native")
    elif config.mesh.tp > 1:
        yield Violation(subject, f"is not implemented with mesh.tp={config.mesh.tp}", fix="mesh.tp=1")


inline_is_one_rank = refusal(
    lambda c: c.launch.inline and c.mesh.world_size > 1,
    "launch.inline",
    "runs one rank in this process, and mesh.world_size={mesh.world_size}",
    "mesh=one, or debug=inline, which says both",
    reads="mesh.world_size",
)
inline_is_here = refusal(
    lambda c: c.launch.inline and c.cluster.backend is Backend.slurm,
    "launch.inline",
    "runs in this process, which cluster=slurm does not",
    "cluster=local",
)


@rule("mesh.world_size", "cluster.nodes", "cluster.gpus_per_node", "cluster.ranks_per_device")
def every_cuda_rank_gets_a_device(request: Request) -> Iterator[Violation]:
    c, ranks = request.config.cluster, request.config.mesh.world_size
    if c.backend is not Backend.slurm or c.device is not Device.cuda or ranks % c.nodes or "gres" in c.additional:
        return
    need = devices_per_node(request.config)
    if c.gpus_per_node < need:
        sharing = f", {c.ranks_per_device} to a device" if c.ranks_per_device > 1 else ""
        problem = f"is fewer than the {ranks // c.nodes} ranks on each of cluster.nodes={c.nodes} need{sharing}"
        yield request.wrong("cluster.gpus_per_node", problem, f"{need} or more", f"cluster.gpus_per_node={need}")


shared_devices_have_no_switch = refusal(
    lambda c: c.cluster.ranks_per_device > 1 and c.sharp.group.is_asked and c.sharp.nvlink,
    "cluster.ranks_per_device sharp.group",
    "asks for NVLink SHARP among ranks that share a device",
    "leave sharp out",
)
"""NVLink SHARP sums over devices."""


@rule("launch.root")
def root_survives_scripts_and_logs(request: Request) -> Iterator[Violation]:
    """The root's name is part of batch scripts and log patterns, where some characters end a line or expand."""
    root, cluster = request.config.launch.root, request.config.cluster
    if cluster.backend is not Backend.slurm:
        return
    signs = {"%\\\"'": "which sbatch expands or unquotes in log names", ":": "which ends an entry of PYTHONPATH"}
    for each, why in signs.items():
        if held := sorted(set(root) & set(each)):
            yield Violation(f"launch.root={root!r}", f"holds {' '.join(held)} , {why}", fix="a folder without")


@rule()
def nothing_secret_is_frozen(request: Request) -> Iterator[Violation]:
    redact = redactor()
    for path, setting in settings().items():
        if setting.type not in (str, list[str], dict[str, str]):
            continue
        text = str(request.value(path) or "")
        if text and (hidden := redact(text)) != text:
            subject = f"{path}={hidden}"
            fix = "leave it in the environment, which ranks inherit, or in a file that cluster.setup sources"
            yield Violation(subject, "holds a secret, and would be written into the run's directory", fix=fix)


STEP = "step-"


@rule("ckpt.load", "train.steps")
def checkpoint_is_there(request: Request) -> Iterator[Violation]:
    """`ckpt.load` holds a checkpoint of a step within the run. What is in it is checked when it is loaded."""
    named, steps = request.config.ckpt.load, request.config.train.steps
    if named is None:
        return
    found = checkpoint_steps(Path(named)) if os.path.isdir(named) else []
    if not found:
        fix = "ckpt.load=runs/STUDY/RUN, its ckpt folder, a step-* folder in it, digits of its signature, or @last"
        yield request.wrong("ckpt.load", "holds no checkpoint", fix=fix)
    elif found[-1] > steps:
        yield request.wrong(
            "ckpt.load",
            f"begins after step {found[-1]}, and train.steps={steps} counts from the beginning of training",
            fix=f"train.steps={found[-1] + steps}, or an earlier step-* folder",
        )


def checkpoint_steps(path: Path) -> list[int]:
    names = [path.name] if path.name.startswith(STEP) else folder_names(checkpoint_folder(path))
    numbers = (name.removeprefix(STEP) for name in names if name.startswith(STEP))
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


@rule("launch.preempt_at", "train.steps")
def rehearsed_stop_is_within_the_run(request: Request) -> Iterator[Violation]:
    at, steps, c = request.config.launch.preempt_at, request.config.train.steps, request.config
    if at >= steps:
        problem = f"is not before the last step, train.steps={steps}"
        yield request.wrong("launch.preempt_at", problem, f"0 to {steps - 1}", f"launch.preempt_at={steps // 2}")
    elif at and c.ckpt.policy is CkptPolicy.none and c.cluster.backend is Backend.slurm:
        problem = "is requeued without a checkpoint, and would stop at the same step forever"
        yield Violation(f"{request.show('launch.preempt_at')} ckpt.policy=none", problem, fix="ckpt=last")


LEAST_WARM_UP = 3


def _is_bench(request: Request) -> bool:
    return request.config.measure.mode is MeasureMode.bench


@rule(*STEP_LISTS)
def timed_runs_do_nothing_else(request: Request) -> Iterator[Violation]:
    if not _is_bench(request):
        return
    c = request.config
    for path in (*STEP_LISTS, "measure.callbacks"):
        if request.value(path):
            yield _beside(request, path, "[]")
    if c.ckpt.policy is not CkptPolicy.none:
        yield _beside(request, "ckpt.policy", "none", fix="ckpt=none")
    if c.wandb.mode is not WandbMode.disabled:
        yield _beside(request, "wandb.mode", "disabled", fix="wandb=disabled")


def _beside(request: Request, path: str, valid: str, fix: str = "") -> Violation:
    problem = "runs during the steps that measure=bench times"
    return request.wrong(path, problem, valid, f"{fix or f'{path}={valid}'}, or measure=default")


@rule("train.steps", "measure.warmup_steps")
def warm_up_leaves_steps_to_time(request: Request) -> Iterator[Violation]:
    steps, warm_up = request.config.train.steps, request.config.measure.warmup_steps
    if not _is_bench(request):
        return
    if warm_up < LEAST_WARM_UP:
        problem = "is too short: the first step makes what later ones keep, and memory is read in the last"
        fix = f"measure.warmup_steps={LEAST_WARM_UP}"
        yield request.wrong("measure.warmup_steps", problem, f"{LEAST_WARM_UP} or more", fix)
    if steps - warm_up < 2:
        problem = f"leaves {counted(max(steps - warm_up, 0), 'step')} to time after measure.warmup_steps={warm_up}"
        choices = f"{warm_up + 2} or more; ten timed steps make a median"
        yield request.wrong("train.steps", problem, choices, f"train.steps={warm_up + 10}")


@rule("measure.rounding_draws", "measure.capture_steps")
def only_the_reference_is_perturbed(request: Request) -> Iterator[Violation]:
    """Perturbations follow the operations of one fp64 process, at the step whose gradients it captures."""
    config = request.config
    if config.measure.rounding_draws == 0:
        return
    exact = config.dtype.compute is Dtype.fp64 and config.dtype.main_grads is Dtype.fp64
    if config.engine.name is not EngineName.single or not exact:
        yield request.wrong(
            "measure.rounding_draws",
            f"perturbs the fp64 reference; this is engine={config.engine.name.name} with "
            f"dtype.compute={config.dtype.compute.name}",
            "0, or any number with engine=single dtype=fp64 mesh=one",
            "measure.rounding_draws=0",
        )
    elif 1 not in captured(config).gradients or config.cluster.device is not Device.cpu:
        problem = "needs the gradients of step 1 on cluster.device=cpu"
        yield request.wrong("measure.rounding_draws", problem, fix="measure.capture_steps=[1] cluster.device=cpu")


@rule("measure.trace_ranks")
def traced_ranks_are_there(request: Request) -> Iterator[Violation]:
    last, asked = request.config.mesh.world_size - 1, request.config.measure.trace_ranks
    if asked is not None and not (asked and set(asked) <= set(range(last + 1))):
        problem = f"are not all ranks of mesh.world_size={last + 1}" if asked else "names no rank"
        choices = f"numbers from 0 to {last}; null: all"
        yield request.wrong("measure.trace_ranks", problem, choices, "measure.trace_ranks=[0]")


@rule()
def typed_settings_have_an_effect(request: Request) -> Iterator[Violation]:
    engine, taken = request.config.engine.name, request.can.settings
    for key, value in request.named.items():
        path = key if key in settings() else key.rpartition(".")[0]
        only = settings()[path].only if path in settings() else ()
        failing = next((each for each in only if not each.holds(request.value(each.path))), None)
        if failing is not None:
            because, where = _shown(request, failing.path), failing.choose
        elif key.startswith("engine.") and key != "engine.name" and key not in taken:
            because = f"engine={engine.name}"
            where = " or ".join(f"engine={each.name}" for each, can in ENGINES.items() if key in can.settings)
        else:
            continue
        fix = f"leave it out, or choose {where}"
        yield Violation(f"{key}={value}", f"has no effect with {because}", fix=fix)


def _shown(request: Request, path: str) -> str:
    group, value = path.partition(".")[0], as_typed(request.value(path))
    named = group != "model" and value in load_catalog()[group]  # a family may have the name of an option
    return f"{group}={value}" if named else request.show(path)
