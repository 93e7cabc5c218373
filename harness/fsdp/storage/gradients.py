"""One bucket's gradients: from autograd, through sums over microbatches, to the main gradients of the optimizer.

Three buffers may differ: the *unreduced* bucket that a backward fills, the *accumulated* sums over microbatches (and
ranks), and the *main* gradients. How each lies is read from the bucket's `Placements`. Where unreduced and accumulated
gradients lie alike, in one dtype, autograd writes into the sums themselves (`is_in_place`). They may lie
alike in other numbers or storage: int64 under numerics=exact, one tensor a parameter under grad_buffer=concat. Then
each backward's are added to the sums on this rank. Else every backward's are reduced into the sums from a temporary
bucket (`is_reduced`). No buffer is zeroed first: a parameter's first gradient is copied over its place, later
ones are added, and places without any are zeroed at the hand-over.

Where work is queued, first gradients stay as autograd made them until their unit's backward ends, and one kernel casts
and copies them all. `.grad` is empty meanwhile: a second gradient is added in the bucket's dtype. The root unit does
not wait, nor does a unit that was called several times: autograd adds up its gradients in the bucket's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from harness.fsdp.comm.device import copy_together
from harness.fsdp.comm.reduction import Integers
from harness.fsdp.options import GradBuffer, Numerics
from harness.fsdp.policy import Dtypes
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.parameter_access import by_engine, grad_of, put_grad, views_of
from harness.fsdp.storage.placement import SHARD, On, Placements
from harness.fsdp.tensor_parallel import gradient_here
from harness.private_torch import references_to


@dataclass(frozen=True)
class GradientPlan:
    """Shared by all buckets of a model.

    integers: format of gradients and of their sums under numerics=exact. offload: device of main gradients, apart from
    the sums.
    """

    memory: BucketMemory
    buffer: GradBuffer = GradBuffer.flat
    numerics: Numerics = Numerics.fast
    integers: Integers | None = None
    offload: torch.device | None = None


class Gradients:
    kept_by_engine = True

    def __init__(
        self,
        name: str,
        params: Sequence[nn.Parameter],
        cuts: Cuts,
        placements: Placements,
        dtypes: Dtypes,
        plan: GradientPlan,
    ) -> None:
        self.name, self.params, self.dtypes = name, params, dtypes
        self.cuts, self.layout, self.placements = cuts, cuts.layout, placements
        self.plan, self.memory = plan, plan.memory
        self.concat = plan.buffer is GradBuffer.concat
        self.is_offloaded = plan.offload is not None
        self.is_reduced = not placements.accumulates_locally
        self.is_in_place = not (self.is_reduced or plan.integers or self.concat)
        self.first_may_wait = not self.concat  # true if first gradients may wait in the dtype of their weight
        self.bucket: Tensor | None = None
        self.arrived: set[int] = set()
        # indices of parameters without a gradient on any rank, once a step's gradients are finished
        self.unused: frozenset[int] = frozenset()
        self._unwritten: set[int] = set()
        self._views: list[Tensor] = []
        self._waits = False
        self._has_gaps = False  # between parameters of the bucket, which are to be zeroed
        self._blank: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}
        self._main: Tensor | None = None
        self._build_sums()
        if plan.integers or self.is_offloaded or (SHARD in cuts.own and self.memory.registers):
            self._build_main()
        self.drop()

    def _build_sums(self) -> None:
        lies, dtype = self.placements.accumulated_grads, torch.int64 if self.plan.integers else self.dtypes.grads
        allocate = self.memory.persistent if self.is_reduced else self.memory.sums
        self.sums = allocate(self.cuts.numel(lies), dtype)
        self.inner_shards = self.cuts.inner_shards_of(self.sums, lies)
        self.own_shards = self.main_shards = self.cuts.own_shards(self.inner_shards)
        if self.is_in_place:
            self._view(self.sums)
        elif self.is_reduced:
            self.sums.untyped_storage().resize_(0)
        self._count_references(self.sums)

    def _build_main(self) -> None:
        numel, dtype = self.cuts.numel(self.placements.main_grads), self.dtypes.grads
        self._main = self.memory.unmoved(numel, dtype, on_host=self.is_offloaded)
        self.main_shards = self.cuts.split_own(self._main)
        self._count_references(self._main)

    def _count_references(self, main: Tensor) -> None:
        self.main_storage: int = StorageWeakRef(main.untyped_storage()).cdata
        self.own_references = references_to(self.main_storage)

    def renew(self) -> None:
        """Leave the memory of main gradients to whoever keeps views of it. Raises RuntimeError for a user buffer."""
        if self._main is not None:
            self._build_main()
            return
        if self.memory.registers:
            raise RuntimeError(
                f"views of gradients of bucket {self.name} are kept beyond zero_grad(), and user buffers (nccl_ub) must"
                " stay where they are: keep copies, parameter.grad.clone()"
            )
        unwritten = self._unwritten
        self._build_sums()
        self.allocate_sums()
        self._unwritten = unwritten

    # -- autograd's side -----------------------------------------------------------------------------------------

    @property
    def arriving(self) -> torch.dtype:
        return self.dtypes.wire if self.is_reduced and not self.plan.integers else self.dtypes.grads

    @by_engine
    def expect(self, *, waits: bool | None = None) -> None:
        """Set the dtype of gradients to come. waits: first ones may wait, in their own dtype; None: as before."""
        self._waits = self._waits if waits is None else waits and self.first_may_wait
        arriving = self.arriving
        for param in self.params:
            expected = param.dtype if self._waits and not isinstance(param, DTensor) else arriving
            if grad_of(param) is None and param.grad_dtype != expected:
                param.grad_dtype = expected

    @by_engine
    def prepare(self) -> None:
        if not self.is_prepared:
            self._view(self.memory.take(self.layout.bucket_numel, self.arriving))
            self._has_gaps = True
            if not self._waits:
                self.copy_in_waiting()
        for index, param in enumerate(self.params if not self.concat else ()):
            if grad_of(param) is not None or index not in self._unwritten:
                self.copy_in(index)
        self.expect()

    @property
    def is_copied(self) -> bool:
        return not self.is_in_place or self.dtypes.wire != self.dtypes.grads

    @property
    def is_prepared(self) -> bool:
        return self.concat or self.bucket is not None

    def _view(self, bucket: Tensor) -> None:
        self.bucket = bucket
        self._views = views_of(bucket, self.layout)
        self._unwritten = set(range(len(self.params)))

    def accumulate(self, index: int) -> None:
        """After autograd accumulated into a parameter. Call it from functions marked `by_engine`."""
        self.arrived.add(index)
        if index in self._waiting:  # it came before, and what comes now is added to that in the bucket's dtype
            self.copy_in_waiting(but=index)
        param = self.params[index]
        waits = self._waits and index in self._unwritten and not isinstance(param, DTensor)
        if waits and (gradient := grad_of(param)) is not None:
            self._waiting[index] = gradient.detach()
            put_grad(param, None)
        else:
            self.copy_in(index)

    @by_engine
    def copy_in_waiting(self, but: int | None = None) -> None:
        """but: a parameter whose second gradient stays where it is."""
        waiting, self._waiting = self._waiting, {}
        has_gaps, self._has_gaps = self._has_gaps, False
        gaps = [self.bucket[b:e] for b, e in self.layout.gaps] if has_gaps and self.bucket is not None else []
        if not waiting and not gaps:
            return
        came = list(waiting.values())
        like, most = (came or gaps)[0], max((gap.numel() for gap in gaps), default=0)
        if self._blank is None or self._blank.dtype != like.dtype or self._blank.numel() < most:
            self._blank = like.new_zeros(most)
        zeros = [self._blank[: gap.numel()] for gap in gaps]  # which one launch copies beside the gradients
        copy_together([*(self._views[index] for index in waiting), *gaps], [*came, *zeros])
        self._unwritten -= waiting.keys()
        for index in waiting:
            if index != but:
                self.copy_in(index)

    def open_gaps(self) -> None:
        """Zero the gaps again before the next reduction: a factor that is not finite has spoiled them."""
        self._has_gaps |= self.is_in_place

    def copy_in(self, index: int) -> None:
        if self.concat:
            return
        param, view, is_there = self.params[index], self._views[index], False
        early = grad_of(param)
        if isinstance(param, DTensor):  # it has no `.grad` but a DTensor: what came moves
            early = None if early is None else gradient_here(param, early)
            put_grad(param, None)
        elif early is not None and early.data_ptr() == view.data_ptr() and early.dtype == view.dtype:
            is_there = True
        else:
            if param.grad_dtype != view.dtype:
                put_grad(param, None)
                param.grad_dtype = view.dtype
            put_grad(param, view)
        if not is_there and index in self._unwritten:
            view.zero_() if early is None else view.copy_(early)
        elif not is_there and early is not None:
            view.add_(early)
        self._unwritten.discard(index)

    def settle(self) -> None:
        self.copy_in_waiting()
        for index in self._unwritten:
            self._views[index].zero_()
        self._unwritten = set()

    @by_engine
    def drop(self) -> None:
        for param in self.params:
            put_grad(param, None)

    # -- the reductions' side ------------------------------------------------------------------------------------

    def take(self) -> Tensor:
        if self.concat:
            return self._concatenated()
        bucket = self.bucket
        assert bucket is not None
        self.settle()
        if not self.is_in_place:
            self.bucket, self._views = None, []
            self.drop()
        return bucket

    @by_engine
    def _concatenated(self) -> Tensor:
        bucket = self.memory.take(self.layout.bucket_numel, self.arriving)
        bucket.zero_()
        for view, param in zip(views_of(bucket, self.layout), self.params, strict=True):
            if (gradient := grad_of(param)) is not None:
                view.copy_(gradient_here(param, gradient))
        self.drop()
        return bucket

    def allocate_sums(self) -> None:
        if self.is_reduced and not self.has_sums:
            with self.memory.allocating():  # the outer axis moves them
                self.sums.untyped_storage().resize_(self.sums.numel() * self.sums.itemsize)

    @property
    def has_sums(self) -> bool:
        return self.sums.untyped_storage().size() > 0

    def settle_sums(self) -> None:
        """A step had no backward: its gradients are zeros."""
        self.settle()
        if not self.is_in_place:
            self.allocate_sums()
            self.sums.zero_()
        if self._main is not None:  # which keeps the last step's until the next one is finished
            self._main.zero_()

    def forget(self) -> None:
        self.discard()
        if self.is_in_place:
            self._unwritten = set(range(len(self.params)))
            self.drop()
        elif self.is_reduced:
            self.sums.untyped_storage().resize_(0)
        self.arrived, self.unused = set(), frozenset()

    def forget_one(self, index: int) -> None:
        self.arrived.discard(index)
        put_grad(self.params[index], None)
        self._waiting.pop(index, None)
        if self.bucket is not None:
            self._unwritten.add(index)
        if not self.is_in_place and self.has_sums:
            self.cuts.inner_slice(self.layout.slots[index]).of(self.inner_shards).zero_()

    def discard(self) -> None:
        self._waiting = {}
        if self.is_in_place:
            return
        self.drop()
        if self.bucket is not None:
            self.memory.free(self.take())

    def kept(self) -> list[tuple[str, Tensor, On]]:
        """Roles, tensors and placements of all that stays until a step's gradients are forgotten."""
        if self._main is None:
            return [("main_grads", self.sums, self.placements.accumulated_grads)]
        return [
            ("main_grads", self._main, self.placements.main_grads),
            ("gradient_sums", self.sums, self.placements.accumulated_grads),
        ]
