"""One bucket's gradients: where autograd leaves them, where sums of them wait, and what the optimizer gets.

[Note: First gradients] Flat gradient storage is not zeroed for autograd to add to: a parameter has no `.grad` until its
first gradient of a bucket has arrived, which is copied over whatever its place held. Later ones are added in place.
What never came is filled with zeros when the bucket is handed over. That saves a pass of writing and one of reading
over all gradients.

[Note: Where sums wait] Three things may differ: the *unreduced* bucket that a backward fills, the *accumulated* sums
over microbatches (and ranks), and the *main* gradients of the optimizer. How each lies is read from the bucket's
`Placements`. Where unreduced and accumulated gradients lie alike, in one dtype, autograd writes into the sums
themselves (`Accumulation.in_place`); where they lie alike and differ in their numbers or their storage (int64 under
numerics=exact, one tensor a parameter under grad_buffer=concat), each backward's are added to the sums on this rank
(`added`); else every backward's are reduced into the sums, from a temporary bucket (`reduced`). Main gradients are this
rank's own part of the sums, or decoded from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch._C import _storage_Use_Count

from harness.fsdp.comm.together import copy_together, zero_together
from harness.fsdp.policy import Dtypes
from harness.fsdp.storage.arrivals import ADDED, adopt, may_wait
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.parameter_access import by_engine, grad_of, put_grad
from harness.fsdp.storage.parameter_views import views_of
from harness.fsdp.storage.placement import SHARD, Placements
from harness.fsdp.tensor_parallel.parameters import gradient_here
from harness.fsdp.vocabulary import GradBuffer


class Accumulation(Enum):
    """How a backward's gradients come into the sums over microbatches; see [Note: Where sums wait]."""

    in_place = "autograd adds to the sums themselves"
    added = "added to the sums on this rank, and reduced once a step"
    reduced = "every backward's are reduced over the inner axis into the sums"


@dataclass(frozen=True)
class GradientPlan:
    """What all buckets of a model share about gradients.

    unsharded: microbatches under `no_sync` wait unreduced where the strategy splits gradients. integers: sums are int64
    (see `harness.fsdp.comm.fixed_point`). offload: where main gradients lie, apart from the sums.
    """

    memory: BucketMemory
    buffer: GradBuffer = GradBuffer.flat
    unsharded: bool = False
    integers: bool = False
    offload: torch.device | None = None

    def accumulation(self, placements: Placements) -> Accumulation:
        """How gradients that lie so are accumulated."""
        if not placements.accumulates_locally:
            return Accumulation.reduced
        alike = not self.integers and self.buffer is GradBuffer.flat
        return Accumulation.in_place if alike else Accumulation.added


