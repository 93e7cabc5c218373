"""The state of a step: what its gradients are, which calls may follow, and what the backward that begins is to do.

[Note: Step state] A step is every backward from one `zero_grad()` to the next, with the update between them. Its state
says what has become of the gradients; `TRANSITIONS` says which call leads where, `REFUSALS` what a call that leads
nowhere is told: why, and which call is missing. Whatever raises leads to FAILED, which only `zero_grad()` leaves.

                 pre_backward             post_backward
    IDLE ─────────────────────> BACKWARD ───────────────> ACCUMULATED   waits for a backward that ends the step
                                                          SUMMED        complete, and may be added to
                                                          REDUCED       complete
    SUMMED, REDUCED ──finish_grad_sync──> FINISHED ──zero_grad──> IDLE

A backward that brings gradients to no parameter, as `torch.autograd.grad(loss, x)`, leads back to where it began.

[Note: Stale gradients] After an update a program may differentiate through the model once more for the sake of others'
gradients, as a generator's loss goes through the critic, and call zero_grad() of it afterwards: what comes to the
model's own parameters then is dropped as it arrives and travels nowhere. Plain torch would add it to the finished ones;
who reads or steps before zero_grad() is told, for sums that are reduced and scaled can take no more.

A forward changes no gradient: it may run in every state, and has a small state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from harness.fsdp.runtime.readiness import next_number


class StepState(Enum):
    """What has become of a step's gradients."""

    IDLE = "no backward has run since gradients were last forgotten"
    BACKWARD = "a backward is running"
    ACCUMULATED = "the last backward ran inside no_sync(), so that some reduction is still to come"
    SUMMED = "every backward so far is reduced into a shard, to which more may be added"
    REDUCED = "the reduction that comes once a step is made or on its way"
    FINISHED = "gradients are reduced and scaled: ready for the optimizer"
    STALE = "a backward ran after gradients were finished, and what it brought was dropped"
    FAILED = "a backward or a reduction raised, so that gradients are incomplete"


class Call(Enum):
    """What happens to a step; named as users and hooks call it."""

    pre_backward = "backward()"
    post_backward = "the end of a backward"
    finish_grad_sync = "finish_grad_sync()"
    zero_grad = "zero_grad()"


TRANSITIONS: dict[StepState, dict[Call, tuple[StepState, ...]]] = {
    StepState.IDLE: {
        Call.pre_backward: (StepState.BACKWARD,),
        Call.finish_grad_sync: (StepState.IDLE,),  # without a backward there is nothing to finish: gradients are zeros
        Call.zero_grad: (StepState.IDLE,),
    },
    StepState.BACKWARD: {
        Call.post_backward: (StepState.ACCUMULATED, StepState.SUMMED, StepState.REDUCED, StepState.STALE),
    },
    StepState.ACCUMULATED: {
        Call.pre_backward: (StepState.BACKWARD,),
        Call.zero_grad: (StepState.IDLE,),
    },
    StepState.SUMMED: {
        Call.pre_backward: (StepState.BACKWARD,),
        Call.finish_grad_sync: (StepState.FINISHED,),
        Call.zero_grad: (StepState.IDLE,),
    },
    StepState.REDUCED: {
        Call.finish_grad_sync: (StepState.FINISHED,),
        Call.zero_grad: (StepState.IDLE,),
    },
    StepState.FINISHED: {
        Call.pre_backward: (StepState.BACKWARD,),
        Call.finish_grad_sync: (StepState.FINISHED,),
        Call.zero_grad: (StepState.IDLE,),
    },
    StepState.STALE: {
        Call.pre_backward: (StepState.BACKWARD,),
        Call.zero_grad: (StepState.IDLE,),
    },
    StepState.FAILED: {
        Call.zero_grad: (StepState.IDLE,),
    },
}
"""Which states a call may lead to. A plan chooses where `post_backward` goes (`BackwardPlan.leads_to`)."""

REFUSALS: dict[tuple[StepState, Call], str] = {
    (StepState.BACKWARD, Call.finish_grad_sync): (
        "finish_grad_sync() (optimizer.step(), grad_norm() and full_gradients() call it) inside a backward, while"
        " gradients are still arriving; call it after backward() has returned"
    ),
    (StepState.BACKWARD, Call.zero_grad): (
        "zero_grad() inside a backward would forget gradients that are still arriving; call it after backward() has"
        " returned"
    ),
    (StepState.ACCUMULATED, Call.finish_grad_sync): (
        "gradients were never reduced: the step's last backward ran inside no_sync(); run the last one outside"
    ),
    (StepState.REDUCED, Call.pre_backward): (
        "a second backward with synchronisation would reduce already reduced gradients again; wrap all microbatches but"
        " the last in no_sync(), or call zero_grad() between them"
    ),
    (StepState.STALE, Call.finish_grad_sync): (
        "a backward ran after this step's gradients were finished (by optimizer.step(), clip_grad_norm_(), grad_norm()"
        " or full_gradients()) and before zero_grad(); plain torch would add its gradients to the old ones, which are"
        " reduced and scaled, so they were dropped: call zero_grad() before the backward whose gradients are wanted"
    ),
    (StepState.FAILED, Call.pre_backward): (
        "the last backward raised, or a reduction of it; its gradients are incomplete, and another backward would add"
        " to them: call zero_grad() before it"
    ),
    (StepState.FAILED, Call.finish_grad_sync): (
        "the last backward raised, or a reduction of it; its gradients are incomplete: call zero_grad() and try again"
    ),
}
"""What the user is told of a call that `TRANSITIONS` does not have: why it is wrong, and which call is missing."""


