"""The end of a step's gradients: wait for the reductions, check them, scale them once; or forget them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending
from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.mesh import Meshes, all_values
from harness.fsdp.comm.reduction import Integers
from harness.fsdp.guards import CopiesPart, bit_hash
from harness.fsdp.runtime.hooks import Hooks
from harness.fsdp.runtime.step import Progress, Step, StepError, StepState
from harness.fsdp.runtime.units import Unit, WeakHook, buckets_of
from harness.fsdp.runtime.weights import Weights
from harness.fsdp.storage.at_rest import ShardedParameters, counting
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import WATCH, by_engine, grad_of, put_grad
from harness.fsdp.tensor_parallel import edits_of, values_here
from harness.private_torch import tree_leaves, without_torch_function

DATA = "data of tensor-parallel ranks"


class SameData:
    """Data of tensor-parallel ranks, compared once, in the first forward with gradients. buckets: all of the model.

    Where a plan cuts the embedding and the head, too, every activation is a sum over ranks, and a model would train on
    a mixture of batches. So what the model's forward is given is compared by its bits: integers (token ids), and
    DTensors that are whole on each rank. Other floating-point numbers are left out, as nothing says if they are a
    shard.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[ParamGroup], meshes: Meshes) -> None:
        self.meshes = meshes
        if any(not shard.is_whole for bucket in buckets for shard in bucket.tp_shards.values()):
            self._handle = module.register_forward_pre_hook(WeakHook(self._look), prepend=True, with_kwargs=True)

    def _look(self, module: nn.Module, args: object, kwargs: object) -> None:
        """*Collective* where there is something to compare. Raises CopiesPart: on all ranks."""
        given = map(_comparable, tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ())
        hashes = [bit_hash(each) for each in given if each is not None]
        if not hashes or self.meshes.tensor is None:
            return
        self._handle.remove()
        bits = all_values(self.meshes.tensor, torch.stack(hashes), DATA)
        if int(self.meshes.everyone.sum_scalars((bits != bits[0]).sum(), DATA)):
            raise CopiesPart(
                "tensor-parallel ranks did not see the same data: integers, or whole DTensors, among the arguments of"
                " the model's forward differ between ranks of tp_dim, so that all ranks would train on a mixture. Give"
                " ranks of tp_dim the same batch: a sampler with num_replicas and rank of the data-parallel dimension,"
                " mesh['dp'].size() and mesh['dp'].get_local_rank(). What is split over tp_dim must be a DTensor that"
                " says so"
            )


def _comparable(given: object) -> Tensor | None:
    if not isinstance(given, Tensor) or given.requires_grad:
        return None
    if isinstance(given, DTensor):
        return given.to_local() if all(each.is_replicate() for each in given.placements) else None
    return None if given.is_floating_point() or given.is_complex() else given


Hook = Callable[[Any], Any]


class ProgramHook:
    """User's post-accumulate hook, which must not change its parameter.

    "Optimizer in backward" would update a parameter by a gradient of this rank alone: ranks would part, or the update
    be lost with gathered weights. While such a hook runs, edits through `data` are counted as the parameter's own are.

    torch shows such a hook the sum over all backwards so far. So do strategies that add up on each rank. Where earlier
    sums lie elsewhere (split over ranks, or finished), an edit of `.grad` would miss them: it is refused. The engine's
    own hook runs last and takes what others leave.

    sums_elsewhere: asked in a backward, if gradients of earlier ones are not in `.grad`.
    """

    def __init__(self, hook: Hook, name: str, step: Step, sums_elsewhere: Callable[[], bool]) -> None:
        self.hook, self.name, self.step, self.sums_elsewhere = hook, name, step, sums_elsewhere

    def __call__(self, param: nn.Parameter) -> None:
        """Raises StepError if the hook has changed its parameter, or a gradient of which `.grad` is a part."""
        if not self.step.in_backward:
            self.hook(param)
            return
        own = type(param)
        with without_torch_function():
            edits, shown = edits_of(param), grad_of(param)
            before = shown.detach().clone() if shown is not None and self.sums_elsewhere() else None
        param.__class__ = counting(own)
        try:
            self.hook(param)
        finally:
            param.__class__ = own
        with without_torch_function():
            if edits_of(param) != edits:
                self._refuse("changed values")
            left = grad_of(param)
            if shown is None or (left is shown and before is None):
                return
            if left is None or (before is not None and not _same_bits(left, before)):
                self._refuse("dropped .grad" if left is None else "changed .grad")
            elif left is not shown:
                shown.copy_(left)
                put_grad(param, shown)

    def _refuse(self, did: str) -> NoReturn:
        raise StepError(
            f"a hook (register_post_accumulate_grad_hook) has {did} of parameter {self.name} inside the backward,"
            " where .grad is a part of the gradient alone: not yet summed over ranks, and without earlier backwards of"
            " the step. Call optimizer.step() after backward(), and edit p.grad for p in model.parameters() between the"
            " last backward and optimizer.step(); or edit what each backward brings by param.register_hook(function)"
        )


