"""Rules of launching, checkpoints and timed runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from harness.config.captured import captured
from harness.config.derived import devices_per_node
from harness.config.doc import settings
from harness.config.errors import Violation
from harness.config.rules.request import STEP_LISTS, Request, rule
from harness.config.schema import Backend, CkptPolicy, Device, Dtype, EngineName, MeasureMode, WandbMode
from harness.store.reading import folder_names
from harness.store.redaction import redactor
from harness.store.rundir import checkpoint_folder
from harness.store.screen import counted


@rule("mesh.world_size")
def inline_is_one_local_rank(request: Request) -> Iterator[Violation]:
    if not request.config.launch.inline:
        return
    if request.config.mesh.world_size > 1:
        problem = f"runs one rank in this process, and mesh.world_size={request.config.mesh.world_size}"
        yield Violation("launch.inline=true", problem, fix="mesh=one, or debug=inline, which says both")
    if request.config.cluster.backend is Backend.slurm:
        yield Violation("launch.inline=true", "runs in this process, which cluster=slurm does not", fix="cluster=local")


@rule("cluster.nodes")
def one_machine_without_a_scheduler(request: Request) -> Iterator[Violation]:
    c = request.config.cluster
    if c.backend is Backend.local and c.nodes > 1:
        yield request.wrong("cluster.nodes", "cluster.backend=local is this machine only", "1", "cluster=slurm")


@rule("cluster.time_min", "cluster.grace_s")
def grace_is_within_the_limit(request: Request) -> Iterator[Violation]:
    c = request.config.cluster
    if c.backend is Backend.slurm and c.grace_s >= 60 * c.time_min:
        problem = f"is not shorter than the limit, cluster.time_min={c.time_min} ({60 * c.time_min} s)"
        fix = f"cluster.grace_s={min(120, 30 * c.time_min)}"
        yield request.wrong("cluster.grace_s", problem, f"0 to {60 * c.time_min - 1}", fix)


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


@rule()
def shared_devices_have_no_switch(request: Request) -> Iterator[Violation]:
    """NVLink SHARP sums over devices; ranks that share one cannot use it."""
    config = request.config
    if config.cluster.ranks_per_device > 1 and config.sharp.group.is_asked and config.sharp.nvlink:
        problem = "asks for NVLink SHARP among ranks that share a device"
        choices = "cluster.ranks_per_device=1, sharp=default, sharp=none"
        yield request.wrong("cluster.ranks_per_device sharp.group", problem, choices, "leave sharp out")


OF_SETTINGS = {
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "nodes": "cluster.nodes",
    "ntasks": "mesh.world_size",
    "ntasks-per-node": "mesh.world_size",
    "cpus-per-task": "cluster.cpus_per_rank",
    "gpus-per-node": "cluster.gpus_per_node",
    "mem": "cluster.mem_gb",
    "time": "cluster.time_min",
    "signal": "cluster.grace_s",
    **dict.fromkeys(("array", "job-name", "output", "error", "open-mode", "requeue", "no-requeue", "wrap", "parsable")),
}
"""Options of sbatch given by a setting, or (None) needed to find a run's job again."""

MAY_BE_NONE = frozenset({"export", "propagate", "mail-type", "mem-bind", "gpu-bind"})

_OPTION = re.compile(r"[a-z][a-z0-9-]*")


@rule()
def sbatch_options_are_words_of_its_own(request: Request) -> Iterator[Violation]:
    c = request.config.cluster
    named = [("cluster.flags", flag) for flag in c.flags]
    named += [(f"cluster.additional.{name}", name) for name in c.additional]
    for path, name in named:
        plain = name.replace("_", "-")
        if not _OPTION.fullmatch(plain):
            yield Violation(
                f"{path}: {name!r}", "is not a long option of sbatch", fix="its name without dashes before it"
            )
        elif plain in OF_SETTINGS:
            setting = OF_SETTINGS[plain]
            fix = f"{setting}=VALUE" if setting else "leave it out"
            yield Violation(f"{path}: {name}", f"is {setting or 'how a run finds its job again'}", fix=fix)
    for name, value in c.additional.items():
        plain = name.replace("_", "-")
        if value.lower() in ("true", "", "none", "null") and not (value.lower() == "none" and plain in MAY_BE_NONE):
            problem = "is an option without a value, and sbatch would be given one"
            yield Violation(f"cluster.additional.{name}={value}", problem, fix=f"cluster.flags=[{name}]")


_WORD = re.compile(r"[^\s'\"\\#-][^\s'\"\\#]*")


@rule("cluster.partition", "cluster.account", "cluster.qos", "cluster.python")
def the_scheduler_is_told_words(request: Request) -> Iterator[Violation]:
    """sbatch takes an empty name for none, and text after a space for another argument."""
    for name in ("partition", "account", "qos"):
        value = getattr(request.config.cluster, name)
        if value is not None and not _WORD.fullmatch(value):
            problem = "is no name that sbatch takes: one word, without spaces or quotes"
            yield Violation(f"cluster.{name}={value!r}", problem, fix=f"cluster.{name}=NAME, or cluster.{name}=null")
    try:
        shlex.split(request.config.cluster.python or "")
    except ValueError as error:
        fix = "cluster.python=python3, or its path"
        yield Violation(f"cluster.python={request.config.cluster.python!r}", f"is no command: {error}", fix=fix)


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
    """`ckpt.load` holds a checkpoint of this version and of a step within the run.

    Its bytes are checked when it is loaded.
    """
    named, steps = request.config.ckpt.load, request.config.train.steps
    if named is None:
        return
    problem = checkpoint_problem(Path(named))
    if problem:
        fix = "ckpt.load=runs/STUDY/RUN, its ckpt folder, a step-* folder in it, digits of its signature, or @last"
        yield request.wrong("ckpt.load", problem, fix=fix)
    elif (newest := checkpoint_steps(Path(named))[-1]) > steps:
        yield request.wrong(
            "ckpt.load",
            f"begins after step {newest}, and train.steps={steps} counts from the beginning of training",
            fix=f"train.steps={newest + steps}, or an earlier step-* folder",
        )


def checkpoint_steps(path: Path) -> list[int]:
    names = [path.name] if path.name.startswith(STEP) else folder_names(checkpoint_folder(path))
    numbers = (name.removeprefix(STEP) for name in names if name.startswith(STEP))
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


def checkpoint_problem(path: Path) -> str:
    try:
        if not path.is_dir():
            return f"{path} is no folder"
        steps = checkpoint_steps(path)
        folder = path.parent if path.name.startswith(STEP) else checkpoint_folder(path)
        found = [folder / f"{STEP}{step:06d}" for step in steps]
        if not found:
            return f"{path} holds no checkpoint"
        return "" if any((each / "manifest.json").exists() for each in found) else f"{found[-1]} has no manifest.json"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"


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
    for path in STEP_LISTS:
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


@rule("measure.memory_snapshot", "cluster.device")
def snapshots_are_of_cuda(request: Request) -> Iterator[Violation]:
    measure = request.config.measure
    if measure.memory_snapshot and measure.trace_steps and request.config.cluster.device is Device.cpu:
        yield request.wrong(
            "measure.memory_snapshot",
            "records CUDA's allocator, and cluster.device=cpu has none: on a CPU the trace itself has every allocation",
            fix="leave it out, or cluster.device=cuda",
        )
