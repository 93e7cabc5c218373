"""The end of a step's gradients: wait for the reductions, check them, scale them once; or forget them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from harness.fsdp.comm.gradient_format import Integers
from harness.fsdp.guards.copied_gradients import CopiedGradients
from harness.fsdp.guards.nonfinite import GradientGuard
from harness.fsdp.runtime.hooks import Hooks
from harness.fsdp.runtime.installation import WeightInstaller
from harness.fsdp.runtime.program_hooks import watch
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.step import Call, Step, StepState
from harness.fsdp.runtime.units import Unit
from harness.fsdp.runtime.usage import Usage
from harness.fsdp.runtime.weak_hooks import WeakHook
from harness.fsdp.storage.at_rest import ShardedParameters
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.parameter_access import by_engine

Kept = tuple[ShardedParameters, list[Tensor], set[int]]
"""Parameters of a bucket, their main gradients, and which of them had one."""


class GradientSync:
    """Finishes or forgets the gradients of one model's step, as far as the step's state allows it.

    Args:
        units: whose gradients these are.
        step: asked before anything is done, told afterwards.
        hooks: settle a backward that raised.
        reduce: whose reductions are waited for.
        weights: waited for as well: the update that follows changes what other ranks may still be taking.
        guard: reports gradients that are not finite; None reports none.
        integers: under numerics=exact, how gradients are written as integers; else None.
        usage: finds out which parameters got no gradient; its ranks agree on what they raise, too.
        copies: compares what tensor-parallel ranks bring for parameters that each of them has whole.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        step: Step,
        hooks: Hooks,
        reduce: ReducePipeline,
        weights: WeightInstaller,
        guard: GradientGuard | None,
        integers: Integers | None,
        usage: Usage,
        copies: CopiedGradients,
    ) -> None:
        self.units = units
        self.step = step
        self.hooks = hooks
        self.reduce = reduce
        self.weights = weights
        self.guard = guard
        self.integers = integers
        self.usage = usage
        self.copies = copies
        self.sharded: list[ShardedParameters] = []
        """Parameters whose `.grad` shows finished gradients; see `harness.fsdp.storage.at_rest`."""
        self._kept: list[Kept] = []
        """Gradients that parameters had when the step began, which are added to what it brings."""
        self._has_begun = False
        """A backward of the step has begun, and none has ended."""
        self._settled = False
        """Main gradients are what no backward has brought: zeros, or what the program has given."""
        self._watch_hooks()

    def _watch_hooks(self) -> None:
        watch((each for unit in self.units for bucket in unit.trainable for each in bucket.params), self.step)

    # -- `.grad` of sharded parameters -------------------------------------------------------------------------------

    def show(self, sharded: list[ShardedParameters]) -> None:
        """Let `.grad` of these parameters be their finished gradients, from the end of each synchronising backward."""
        self.sharded = sharded
        for each in sharded:
            each.sync = weakref.ref(self)
        self.hooks.of_backward.before_backward = WeakHook(self._begin_backward)
        self.hooks.of_backward.after_backward = WeakHook(self._end_backward)

    def forget_one(self, bucket: Bucket, index: int) -> None:
        """The program sets `.grad` of a parameter to None. *Collective* before the gradients are finished."""
        if bucket.gradients is None:
            return
        if self.step.state in (StepState.ACCUMULATED, StepState.SUMMED):
            self.drain()
            bucket.gradients.forget_one(index)
        for each, flats, had in self._kept:
            if each.bucket is bucket:
                had.discard(index)
                local = bucket.layout.local_slice(bucket.layout.slots[index], bucket.cuts.layout_rank)
                flats[local.segment][local.offset : local.offset + local.numel].zero_()

    @by_engine
    def _begin_backward(self) -> None:
        """A backward begins: the first of a step keeps the gradients that parameters have, to add to them."""
        state = self.step.state
        if state is StepState.FAILED and self.step.num_backwards <= 1:
            self._restore()
        elif state not in (StepState.IDLE, StepState.FINISHED):
            return
        for each in self.sharded:
            gradients = each.bucket.gradients
            if gradients is None or not each.with_grads:
                continue
            gradients.claim()
            had = each.collect_grads()
            self._kept.append((each, [shard.clone() for shard in each.bucket.grad_shards], had))
            each.drop_grads()
        if self._settled or self.step.state is not StepState.IDLE:
            self._forget()
        self._has_begun = True

    @by_engine
    def _restore(self) -> None:
        """A backward that raised has left no gradient: parameters have those from before it."""
        kept, self._kept = self._kept, []
        for each in self.sharded if self._has_begun else ():
            each.drop_grads()
        self._has_begun = False
        for each, flats, had in kept:
            if each.bucket.gradients is not None:
                each.bucket.gradients.claim()
            for shard, flat in zip(each.bucket.grad_shards, flats, strict=True):
                shard.copy_(flat)
            each.install_grads(had, only_kept=True)

    @by_engine
    def _end_backward(self) -> None:
        self._has_begun = False
        if self.step.plan.ends_by is not Call.post_backward:
            return
        if self.step.plan.last:
            self.finish()
            return
        for each in self.sharded:  # what is this rank's alone, or not scaled, is nobody's `.grad`
            if each.bucket.gradients is not None and each.bucket.gradients.is_in_place:
                each.hide_grads()

    @by_engine
    def _install(self) -> None:
        """The step's gradients are finished: parameters show them."""
        kept, self._kept = self._kept, []
        had = {id(each): names for each, _, names in kept}
        for each, flats, _ in kept:
            for shard, flat in zip(each.bucket.grad_shards, flats, strict=True):
                shard.add_(flat)
        for each in self.sharded:
            each.install_grads(had.get(id(each), set()) | each.add_own_grads())

    def take_in(self, usage: Usage, *, late: Sequence[Bucket]) -> None:
        """Finish and forget gradients of further buckets, too, of which no backward of the step has brought any.

        Args:
            usage: of the gradients of all trained buckets.
        """
        self.usage = usage
        self._watch_hooks()
        for bucket in late if self.step.has_gradients else ():
            if bucket.gradients is not None:
                bucket.gradients.begin_late()

    def finish(self) -> None:
        """Wait for the step's reductions and scale the gradients, once. Further calls do nothing. *Collective.*

        Raises:
            StepError: the last backward ran inside no_sync(), or raised; or this is called inside a backward.
            FloatingPointError: a gradient of any rank is not finite, and a guard looks for such.
            OverflowError: under numerics=exact, a gradient of any rank is beyond the range.
            CopiesPart: a RuntimeError; see [Note: Copies that part].
        """
        self.weights.wait()
        self.hooks.recover()
        self.step.check(Call.finish_grad_sync)
        if self.step.state is StepState.FINISHED:
            return
        if self.step.state is StepState.IDLE:
            for gradients in self._gradients() if not self._settled else ():
                gradients.settle_sums()
            self._settled = True
            return
        self.drain()
        if self.guard is not None:
            self.guard.report()
        self._agree()
        self.reduce.finish()
        self.step.finished()
        self.copies.check()
        self._install()

    @by_engine
    def collect(self) -> None:
        """Let main gradients be what parameters have as `.grad`, zeros for None."""
        for each in self.sharded:
            each.collect_grads()

    def drain(self) -> None:
        """Wait until all reductions that were issued have landed; one that raises fails the step."""
        try:
            self.reduce.drain()
        except BaseException:
            self.step.fail()
            raise

    @by_engine
    def forget(self, *, set_to_none: bool = True) -> None:
        """Forget all gradients of the step, whatever became of them: the next step begins.

        Args:
            set_to_none: False: parameters whose `.grad` is not None have one of zeros from now on.

        Raises:
            StepError: inside a backward.
        """
        self.hooks.recover()
        self.step.check(Call.zero_grad)
        had = [set[int]() if set_to_none else each.with_grads for each in self.sharded]
        for each in self.sharded if set_to_none else ():
            each.drop_grads()
        self._kept = []
        self._forget()
        self._settled = any(had)
        for gradients in self._gradients() if self._settled else ():
            gradients.settle_sums()
        for each, zeros in zip(self.sharded, had, strict=True):
            each.install_grads(zeros, only_kept=True)

    @by_engine
    def forget_unfinished(self) -> None:
        """Forget what backwards have brought and no `.grad` shows yet; inside a backward it raises StepError."""
        self.hooks.recover()
        self.step.check(Call.zero_grad)
        if self.step.state not in (StepState.IDLE, StepState.FINISHED):
            self._forget()
            self._restore()

    @by_engine
    def let_go(self) -> None:
        """Free the memory of finished gradients that no `.grad` shows any more."""
        if self.step.state is StepState.FINISHED and not any(each.with_grads for each in self.sharded):
            self._forget()

    def _forget(self) -> None:
        """Forget what backwards have brought; `.grad` of parameters is what it was."""
        self._settled = False
        self.reduce.discard()
        added_to = {id(each) for each, *_ in self._kept}
        for each in self.sharded:
            if id(each) not in added_to:
                each.leave_kept_grads()
        for gradients in self._gradients():
            gradients.forget()
        self.step.zero_grad()
        if self.integers is not None:
            self.integers.beyond.zero_()
        if self.guard is not None:
            self.guard.forget()

    def _gradients(self) -> list[Gradients]:
        return [gradients for unit in self.units for gradients in unit.gradients]

    def _agree(self) -> None:
        """Find out with all ranks which parameters are unused; and raise OverflowError on all of them if a gradient of
        any could not be written as an integer."""
        if self.integers is None:
            self.usage.find(self.step.num_updates)
            return
        count = self.usage.find(self.step.num_updates, self.integers.beyond)
        if count:
            raise self.integers.fixed.overflow(count)
