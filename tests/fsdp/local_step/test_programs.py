"""Programs with every rule of torch, and the ways people use them: right on ranks, and each mistake is found."""

from __future__ import annotations

import pytest

from harness.fsdp.update import steps
from tests.fsdp.local_step import world
from tests.fsdp.local_step.more_programs import PROGRAMS
from tests.support.covering import once
from tests.support.mutants import Slip, each, slips
from tests.support.spawn import run_ranks

FEW = "AdamW", "SGD fused", "closure", "unused_in_turn", "given_without_a_backward", "zeros_of_the_model"
STAGES = {3: list(PROGRAMS), 1: list(PROGRAMS)} | {stage: [*FEW, "two_in_one_bucket"] for stage in (0, 2)}


def run_all(rank: int, stage: int, names: list[str]) -> dict[str, list[str]]:
    return {name: world.run(rank, stage, PROGRAMS[name]) for name in names}


BATCHES = 4
"""Visits of the ranks for one stage: each has to end within one test's limit of time."""


@once
def outcomes(stage: int, batch: int) -> dict[str, list[str]]:
    told = run_ranks(run_all, world.WORLD, stage, STAGES[stage][batch::BATCHES])
    return {name: [each for rank in told for each in rank[name]] for name in told[0]}


@pytest.mark.parametrize(("stage", "name"), [(stage, name) for stage, names in STAGES.items() for name in names])
def test_programs_do_what_they_do_on_one_process(stage: int, name: str) -> None:
    assert not outcomes(stage, STAGES[stage].index(name) % BATCHES)[name]


WITH_WHOLE_WEIGHTS = frozenset({"fused kernels unseen", "given gradients stay"})
MUTANTS = slips(
    r"""
    no hooks above: Hooks see plain rows
        fsdp.update.steps.LocalStep._wrap: not getattr(each, "hooked", None) => True
        clipped_by_a_hook
    no finally: A rule that raises leaves plain rows in the groups
        fsdp.update.steps.LocalStep._end: if self._saved is None:
            => if self._saved is None or __import__('sys').exc_info()[0]:
        goes_on_after_an_exception
    closures inside: A closure sees plain rows
        fsdp.update.steps.LocalStep._wrap:             return rule(own, partial(around, closure))
            =>             self._begin()\n            return rule(own, closure)
        closure
    state is lost: Moments that a rule makes are not put where the parameter's are
        fsdp.update.steps.LocalStep._local: self._stepped.append(own) => pass
        AdamW
    loose state is lost: State of parameters that no sharded model has is forgotten
        fsdp.update.steps.LocalStep._end: state.update(found) => pass
        two_models_and_loose
    kernels left: Kernels of the engine's choice stay in the groups
        fsdp.update.steps.LocalStep._end: , *KERNELS) if => ,) if
        AdamW
    one state: Parameters have others' moments
        fsdp.update.steps.LocalStep._shown: value.reshape => next(iter(self._rows.values())).rows.reshape
        unused_in_turn
    state unread: Entries that are put in place of others are not read
        fsdp.update.steps.LocalStep._local: if not _are_same(entries.values(), own.held): => if not own.held:
        state_there_and_back
    none is stepped: Parameters without a gradient are stepped
        fsdp.update.steps.LocalStep._local: None if grad is None else => own.rows.detach() * 0 if grad is None else
        unused_in_turn
    loaded state: Loaded moments are not taken
        fsdp.update.steps.LocalStep._settle: held[key] = laid_as(param, value) => pass
        state_of_one_process
    frozen ones bring zeros: A parameter that was frozen between forward and backward got a gradient of zero
        fsdp.runtime.backward_hooks.BackwardHooks._gradient_arrived: if not param.requires_grad: => if False:
        frozen_after_the_forward
    any class: A class with its own step gets plain rows
        fsdp.update.rules.moments_of: all( => any(
        subclass with its own step
    fused kernels unseen: What fused kernels write is not installed
        fsdp.update.steps.LocalStep._end: torch.autograd.graph.increment_version => len
        AdamW fused
    given gradients stay: A backward adds to gradients that the program gave and dropped
        fsdp.runtime.gradient_sync.GradientSync._begin_backward: self._settled or  =>
        given_without_a_backward
    given gradients are zeros: A second step without a backward steps zeros
        fsdp.runtime.gradient_sync.GradientSync.finish:  if not self._settled else () =>
        given_without_a_backward
    others' gradients: One optimizer forgets what another one had
        fsdp.runtime.gradient_sync.GradientSync.forget_unfinished:         self._restore()\n
            =>         self._kept = {}\n
        forgotten_inside_no_sync
    numbers of trained parameters: Frozen parameters are not counted, so that numbers are not torch's
        fsdp.sharding._take_sharded: group["params"] = sharded
            => group["params"] = [each for each in sharded if each.requires_grad]
        state_of_groups_in_another_order
    loads share memory: What was loaded is the memory of the optimizer that gave it
        fsdp.update.steps.LocalStep.take_loaded: held[key].clone() => held[key]
        state_of_groups_in_another_order
    steps are traced: torch.compile traces what the engine does around a step
        fsdp.update.steps.LocalStep._wrap: map(torch.compiler.disable, (LocalStep._begin, LocalStep._end))
            => LocalStep._begin, LocalStep._end
        compiled
    unfinished gradients: What came inside no_sync is not forgotten
        fsdp.sharding.bind: engine.gradients.forget_unfinished() => pass
        forgotten_inside_no_sync
    """
) | {
    "kernels are saved": (
        Slip(steps, "KERNELS", "", lambda _: (), "What is saved names kernels that the engine has chosen"),
        "state_of_groups_in_another_order",
    ),
}


def stage_of(mutant: str) -> int:
    return 1 if mutant in WITH_WHOLE_WEIGHTS else 3


def with_mistakes(rank: int, names: list[str]) -> dict[str, list[str]]:
    """On one rank: what is wrong with each mutant's program."""
    found = {}
    for name in names:
        slip, program = MUTANTS[name]
        with pytest.MonkeyPatch.context() as patch:
            slip.put(patch)
            found[name] = world.run(rank, stage_of(name), PROGRAMS[program])
    return found


@once
def mistakes(batch: int) -> dict[str, list[str]]:
    told = run_ranks(with_mistakes, world.WORLD, list(MUTANTS)[batch::2])
    return {name: [each for rank in told for each in rank[name]] for name in told[0]}


@pytest.mark.parametrize("name", each("local steps", MUTANTS))
def test_a_mistake_is_found(name: str) -> None:
    (_, program), stage = MUTANTS[name], stage_of(name)
    assert not outcomes(stage, STAGES[stage].index(program) % BATCHES)[program]
    assert mistakes(list(MUTANTS).index(name) % 2)[name]