class Gradients:
    """Gradients of one bucket of trained parameters.

    kept_by_engine: hooks look at it through weak references.

    Args:
        name: of the bucket, for messages.
        params: its parameters.
        cuts: how its tensors are cut.
        placements: how its buffers lie.
        dtypes: of the bucket.
        plan: how gradients wait.
    """

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
        self.name = name
        self.params = params
        self.cuts = cuts
        self.layout = cuts.layout
        self.dtypes = dtypes
        self.plan = plan
        self.memory = plan.memory
        self.placements = placements
        self.accumulation = plan.accumulation(placements)
        self.is_in_place = self.accumulation is Accumulation.in_place
        """Whether autograd adds to the sums themselves."""
        self.concat = plan.buffer is GradBuffer.concat
        self.first_may_wait = not self.concat
        """True if first gradients may wait in the dtype of their weight."""
        self.bucket: Tensor | None = None
        """Unreduced gradients, where there are any."""
        self.came: set[int] = set()
        """Parameters that this rank had a gradient of since gradients were last forgotten."""
        self.unused: frozenset[int] = frozenset()
        """Parameters without a gradient on any rank, once a step's gradients are finished, as far as this rank has rows
        of them; by their place in the bucket."""
        self._unwritten: set[int] = set()
        self._views: list[Tensor] = []
        self._waits = False
        self._gaps: list[Tensor] = []
        """What lies between parameters in the bucket, until it is made zeros."""
        self._blank: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}
        """First gradients that are not in the bucket yet, by parameter; see [Note: Waiting for one another]."""
        self._build()
        self.drop()

    def _build(self) -> None:
        lies = self.placements.accumulated_grads
        held = torch.int64 if self.plan.integers else self.dtypes.grads
        self._use_sums(self.memory.persistent(self.cuts.numel(lies), held))
        self._main: Tensor | None = None
        is_cut = SHARD in self.cuts.own
        if self.plan.integers or self.is_offloaded or (is_cut and self.memory.registers):
            self._build_main()
        self._count()

    def _count(self) -> None:
        held = self.sums if self._main is None else self._main
        self.main_storage: int = held.untyped_storage()._cdata
        """Where main gradients lie, as `_storage_Use_Count` takes it."""
        self.own_references = _storage_Use_Count(self.main_storage)
        """How many of the tensors in it are kept here."""

    def _use_sums(self, sums: Tensor) -> None:
        self.sums = sums
        self.inner_shards = self.cuts.inner_shards_of(sums, self.placements.accumulated_grads)
        self.own_shards = self.cuts.own_shards(self.inner_shards)
        """This rank's sums, once all axes are reduced."""
        self.main_shards = self.own_shards
        """What the optimizer gets; a segment each."""
        if self.is_in_place:
            self._view(sums)
        elif self.accumulation is Accumulation.reduced:
            sums.untyped_storage().resize_(0)

    def _build_main(self) -> None:
        numel, dtype = self.cuts.numel(self.placements.main_grads), self.dtypes.grads
        if self.is_offloaded:
            self._main = self.memory.on_host(numel, dtype)
        else:
            self._main = torch.zeros(numel, dtype=dtype, device=self.memory.device)
        self.main_shards = self.cuts.split_own(self._main)

    def renew(self) -> None:
        """Leave the memory of main gradients, with what it holds, to whoever keeps views of it.

        Raises:
            RuntimeError: it is registered as a user buffer, which all ranks would have to register anew.
        """
        if self._main is not None:
            self._build_main()
            self._count()
            return
        if self.memory.registers:
            raise RuntimeError(
                f"views of gradients of bucket {self.name} are kept beyond zero_grad(), and user buffers (nccl_ub) must"
                " stay where they are: keep copies, parameter.grad.clone()"
            )
        unwritten = self._unwritten
        self._use_sums(self.memory.persistent(self.sums.numel(), self.sums.dtype))
        self.claim()
        self._unwritten = unwritten
        self._count()

    # -- autograd's side -----------------------------------------------------------------------------------------

    @property
    def arriving(self) -> torch.dtype:
        """The dtype autograd brings gradients in."""
        reduces = self.accumulation is Accumulation.reduced
        keeps = not reduces or self.plan.unsharded or self.plan.integers
        return self.dtypes.grads if keeps else self.dtypes.wire

    @by_engine
    def expect(self, *, waits: bool | None = None) -> None:
        """Have autograd bring gradients in the dtype they wait in; storage is found when the first one arrives.

        waits: whether first gradients may wait for the others (None: as before), in the dtype they are made in.
        """
        self._waits = self._waits if waits is None else waits and self.first_may_wait
        arriving = self.arriving
        for param in self.params:
            expected = param.dtype if self._waits and may_wait(param) else arriving
            if grad_of(param) is None and param.grad_dtype != expected:
                param.grad_dtype = expected

    @by_engine
    def prepare(self) -> None:
        """Find flat storage for the gradients of this backward, and bring in those that are here already."""
        if self.concat:
            self._unwritten -= {index for index, param in enumerate(self.params) if grad_of(param) is not None}
            self.expect()
            return
        if self.bucket is None:
            bucket = self.memory.take(self.layout.bucket_numel, self.arriving)
            self._gaps = [bucket[begin:end] for begin, end in self.layout.gaps]
            if not self._waits:
                self._close_gaps()
            self._view(bucket)
        for index, param in enumerate(self.params):
            if grad_of(param) is not None or index not in self._unwritten:
                self.bring(index)
        self.expect()

    @property
    def is_offloaded(self) -> bool:
        """Whether main gradients lie in the host's memory, and the model's device is another."""
        return self.plan.offload is not None

    @property
    def is_copied(self) -> bool:
        """Whether what is sent takes memory beside the sums."""
        return not self.is_in_place or self.dtypes.wire != self.dtypes.grads

    @property
    def is_prepared(self) -> bool:
        """Whether gradients have a place to go."""
        return self.concat or self.bucket is not None

    def _view(self, bucket: Tensor) -> None:
        """Let `bucket` take gradients, whatever it holds now; see [Note: First gradients]."""
        self.bucket = bucket
        self._views = views_of(bucket, self.layout)
        self._unwritten = set(range(len(self.params)))

    def adopt(self, index: int) -> None:
        """After autograd accumulated into parameter `index`: bring a gradient that landed elsewhere into the bucket.
        For functions that are marked `by_engine`."""
        self.came.add(index)
        if not self._waits and not self._waiting:
            self.bring(index)
            return
        param = self.params[index]
        if index in self._waiting:  # it came before, and what comes now is added to that in the bucket's dtype
            self._bring_waiting(but=index)
        gradient = grad_of(param)
        if not self._waits or not may_wait(param) or index not in self._unwritten or gradient is None:
            self.bring(index)
            return
        self._waiting[index] = gradient.detach()
        put_grad(param, None)

    @by_engine
    def bring_waiting(self) -> None:
        """Move what waits into the bucket, in one operation."""
        self._bring_waiting()

    def _bring_waiting(self, but: int | None = None) -> None:
        """but: a parameter that has another gradient meanwhile, which stays where it is."""
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            self._close_gaps()
            return
        gaps, self._gaps = self._gaps, []
        came = list(waiting.values())
        copy_together([*(self._views[index] for index in waiting), *gaps], [*came, *self._zeros_for(gaps, came[0])])
        self._unwritten -= waiting.keys()
        for index in waiting:
            if index != but:
                self.bring(index)

    def _close_gaps(self) -> None:
        """Make zeros of what lies between parameters in a bucket just taken: it is reduced with them."""
        gaps, self._gaps = self._gaps, []
        if gaps:
            zero_together(gaps)

    def open_gaps(self) -> None:
        """Sums were multiplied by what is no number, which leaves none of zeros either: make zeros of what lies between
        parameters once more, before they are reduced next."""
        if self.is_in_place:
            self._gaps = [self.sums[begin:end] for begin, end in self.layout.gaps]

    def _zeros_for(self, gaps: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Zeros for gaps, in a gradient's dtype: what is copied together has one."""
        most = max((gap.numel() for gap in gaps), default=0)
        if self._blank is None or self._blank.dtype != like.dtype or self._blank.numel() < most:
            self._blank = like.new_zeros(most)
        return [self._blank[: gap.numel()] for gap in gaps]

    def bring(self, index: int) -> None:
        """Let the gradient of parameter `index` lie in the bucket, wherever it landed."""
        param = self.params[index]
        if getattr(param, ADDED, False):
            put_grad(param, self._views[index])
            setattr(param, ADDED, False)
        elif not self.concat:
            adopt(param, self._views[index], fresh=index in self._unwritten)
        self._unwritten.discard(index)

    @by_engine
    def written_by(self, index: int) -> Tensor:
        """The place of parameter `index`, for a kernel that adds to it itself; zeros where nothing has come yet."""
        self.prepare()
        self._bring_waiting()
        self.came.add(index)
        if index in self._unwritten:
            self._views[index].zero_()
            self._unwritten.discard(index)
        put_grad(self.params[index], None)  # what autograd brings goes elsewhere first: it may be a stand-in
        return self._views[index]

    def settle(self) -> None:
        """Fill the places of parameters that no gradient came for with zeros."""
        self.bring_waiting()
        self._fill_unwritten()

    def _fill_unwritten(self) -> None:
        if not self.concat:
            for index in self._unwritten:
                self._views[index].zero_()
            self._unwritten = set()

    @by_engine
    def drop(self) -> None:
        """Set every parameter's `.grad` to None."""
        for param in self.params:
            put_grad(param, None)

    # -- the reductions' side ------------------------------------------------------------------------------------

    def send_as(self, dtypes: Dtypes) -> None:
        """See `Bucket.send_as`."""
        self.dtypes = dtypes

    def take(self) -> Tensor:
        """Hand over the unreduced gradients; parameters lose `.grad` unless that lies in the sums themselves."""
        if self.concat:
            return self._concatenated()
        bucket = self.bucket
        if bucket is None:
            raise RuntimeError(f"bucket {self.name} has no gradients to reduce")
        self.settle()
        if not self.is_in_place:
            self.bucket = None
            self._views = []
            self.drop()
        return bucket

    @by_engine
    def _concatenated(self) -> Tensor:
        """Gradients copied together: for as long as that takes they exist twice."""
        bucket = self.memory.take(self.layout.bucket_numel, self.arriving)
        bucket.zero_()
        for view, param in zip(views_of(bucket, self.layout), self.params, strict=True):
            gradient = grad_of(param)
            if gradient is not None:
                view.copy_(gradient_here(param, gradient))
        self.drop()
        return bucket

    def claim(self) -> None:
        """Give the sums storage for what is to be put there, unless they have it."""
        if self.accumulation is Accumulation.reduced and not self.has_sums:
            with self.memory.allocating():  # the outer axis moves them
                self.sums.untyped_storage().resize_(self.sums.numel() * self.sums.itemsize)

    @property
    def has_sums(self) -> bool:
        """Whether the sums have storage: a shard of them has none from `forget` to the next `claim`."""
        return self.sums.untyped_storage().size() > 0

    def begin_late(self) -> None:
        """The step has begun without this bucket: no backward of it has brought a gradient so far."""
        if not self.is_in_place:
            self.claim()
            self.sums.zero_()

    def settle_sums(self) -> None:
        """Let the gradients of a step without a backward be zeros."""
        self._fill_unwritten()
        self._close_gaps()
        if not self.is_in_place:
            self.claim()
            self.sums.zero_()
        if self._main is not None:  # which keeps the last step's until the next one is finished
            self._main.zero_()

    def forget(self) -> None:
        """Forget all gradients; a shard of them gives its memory back. For functions that are marked `by_engine`."""
        self._waiting = {}
        if self.is_in_place:
            self._unwritten = set(range(len(self.params)))
        elif self.accumulation is Accumulation.reduced:
            self.sums.untyped_storage().resize_(0)
        if self.bucket is not None and not self.is_in_place:
            self.discard()
        self.came, self.unused = set(), frozenset()
        for param in self.params:  # a backward that was refused may have left one; views come back with the next one
            put_grad(param, None)

    def forget_one(self, index: int) -> None:
        """Forget what has come of parameter `index`, before gradients are finished."""
        self.came.discard(index)
        put_grad(self.params[index], None)
        self._waiting.pop(index, None)
        if self.bucket is not None:
            self._unwritten.add(index)
        if not self.is_in_place and self.has_sums:
            slot = self.layout.slots[index]
            local = self.cuts.inner_slice(slot)
            self.inner_shards[local.segment][local.offset : local.offset + local.numel].zero_()

    def discard(self) -> None:
        """Drop what a backward left unreduced in a temporary bucket."""
        self._waiting = {}
        if self.is_in_place:
            return
        self.drop()
        if self.bucket is not None:
            self.memory.free(self.take())

    def bytes_kept(self) -> dict[str, int]:
        """Bytes of parameters' main gradients, of sums where they lie apart from those, and of padding."""
        numel = self.cuts.param_numel(self.placements.accumulated_grads)
        sums, padding = numel * self.sums.itemsize, (self.sums.numel() - numel) * self.sums.itemsize
        if self._main is None:
            return {"main_grads": sums, "padding": padding}
        main = self.cuts.param_numel(self.placements.main_grads) * self._main.itemsize
        return {"main_grads": main, "gradient_sums": sums, "padding": padding + self._main.nbytes - main}


MAIN_GRADIENT = "get_main_grad"
"""Attribute of a parameter by which a kernel of Megatron's protocol finds where to add its gradient."""
