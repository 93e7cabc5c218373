"""Behaviours 37 to 47: what is reported, loaded, and how parameters outside the plan are treated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp import ShardedModel, build, state as states
from harness.fsdp.guards.nonfinite import GradientGuard
from harness.fsdp.runtime import units
from harness.fsdp.runtime.gather import GatherPipeline
from tests.fsdp.behaviours.lab import ALL, FP32, SHARDED, Lab, Mutant, behaviour, first_line, not_installed
from tests.fsdp.behaviours.models import Block, Chain, Net, Unused, batch, holding, loss_of, seeded
from tests.fsdp.behaviours.subject import Setup, Subject, sgd
from tests.fsdp.checked import patched


class Poisoned(torch.autograd.Function):
    """Identity whose gradient has a NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("nan")
        return gradient


class Weight(nn.Module):
    """A unit of one matrix, which gets a NaN for a gradient where `poison` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 8) / 3)
        self.poison = False

    def forward(self, x: Tensor) -> Tensor:
        # torch leaves Function.apply unannotated
        matrix = Poisoned.apply(self.matrix) if self.poison else self.matrix  # type: ignore[no-untyped-call]
        return x + torch.tanh(x @ matrix)


@behaviour(
    "37",
    "A NaN in any rank's gradient is reported with the parameter's name when the check is on.",
    Mutant("nobody looks at the gradients", patched(GradientGuard, "look")),
)
def nan_is_named(lab: Lab) -> str:
    setup = Setup(units=(Weight,), options={"report_nan_in_param_grad": True})
    subject = lab.build(seeded(lambda: Chain(Weight(), Weight())), setup)
    subject.module.blocks[1].poison = lab.rank == 1
    told, ours = "", lab.subject.name == "native"
    try:
        lab.accumulate(subject)
        subject.finish()
    except Exception as error:  # its kind is the engine's choice, and part of what is measured
        told = f"{type(error).__name__}: {error}"
    raised = [each for each in (lab.everywhere(told) if ours else [told]) if each]
    if lab.rank == 1 or ours:
        lab.claim(bool(raised), "nothing is reported")
        lab.claim(all("blocks.1.matrix" in each for each in raised), f"reported without a name: {raised[:1]}"[:120])
    if ours:
        lab.claim(len(raised) == lab.world, f"reported on {len(raised)} of {lab.world} ranks")
        subject.optimizer.zero_grad()
    return f"{raised[0][:110] if raised else 'nothing'} ... on {len(raised)} ranks"


# -- 41, 42: state -----------------------------------------------------------------------------------------------------


_load_local_state = states.load_local_state


def _loads_main_alone(self: ShardedModel, values: Any) -> None:
    _load_local_state(self.buckets, self._parts.stepped(), values)
    not_installed(self)
    self.zero_grad()


@behaviour(
    "41",
    "Loaded weights are those of the very next forward.",
    Mutant(
        "main weights are loaded, compute weights are not refreshed",
        patched(ShardedModel, "load_local_state", _loads_main_alone),
    ),
)
def loaded_at_once(lab: Lab) -> str:
    for strategy in lab.each(SHARDED):
        with lab.asking():
            for evaluated in (False, True):
                subject = lab.build(seeded(Net), Setup(strategy, (Block,)), sgd(momentum=0.9))
                lab.train(subject, 1)
                saved, at_save = subject.save(), _loss(subject)
                lab.train(subject, 2)
                if evaluated:
                    lab.claim(abs(_loss(subject) - at_save) > 1e-6, f"{strategy}: two steps changed nothing")
                subject.load(saved)
                told = f"{strategy}, loaded after {'a forward without gradients' if evaluated else 'a step'}"
                after = _loss(subject)
                lab.claim(after == at_save, f"{told}: the next loss is {after:.6f}, {at_save:.6f} when saved")
    return f"the first loss after loading equals the one at saving to the bit{lab.without}"


def _loss(subject: Subject) -> float:
    with torch.no_grad():
        return loss_of(subject.model, batch(99)).item()


def _forgiving(buckets: Any, stepped: Any, values: Any) -> None:
    held = states.local_state(buckets, stepped)
    _load_local_state(buckets, stepped, {key: values.get(key, value) for key, value in held.items()})


@behaviour(
    "42",
    "Missing and unexpected keys raise.",
    Mutant("what is missing is left, what is unexpected is dropped", patched(states, "load_local_state", _forgiving)),
)
def strict_keys(lab: Lab) -> str:
    subject = lab.build(seeded(Net), Setup(units=(Block,)), sgd(momentum=0.9))
    lab.train(subject, 1)
    saved = subject.save()
    told = []
    for missing in (True, False):
        try:
            subject.load(subject.tampered(saved, missing=missing))
        except (RuntimeError, ValueError, KeyError) as error:
            lab.claim(("issing" if missing else "nobody") in str(error), f"it says: {first_line(error)}")
            told.append(type(error).__name__)
            continue
        lab.claim(False, f"a state with a key {'missing' if missing else 'too many'} is loaded without a word")
    return f"missing: {told[0] if told else ''}, unexpected: {told[-1] if told else ''}"


# -- 45, 47: defaults, and parameters outside the plan -----------------------------------------------------------------

_plan_units = units.plan_units


def _average_size(module: nn.Module, classes: Any, min_elements: int) -> Any:
    sum(p.numel() for p in module.parameters()) // len(classes)
    return _plan_units(module, classes, min_elements)


@behaviour(
    "45",
    "Without a unit list every strategy works.",
    Mutant("a limit is computed from the mean size of the listed units", patched(build, "plan_units", _average_size)),
)
def defaults(lab: Lab) -> str:
    for strategy in lab.each(ALL):
        with lab.asking():
            lab.weights(seeded(Net), Setup(strategy), steps=2)
    return lab.off("weights after 2 steps")


def _root_is_forgotten(self: GatherPipeline) -> None:
    self._begin([unit for unit in self.order if not unit.is_root])
    self._ran, self._late = [], False


@behaviour(
    "47",
    "Parameters the root itself uses are gathered in time; unused ones neither hang nor corrupt.",
    Mutant("only units are gathered", patched(GatherPipeline, "pre_forward", _root_is_forgotten)),
)
def outside_the_plan(lab: Lab) -> str:
    def skipping() -> Any:
        model: Any = seeded(Unused)()
        model.skip = True
        return model

    for strategy in lab.each(ALL):
        with lab.asking():
            subject = lab.build(seeded(Unused), Setup(strategy, (Block,)))
            for step in range(3):
                subject.module.skip = step == 1  # on all ranks: which ranks may differ in is behaviour 16
                lab.accumulate(subject, 1, step)
                if step == 1:
                    want = lab.plain(holding(skipping, subject.weights()), 1, step)
                    lab.within(
                        FP32, lab.error(subject.gradients(), want), f"{strategy}: gradients with a unit left out"
                    )
                subject.step()
    return lab.off("gradients with a unit and a parameter unused")