def watch(name: str, param: nn.Parameter, own: RemovableHandle, step: Step, sums_elsewhere: Callable[[], bool]) -> None:
    """Watch hooks on an unsharded parameter, those registered later too, and let them run before the engine's `own`."""

    def watched(hook: Hook) -> Hook:
        return hook if isinstance(hook, WeakHook | ProgramHook) else ProgramHook(hook, name, step, sums_elsewhere)

    def hang(to: Tensor, hook: Hook) -> Any:
        handle = Tensor.register_post_accumulate_grad_hook(to, watched(hook))  # type: ignore[no-untyped-call] # torch's
        hooks: Any = handle.hooks_dict_ref()
        for key in [key for key, each in hooks.items() if isinstance(each, WeakHook)]:
            hooks[key] = hooks.pop(key)
        return handle

    setattr(param, WATCH, hang)
    hooks: Any = own.hooks_dict_ref()
    for key, hook in hooks.items():
        hooks[key] = watched(hook)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(values_here(each).reshape(-1).view(torch.uint8) for each in (a, b)))


_UPDATE = 1 << 20
USED = "used parameters"


class GradientSync:
    """Finishes or forgets the gradients of a step.

    integers: format of gradients under numerics=exact, else None.
    """

    def __init__(self, hooks: Hooks, weights: Weights, integers: Integers | None) -> None:
        self.hooks, self.weights, self.integers = hooks, weights, integers
        self.units, self.step, self.reduce, self.guard = hooks.units, hooks.step, hooks.reduce, hooks.reduce.guard
        self.usage = Usage(weights.meshes, hooks.units)
        self.same_data = SameData(hooks.root.module, buckets_of(hooks.units), weights.meshes)
        self.gradients = [gradients for unit in hooks.units for gradients in unit.gradients]
        self.sharded: list[ShardedParameters] = []  # whose `.grad` is set at the end of each synchronising backward
        # copies of main gradients that a backward adds to, and whose they are
        self._kept: dict[ShardedParameters, tuple[list[Tensor], set[int]]] = {}
        self._has_begun = self._settled = False
        hooks.before_backward, hooks.after_backward = WeakHook(self._begin_backward), WeakHook(self._end_backward)
        own = iter(hooks.handles)  # those on parameters come first, in this order
        for bucket in (bucket for unit in self.units for bucket in unit.trainable):
            for index, (name, param) in enumerate(bucket.params):
                sums_elsewhere = WeakHook(self._sums_elsewhere, bucket.gradients, index)
                watch(name, param, next(own), self.step, sums_elsewhere)

    def _sums_elsewhere(self, gradients: Gradients, index: int) -> bool:
        is_reduced = self.step.num_backwards > 1 and index in gradients.arrived and not gradients.is_in_place
        return is_reduced or any(bool(flat.any()) for flats, _ in self._kept.values() for flat in flats)

    def forget_one(self, bucket: ParamGroup, index: int) -> None:
        """`param.grad = None`. *Collective* before the gradients are finished."""
        if bucket.gradients is None:
            return
        if self.step.state in (StepState.ACCUMULATED, StepState.SUMMED):
            self.drain()
            bucket.gradients.forget_one(index)
        if (kept := self._kept.get(bucket.sharded())) is not None:
            kept[1].discard(index)
            bucket.cuts.own_slice(bucket.layout.slots[index]).of(kept[0]).zero_()

    @by_engine
    def _begin_backward(self) -> None:
        state = self.step.state
        if state is StepState.FAILED and self.step.num_backwards <= 1:
            self._restore()
        elif state not in (StepState.IDLE, StepState.FINISHED):
            for sums in self.gradients:
                if sums.is_in_place:
                    sums.prepare()  # hooks of the program see them
            return
        for each in self.sharded:
            gradients = each.bucket.gradients
            if gradients is None or not each.with_grads:
                continue
            gradients.allocate_sums()
            had = each.collect_grads()
            self._kept[each] = [shard.clone() for shard in each.bucket.grad_shards], had
            each.drop_grads()
        if self._settled or self.step.state is not StepState.IDLE:
            self._forget()
        self._has_begun = True

    @by_engine
    def _restore(self) -> None:
        kept, self._kept = self._kept, {}
        for each in self.sharded if self._has_begun else ():
            each.drop_grads()
        self._has_begun = False
        for each, (flats, had) in kept.items():
            if each.bucket.gradients is not None:
                each.bucket.gradients.allocate_sums()
            for shard, flat in zip(each.bucket.grad_shards, flats, strict=True):
                shard.copy_(flat)
            each.install_grads(had, only_kept=True)

    @by_engine
    def _end_backward(self) -> None:
        self._has_begun = False
        if self.step.plan.last:
            self.finish()
            return
        for each in self.sharded:  # what is this rank's alone, or not scaled, is nobody's `.grad`
            if each.bucket.gradients is not None and each.bucket.gradients.is_in_place:
                each.hide_grads()

    @by_engine
    def _install(self) -> None:
        kept, self._kept = self._kept, {}
        for each in self.sharded:
            flats, had = kept.get(each, ((), set[int]()))
            for shard, flat in zip(each.bucket.grad_shards if flats else (), flats, strict=True):
                shard.add_(flat)
            each.install_grads(had | each.add_own_grads())

    def finish(self) -> None:
        """See `FSDPModule.finish_grad_sync`."""
        self.weights.wait()
        self.hooks.recover()
        self.step.check("finish_grad_sync()")
        if self.step.state is StepState.FINISHED:
            return
        if self.step.state is StepState.IDLE:
            for gradients in self.gradients if not self._settled else ():
                gradients.settle_sums()
            self._settled = True
            return
        self.drain()
        if self.guard is not None:
            self.guard.report()
        beyond = None if self.integers is None else self.integers.beyond
        count = self.usage.find(self.step.progress, beyond)
        if self.integers is not None and count:
            raise self.integers.fixed.overflow(count)
        self.reduce.finish()
        self.step.state = StepState.FINISHED
        self._install()

    @by_engine
    def collect(self) -> list[ParamGroup]:
        """Buckets of trained parameters, once gradients are finished. `.grad` of all parameters is copied into main
        gradients; None gives zeros. *Collective.*"""
        self.finish()
        for each in self.sharded:
            each.collect_grads()
        return [each.bucket for each in self.sharded if each.bucket.trainable]

    def drain(self) -> None:
        try:
            self.reduce.drain()
        except BaseException:
            self.step.fail()
            raise

    @by_engine
    def forget(self, *, set_to_none: bool = True) -> None:
        """See `FSDPModule.zero_grad`."""
        self.hooks.recover()
        self.step.check("zero_grad()")
        had = [set[int]() if set_to_none else each.with_grads for each in self.sharded]
        for each in self.sharded if set_to_none else ():
            each.drop_grads()
        self._kept = {}
        self._forget()
        self._settled = any(had)
        for gradients in self.gradients if self._settled else ():
            gradients.settle_sums()
        for each, zeros in zip(self.sharded, had, strict=True):
            each.install_grads(zeros, only_kept=True)

    @by_engine
    def forget_unfinished(self) -> None:
        """Forget unfinished gradients. Raises StepError inside a backward."""
        self.hooks.recover()
        self.step.check("zero_grad()")
        if self.step.state not in (StepState.IDLE, StepState.FINISHED):
            self._forget()
            self._restore()

    @by_engine
    def let_go(self) -> None:
        if self.step.state is StepState.FINISHED and not any(each.with_grads for each in self.sharded):
            self._forget()

    def _forget(self) -> None:
        self._settled = False
        self.reduce.discard()
        for each in self.sharded:
            if each not in self._kept:
                each.leave_kept_grads()
        for gradients in self.gradients:
            gradients.forget()
        self.step.zero_grad()
        if self.integers is not None:
            self.integers.beyond.zero_()
        if self.guard is not None:
            self.guard.forget()


