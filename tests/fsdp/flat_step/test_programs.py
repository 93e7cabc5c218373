"""Programs with every rule of torch, and the ways people use them: right on ranks, and each mistake is found."""

from __future__ import annotations

import pytest

from harness.fsdp import sharding
from harness.fsdp.runtime import gradient_sync
from harness.fsdp.update import flat_step, rules
from harness.fsdp.update.flat_step import Counter
from tests.fsdp.flat_step import world
from tests.fsdp.flat_step.more_programs import PROGRAMS
from tests.support.covering import once
from tests.support.mutants import Slip, each
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


Step = flat_step.FlatStep
WITH_WHOLE_WEIGHTS = frozenset({"fused kernels unseen", "given gradients stay"})
MUTANTS = {
    "no hooks above": (
        Slip(Step, "_wrap", 'getattr(rule, "hooked", None)', "False", "Hooks see flat pieces"),
        "clipped_by_a_hook",
    ),
    "no finally": (
        Slip(
            Step,
            "_end",
            "    self._began = False\n",
            "    self._began = False\n    if __import__('sys').exc_info()[0]:\n        return\n",
            "A rule that raises leaves flat pieces in the groups",
        ),
        "goes_on_after_an_exception",
    ),
    "closures inside": (
        Slip(
            Step,
            "_wrap",
            "            return rule(own, partial(around, closure))",
            "            self._begin()\n            return rule(own, closure)",
            "A closure sees flat pieces",
        ),
        "closure",
    ),
    "schedulers unasked": (
        Slip(Step, "_wrap", "note_step(own)", "pass", "A scheduler does not learn of steps"),
        "scheduler_before",
    ),
    "scheduler undone": (
        Slip(
            Step,
            "_wrap",
            "vars(outer).update(vars(held))",
            "pass",
            "A scheduler that was made before takes `step` for overridden",
        ),
        "scheduler_before",
    ),
    "kernels left": (
        Slip(Step, "_end", ", *KERNELS) if", ",) if", "Kernels of the engine's choice stay in the groups"),
        "AdamW",
    ),
    "one counter": (
        Slip(Counter, "tell_params", "self.index, out", "self.index.flip(0), out", "Parameters have others' counters"),
        "unused_in_turn",
    ),
    "counters unread": (
        Slip(
            Step,
            "_exchange",
            " or any(each.is_edited for each in self._counters)",
            "",
            "A counter that is edited in place is not read again",
        ),
        "counter_edited",
    ),
    "order of pieces": (
        Slip(
            Step,
            "_put_in_order",
            "if id(param) in made_for:\n                state[param]\n            elif",
            "if",
            "State is in the order of pieces, another on each rank",
        ),
        "AdamW",
    ),
    "none is stepped": (
        Slip(
            Step,
            "_build",
            " and grad_of(param) is not None",
            "",
            "Parameters without a gradient are stepped",
        ),
        "unused_in_turn",
    ),
    "one count a piece": (
        Slip(Step, "_build", "self._counts(param)", "None", "Parameters that count otherwise are one piece"),
        "unused_in_turn",
    ),
    "a plan for all gradients": (
        Slip(Step, "_sign", "grad_of(param) is None", "False", "A plan is kept where gradients come and go"),
        "unused_in_turn",
    ),
    "a plan for all states": (
        Slip(
            Step,
            "_sign",
            "held and [id(held.get(key)) for key in keys]",
            "None",
            "A plan is kept where state is loaded",
        ),
        "state_there_and_back",
    ),
    "given gradients": (
        Slip(
            Step,
            "_take_gradients",
            "sharded.take_grad(place[1], zeros=self.steps_unused)",
            "pass",
            "Gradients that are replaced are not taken",
        ),
        "replaced",
    ),
    "loaded state": (
        Slip(Step, "_take_state", "fill(view, value)", "pass", "Loaded moments are not taken"),
        "state_of_one_process",
    ),
    "any class": (
        Slip(rules, "moments_of", "all(", "any(", "A class with its own step gets flat pieces"),
        "subclass with its own step",
    ),
    "fused kernels unseen": (
        Slip(
            Step,
            "_put_state",
            "torch.autograd.graph.increment_version(piece.flat)",
            "pass",
            "What fused kernels write is not installed",
        ),
        "AdamW fused",
    ),
    "given gradients stay": (
        Slip(
            gradient_sync.GradientSync,
            "_begin_backward",
            "self._settled or ",
            "",
            "A backward adds to gradients that the program gave and dropped",
        ),
        "given_without_a_backward",
    ),
    "given gradients are zeros": (
        Slip(
            gradient_sync.GradientSync,
            "finish",
            " if not self._settled else ()",
            "",
            "A second step without a backward steps zeros",
        ),
        "given_without_a_backward",
    ),
    "others' gradients": (
        Slip(
            gradient_sync.GradientSync,
            "forget_unfinished",
            "        self._restore()\n",
            "        self._kept = []\n",
            "One optimizer forgets what another one had",
        ),
        "forgotten_inside_no_sync",
    ),
    "numbers of trained parameters": (
        Slip(
            sharding,
            "_take_sharded",
            'group["params"] = sharded',
            'group["params"] = [each for each in sharded if each.requires_grad]',
            "Frozen parameters are not counted, so that numbers are not torch's",
        ),
        "state_of_groups_in_another_order",
    ),
    "kernels are saved": (
        Slip(flat_step, "KERNELS", "", lambda _: (), "What is saved names kernels that the engine has chosen"),
        "state_of_groups_in_another_order",
    ),
    "loads share memory": (
        Slip(
            Step,
            "take_loaded",
            "self.take_state().values()",
            "()",
            "What was loaded is the memory of the optimizer that gave it",
        ),
        "state_of_groups_in_another_order",
    ),
    "steps are traced": (
        Slip(
            Step,
            "_wrap",
            "map(torch.compiler.disable, (FlatStep._begin, FlatStep._end))",
            "FlatStep._begin, FlatStep._end",
            "torch.compile traces what the engine does around a step",
        ),
        "compiled",
    ),
    "unfinished gradients": (
        Slip(
            sharding,
            "bind",
            "engine.gradients.forget_unfinished()",
            "pass",
            "What came inside no_sync is not forgotten",
        ),
        "forgotten_inside_no_sync",
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


@pytest.mark.parametrize("name", each("flat steps", [(name, slip.breaks) for name, (slip, _) in MUTANTS.items()]))
def test_a_mistake_is_found(name: str) -> None:
    (_, program), stage = MUTANTS[name], stage_of(name)
    assert not outcomes(stage, STAGES[stage].index(program) % BATCHES)[program]
    assert mistakes(list(MUTANTS).index(name) % 2)[name]