class StepError(RuntimeError):
    """A call that the state of the step does not allow. Says why, and which call is missing."""


@dataclass(frozen=True)
class BackwardPlan:
    """What one backward does with its gradients.

    reduce_units: a unit is handed to the reductions when its backward ends; else it waits unreduced.
    last: this backward ends the step's accumulation, so that what is reduced once a step is reduced in it.
    adds: an earlier backward of the step was reduced, so that sums are there to be added to; else they are copied.
    leads_to: the state of the step after it.
    drops: what it brings to parameters is dropped as it arrives; see [Note: Stale gradients].
    """

    reduce_units: bool
    last: bool
    adds: bool
    leads_to: StepState
    drops: bool = False


STALE_PLAN = BackwardPlan(reduce_units=False, last=False, adds=False, leads_to=StepState.STALE, drops=True)


@dataclass(frozen=True)
class StepShape:
    """What strategy, axes and options demand of every step of a model.

    reduces_each: every backward is handed to the reductions, also one inside `no_sync`.
    reduces_once: some reduction (of `no_shard` and `optim`, or of the outer axis) comes once a step, so that one
        backward must be known to be the last, and none may follow it.
    accumulates: a backward inside `no_sync` leaves something that is still to be reduced.
    exact_terms: under numerics=exact, most microbatches over all ranks that a step may add up; None: any number.
    num_ranks: data-parallel ranks, each of which runs one backward a microbatch.
    """

    reduces_each: bool
    reduces_once: bool
    accumulates: bool
    exact_terms: int | None = None
    num_ranks: int = 1

    def plan(self, *, sync: bool, adds: bool) -> BackwardPlan:
        """The plan of a backward. sync: it ends the step; adds: one of this step was reduced before it."""
        leads_to = StepState.ACCUMULATED if self.accumulates and not sync else StepState.SUMMED
        if self.reduces_once and sync:
            leads_to = StepState.REDUCED
        return BackwardPlan(sync or self.reduces_each, last=sync, adds=adds, leads_to=leads_to)

    def check_terms(self, num_backwards: int) -> None:
        """Raise ValueError where so many backwards a rank exceed what numerics=exact can add up."""
        if self.exact_terms is not None and num_backwards * self.num_ranks > self.exact_terms:
            raise ValueError(
                f"numerics=exact was told that at most {self.exact_terms} microbatches over all ranks are added up;"
                f" this step has more. Set exact_terms to {self.num_ranks} times the microbatches of a step"
            )