class Usage:
    """Finds, once a step, parameters that got a gradient on no rank: their `.grad` is None on all ranks.

    A parameter is used if any rank had a gradient of it in any microbatch of the step; then all ranks update it, those
    that had none with the others' sum. Ranks sum one int64 a parameter, in the message that also carries the counters
    of numerics=exact. Each of these numbers tells the rank's progress, too: `_UPDATE` times its number.
    A rank that had a gradient of every parameter knows that none is unused, and reads the sums a step later.
    """

    def __init__(self, meshes: Meshes, units: Sequence[Unit]) -> None:
        self.meshes, self.units = meshes, units
        # sums that nobody has waited for, and how far this rank was
        self._unread: list[tuple[Communicator, Pending, Tensor, Progress]] = []

    def find(self, progress: Progress, beyond: Tensor | None = None) -> int:
        """Set `unused` of all gradients. *Collective.*

        Args:
            progress: of this rank.
            beyond: int64, shape [1], summed over the dense ranks in the same message.

        Returns the sum of `beyond`, or 0.

        Raises:
            StepError: ranks are in different steps.
        """
        unread, self._unread = self._unread, []
        for each in unread:
            _read(*each)
        trained = [bucket for unit in self.units for bucket in unit.trainable]
        sums: list[int] = []
        for mesh in self.meshes:  # of dense parameters first, then of experts
            held = [b.gradients for b in trained if b.mesh is mesh and b.gradients is not None]
            sums.append(self._count(mesh.everyone, held, progress, None if sums else beyond))
        return sums[0]

    def _count(
        self, comm: Communicator, gradients: Sequence[Gradients], progress: Progress, beyond: Tensor | None = None
    ) -> int:
        had = [index in each.arrived for each in gradients for index in range(len(each.params))]
        if beyond is None and not had:
            return 0
        device, told = comm.runtime.device, progress.number * _UPDATE
        if all(had):  # filled on the device
            sums = torch.full((len(had),), 1 + told, dtype=torch.int64, device=device)
        else:
            sums = torch.tensor([each + told for each in had], dtype=torch.int64, device=device)
        sent = sums if beyond is None else torch.cat([beyond, sums])
        pending = comm.begin_sum(sent, USED if beyond is None else "gradients beyond the fixed point")
        if beyond is None and all(had):  # no sum is zero
            if is_queued(device):  # the host would wait for the device to read them
                pending.wait()
            else:
                self._unread.append((comm, pending, sums, progress))
            return 0
        counts = iter(_read(comm, pending, sent[len(sent) - len(had) :], progress))
        for group in gradients:
            group.unused = frozenset(index for index in range(len(group.params)) if not next(counts))
        return 0 if beyond is None else int(sent[0])


def _read(comm: Communicator, pending: Pending, sums: Tensor, progress: Progress) -> list[int]:
    """How many ranks had a gradient, by parameter. Raises StepError where ranks are in different steps."""
    with events.waiting(Label("all_reduce", USED)):
        pending.wait()
    totals: list[int] = sums.tolist()
    if any(each // _UPDATE != progress.number * comm.size for each in totals):
        since = f"of {progress.backwards} backwards after" if progress.backwards else "after"
        raise StepError(
            f"this rank's gradients are those {since} {progress.updates} updates of the weights, and other"
            " ranks' are not: some rank ran a backward more, or less. All ranks must run equally many backwards with"
            " synchronisation in each step; and where each is reduced (ZeRO-2 and 3), those inside no_sync(), too"
        )
    return [each % _UPDATE for each in totals]
