"""Rules of checkpoints: where a run begins, saves and stops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.config.errors import Violation
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import Backend, CkptPolicy
from harness.store.reading import folder_names
from harness.store.rundir import checkpoint_folder

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
        yield Violation(
            request.show("ckpt.load"),
            problem,
            fix="ckpt.load=runs/STUDY/RUN, its ckpt folder, a step-* folder in it, digits of its signature, or @last",
        )
    elif (newest := checkpoint_steps(Path(named))[-1]) > steps:
        yield Violation(
            request.show("ckpt.load"),
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


@rule("ckpt.every", "train.steps")
def saves_happen(request: Request) -> Iterator[Violation]:
    every, steps = request.config.ckpt.every, request.config.train.steps
    if every > steps and request.config.ckpt.policy is not CkptPolicy.none:
        yield Violation(
            request.show("ckpt.every"), f"is beyond the last step, train.steps={steps}", f"0 to {steps}", "ckpt.every=0"
        )


@rule("launch.preempt_at", "train.steps")
def rehearsed_stop_is_within_the_run(request: Request) -> Iterator[Violation]:
    at, steps, c = request.config.launch.preempt_at, request.config.train.steps, request.config
    if at >= steps:
        yield Violation(
            request.show("launch.preempt_at"),
            f"is not before the last step, train.steps={steps}",
            f"0 to {steps - 1}",
            f"launch.preempt_at={steps // 2}",
        )
    elif at and c.ckpt.policy is CkptPolicy.none and c.cluster.backend is Backend.slurm:
        yield Violation(
            f"{request.show('launch.preempt_at')} ckpt.policy=none",
            "is requeued without a checkpoint, and would stop at the same step forever",
            fix="ckpt=last",
        )


RULES: tuple[Rule, ...] = (checkpoint_is_there, saves_happen, rehearsed_stop_is_within_the_run)