class Step:
    """The state of a model's step; see [Note: Step state]. It decides nothing but what may come next.

    Args:
        shape: what every step of the model demands.
    """

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.state = StepState.IDLE
        self.sync = True
        """Whether the backward that begins next ends the step's accumulation: False inside `no_sync`."""
        self.num_backwards = 0
        """Backwards begun since gradients were last forgotten."""
        self.plan = shape.plan(sync=True, adds=False)
        """What the backward that runs, or ran last, does with its gradients."""
        self.num_updates = 0
        """How often weights were installed, after an update or a load."""
        self.awaits_install = False
        """Whether weights were updated that are still to be installed."""
        self.dropped: set[str] = set()
        """Parameters whose `.grad` the program has set to None since gradients were last forgotten."""
        self.frozen: frozenset[str] = frozenset()
        """Parameters that have storage for gradients and were frozen in the last forward with gradients."""
        self._adds = False

    @property
    def in_backward(self) -> bool:
        """Whether a backward runs, or has raised and was not settled yet."""
        return self.state is StepState.BACKWARD

    @property
    def has_gradients(self) -> bool:
        """Whether a backward ran since gradients were last forgotten."""
        return self.state is not StepState.IDLE

    def check(self, call: Call) -> tuple[StepState, ...]:
        """The states a call may lead to now.

        Raises:
            StepError: none; why, and which call is missing.
        """
        allowed = TRANSITIONS[self.state].get(call)
        if allowed is None:
            raise StepError(REFUSALS.get((self.state, call)) or f"{call.value} is not possible now: {self.state.value}")
        if self.dropped and call is not Call.zero_grad:
            raise StepError(
                f".grad of {', '.join(sorted(self.dropped)[:3])} was set to None, and of other parameters it was not:"
                " gradients of a sharded model are forgotten together; set all of them to None, or call zero_grad()"
            )
        return allowed

    def pre_backward(self, *, of_inputs: bool = False) -> BackwardPlan:
        """A backward begins. One that is refused fails the step: it may have left a gradient where sums are.

        Args:
            of_inputs: it brings gradients to no parameter (`torch.autograd.grad`), and is no part of the step.

        Raises:
            StepError: the state does not allow another backward.
            ValueError: see `StepShape.check_terms`.
        """
        if of_inputs:
            return self._begin(replace(STALE_PLAN, adds=self._adds, leads_to=self.state, drops=False))
        try:
            self.check(Call.pre_backward)
            if self.state in (StepState.FINISHED, StepState.STALE):
                return self._begin(STALE_PLAN)
            self.shape.check_terms(self.num_backwards + 1)
        except Exception:
            self.fail()
            raise
        plan = self.shape.plan(sync=self.sync, adds=self._adds)
        self._adds |= plan.reduce_units
        self.num_backwards += 1
        return self._begin(plan)

    def _begin(self, plan: BackwardPlan) -> BackwardPlan:
        self.plan, self.state = plan, StepState.BACKWARD
        return plan

    def check_forward(self, num_updates: int) -> None:
        """Refuse a backward through a forward that ran when there had been `num_updates` updates, and fail the step.

        Raises:
            StepError: weights were installed since.
        """
        if num_updates == self.num_updates:
            return
        if not self.in_backward:  # one that runs is settled when it has raised
            self.fail()
        raise StepError(
            "a backward through a forward that ran before the weights were updated (optimizer.step(), or a load), or"
            " given other storage (what was frozen when it was sharded is trained now), would mix its activations with"
            " the new weights; run the forward again after that"
        )

    def post_backward(self) -> None:
        """The backward has come to its end."""
        self.check(Call.post_backward)
        self.state = self.plan.leads_to

    def fail(self) -> None:
        """A backward or a reduction raised: only `zero_grad` leads on."""
        self.state = StepState.FAILED

    def finished(self) -> None:
        """Gradients are reduced and scaled."""
        (self.state,) = self.check(Call.finish_grad_sync)

    def zero_grad(self) -> None:
        """Gradients are forgotten: the next step begins."""
        (self.state,) = self.check(Call.zero_grad)
        self.num_backwards = 0
        self.dropped = set()
        self._adds = False

    def weights_installed(self) -> None:
        """The weights have changed: graphs of earlier forwards are worth nothing any more."""
        self.num_updates += 1
        self.awaits_install = False

    def check_installed(self) -> None:
        """Raise StepError where weights would be used that were updated and not installed."""
        if self.awaits_install:
            raise StepError(
                "weights were updated by step(install_optimized_model_weights=False) and are not installed: call"
                " model.install_optimized_model_weights() before they are used"
            )


class ForwardState(Enum):
    """Where the model's own forward is."""

    IDLE = "outside"
    FORWARD = "inside"
    RAISED = "it raised, and left weights unsharded"


class Forward:
    """The model's forward, and the units in whose forward the program is. Recomputations in a backward are left out.

    Args:
        root: name of the root unit.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.state = ForwardState.IDLE
        self.running: set[str] = set()
        """Units in whose forward the program is."""
        self.with_gradients = False
        """Whether the model's forward was called with gradients on."""
        self._begin = 0
        self.depth = 0
        """How many forwards of the model run inside the outermost one."""

    @property
    def in_model(self) -> bool:
        """Whether the program is in the model's forward, or in a method that stands for it."""
        return self.root in self.running

    def pre_forward(self, *, with_gradients: bool) -> None:
        """The model's forward begins."""
        self.state, self.running, self.with_gradients = ForwardState.FORWARD, {self.root}, with_gradients
        self.depth = 0
        self._begin = next_number()

    @property
    def made_nodes(self) -> bool:
        """Whether the model's forward has made something that a backward could go through."""
        return self.with_gradients and next_number() > self._begin

    def post_forward(self) -> None:
        """The model's forward came to its end."""
        self.state = ForwardState.IDLE

    def left(self, unit: str) -> None:
        """A unit's forward is over, also by an exception; the root's is the model's."""
        if unit == self.root and self.depth:
            self.depth -= 1
            return
        self.running.discard(unit)
        if unit == self.root and self.state is ForwardState.FORWARD:
            self.state = ForwardState.RAISED

    def hides(self, *, with_gradients: bool) -> bool:
        """Whether a unit called now is recorded only in the backward, as reentrant checkpointing does."""
        return self.state is ForwardState.FORWARD and self.with_gradients and not with_gradients
