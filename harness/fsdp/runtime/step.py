"""The state of a step: what its gradients are, which calls may follow, and what the backward that begins is to do.

A step is every backward from one `zero_grad()` to the next, with the update between them. Its state says what has
become of the gradients; `REFUSALS` says in which states a call is refused: why, and which call is missing.

                 pre_backward             post_backward
    IDLE ─────────────────────> BACKWARD ───────────────> ACCUMULATED   waits for a backward that ends the step
                                                          SUMMED        complete, and may be added to
                                                          REDUCED       complete
    SUMMED, REDUCED ──finish_grad_sync──> FINISHED ──zero_grad──> IDLE
    any ──fail──> FAILED ──zero_grad──> IDLE

A backward that brings gradients to no parameter, as `torch.autograd.grad(loss, x)`, is no part of the step: it has
calls of its own, and leads back to where it began.

Flags say where the model's forward is. It changes no gradient, and may run in every state of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple


class StepState(Enum):
    IDLE = "no backward has run since gradients were last forgotten"
    BACKWARD = "a backward is running"
    ACCUMULATED = "the last backward ran inside no_sync(), so that some reduction is still to come"
    SUMMED = "every backward so far is reduced into a shard, to which more may be added"
    REDUCED = "the reduction that comes once a step is made or on its way"
    FINISHED = "gradients are reduced and scaled: ready for the optimizer"
    FAILED = "a backward or a reduction raised, so that gradients are incomplete"


Call = Literal["backward()", "finish_grad_sync()", "zero_grad()"]

REFUSALS: dict[tuple[StepState, Call], str] = {
    (StepState.BACKWARD, "finish_grad_sync()"): (
        "finish_grad_sync() (optimizer.step(), grad_norm() and full_gradients() call it) inside a backward, while"
        " gradients are still arriving; call it after backward() has returned"
    ),
    (StepState.BACKWARD, "zero_grad()"): (
        "zero_grad() inside a backward would forget gradients that are still arriving; call it after backward() has"
        " returned"
    ),
    (StepState.ACCUMULATED, "finish_grad_sync()"): (
        "gradients were never reduced: the step's last backward ran inside no_sync(); run the last one outside"
    ),
    (StepState.REDUCED, "backward()"): (
        "a second backward with synchronisation would reduce already reduced gradients again; wrap all microbatches but"
        " the last in no_sync(), or call zero_grad() between them"
    ),
    (StepState.FAILED, "backward()"): (
        "the last backward raised, or a reduction of it; its gradients are incomplete, and another backward would add"
        " to them: call zero_grad() before it"
    ),
    (StepState.FAILED, "finish_grad_sync()"): (
        "the last backward raised, or a reduction of it; its gradients are incomplete: call zero_grad() and try again"
    ),
}


@dataclass(frozen=True)
class BackwardPlan:
    reduce_units: bool
    last: bool
    adds: bool
    leads_to: StepState
    of_inputs: bool = False


class Progress(NamedTuple):
    """How far a rank is when it finishes a step's gradients; all ranks must be there.

    updates: of the weights so far. backwards: of the step, where each is reduced; else 0, as ranks may differ in it.
    """

    updates: int
    backwards: int

    @property
    def number(self) -> int:
        """One number of 18 bits that tells updates and backwards."""
        return self.updates % 2**8 * 2**10 + self.backwards % 2**10


class StepError(RuntimeError):
    """A call is not allowed in the current state of the step. The message says why and which call is missing."""


class Step:
    """
    Args:
        reduces_each: every backward is reduced, also inside `no_sync`.
        reduces_once: some reduction comes once a step, so that a backward inside `no_sync` leaves something to reduce.
        exact_terms: most microbatches over all ranks under numerics=exact; None: any number.
    """

    def __init__(
        self, *, reduces_each: bool, reduces_once: bool, exact_terms: int | None = None, num_ranks: int = 1
    ) -> None:
        self.reduces_each, self.reduces_once = reduces_each, reduces_once
        self.exact_terms, self.num_ranks = exact_terms, num_ranks
        self.state = StepState.IDLE
        self.sync = True  # False inside `no_sync`
        self.num_backwards = 0
        self.num_updates = 0  # that were installed
        self.has_sums = False  # a backward of this step is reduced
        self.plan: BackwardPlan  # of the backward that runs, or of the last one
        self.running: set[str] = set()  # units whose forward runs, not counting recomputation in a backward
        self.in_forward = False  # from the model's pre-forward to its post-forward, to which one that raised never came
        self.with_gradients = False
        self.num_forwards = 0  # the number of the last one, too

    @property
    def in_backward(self) -> bool:
        return self.state is StepState.BACKWARD

    @property
    def progress(self) -> Progress:
        return Progress(self.num_updates, self.num_backwards if self.reduces_each else 0)

    @property
    def has_gradients(self) -> bool:
        return self.state is not StepState.IDLE

    def check(self, call: Call) -> None:
        """Raise StepError if the call is refused in this state."""
        if (why := REFUSALS.get((self.state, call))) is not None:
            raise StepError(why)

    def pre_forward(self, root: str, *, with_gradients: bool) -> None:
        self.in_forward, self.with_gradients = True, with_gradients
        self.running = {root}
        self.num_forwards += 1

    def pre_backward(self, *, of_inputs: bool = False) -> None:
        """Begin a backward; a refused one fails the step. of_inputs: `torch.autograd.grad` of inputs alone. StepError:
        the state does not allow another backward. ValueError: more backwards than `exact_terms` has room for."""
        if of_inputs:
            self.plan = BackwardPlan(False, last=False, adds=self.has_sums, leads_to=self.state, of_inputs=True)
            self.state = StepState.BACKWARD
            return
        try:
            self.check("backward()")
            if self.state is StepState.FINISHED:
                self.num_backwards, self.has_sums = 0, False
            most, ranks = self.exact_terms, self.num_ranks
            if most is not None and (self.num_backwards + 1) * ranks > most:
                raise ValueError(
                    f"numerics=exact was told that at most {most} microbatches over all ranks are added up; this step"
                    f" has more. Set exact_terms to {ranks} times the microbatches of a step"
                )
        except Exception:
            self._fail_at_once()
            raise
        once = StepState.REDUCED if self.sync else StepState.ACCUMULATED
        leads_to = once if self.reduces_once else StepState.SUMMED
        self.plan = BackwardPlan(self.sync or self.reduces_each, last=self.sync, adds=self.has_sums, leads_to=leads_to)
        self.has_sums |= self.plan.reduce_units
        self.num_backwards += 1
        self.state = StepState.BACKWARD

    def check_forward(self, num_updates: int, *, is_stale: bool) -> None:
        """Fail the step and raise StepError for a backward through a forward from before an update."""
        if num_updates == self.num_updates and not is_stale:
            return
        if not self.in_backward:  # one that runs is settled when it has raised
            self._fail_at_once()
        raise StepError(
            "a backward through a forward that ran before the weights were updated (optimizer.step(), or a load) would"
            " mix its activations with the new weights; run the forward again after that"
        )

    def fail(self) -> None:
        self.state = StepState.FAILED

    def _fail_at_once(self) -> None:
        """A backward that is refused counts as one of the step: gradients of those before it are incomplete."""
        if self.state is not StepState.FAILED:
            self.num_backwards = 1 if self.state is StepState.FINISHED else self.num_backwards + 1
        self.fail()

    def zero_grad(self) -> None:
        self.check("zero_grad()")
        self.state = StepState.IDLE
        self.num_backwards, self.has_sums = 0, False
