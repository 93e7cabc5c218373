"""Whether tensor-parallel ranks bring the same gradient for what each of them has whole; asked in the first update.

[Note: Copies that part] A parameter that no plan cuts is updated by each tensor-parallel rank for itself. That is right
only where all of them see the same: one batch, one dropout, all heads and all positions. A program gets this wrong in
few ways (another batch on each rank; a norm inside a cut region that the plan does not name, so that each rank makes a
term of its gradient), and nothing fails: the copies part, a little more each step. So gradients of the first update
are compared, before any weight changes. Not their bits, which kernels may round otherwise on each rank, but a few sums:
two products with fixed waves, and the norm. They must agree to a sixteenth of the norm; half a sum, or other data, is
far beyond that. Gradients below a thousandth of the largest are not judged: some are zero but for rounding. It takes an
all-reduce of four numbers a parameter over the data-parallel ranks, and one of three over the tensor-parallel, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.fsdp.comm.mesh import Meshes
from harness.fsdp.storage.bucket import Bucket

CLOSE = 1 / 16
"""How far sums may lie apart, as a part of the norm."""
SMALL = 1e-3
"""Norms of this part of the largest one are rounding, as far as anybody knows."""
WAVES = (0.7390851, 2.2360679)
"""Radians an element."""
BLOCK = 1 << 20
"""Elements in fp64 at a time."""


class CopiesPart(RuntimeError):
    """Tensor-parallel ranks have different gradients for a parameter that each of them has whole."""


class CopiedGradients:
    """Compares, once, gradients of trained parameters that several tensor-parallel ranks have whole.

    Args:
        buckets: those with gradients, as they are when it is asked, in the same order on all ranks.
        meshes: of the model, with a tensor-parallel axis.
    """

    def __init__(self, buckets: Callable[[], Sequence[Bucket]], meshes: Meshes) -> None:
        self._buckets, self._meshes = buckets, meshes
        self._is_done = meshes.tensor is None or meshes.tensor.size == 1

    def check(self) -> None:
        """The gradients of an update are finished. *Collective* until there were some that are finite.

        Raises:
            CopiesPart: on all ranks of the tensor-parallel axis, and wherever its data is.
        """
        if self._is_done:
            return
        names, sums = self._sums()
        if not names:
            self._is_done = True
            return
        tensor = self._meshes.tensor
        assert tensor is not None
        table = sums.new_zeros(tensor.size, *sums.shape)
        table[tensor.rank] = sums
        table = tensor.sum_scalars(table, "gradients of copies").cpu()
        norms = table[..., -1]
        self._is_done = bool((norms.isfinite() & (norms > 0)).any())
        largest = norms.nan_to_num(0.0, 0.0).amax(0)
        apart = (table.amax(0) - table.amin(0)).amax(-1) > CLOSE * largest  # never so where one is NaN
        apart &= (largest > SMALL * largest.max()) & norms.isfinite().all(0)
        if bool(apart.any()):
            self._is_done = False
            places = apart.nonzero().flatten().tolist()
            raise CopiesPart(_describe([names[place] for place in places], norms[:, places[0]].tolist()))

    @torch.no_grad()
    def _sums(self) -> tuple[list[str], Tensor]:
        """Each copied parameter, and of its whole gradient the sums and the norm: fp64 [parameters, waves + 1]."""
        names, found = [], []
        for mesh in self._meshes:
            copied = [
                (slot.spec.name, slot.spec.numel, *_of_rows(bucket, place))
                for bucket in self._buckets()
                if bucket.context.mesh is mesh
                for place, slot in enumerate(bucket.layout.slots)
                if bucket.portions[slot.spec.name].is_copied
            ]
            if copied:
                sums = torch.stack([torch.cat([sums, sums.new_tensor([count])]) for _, _, count, sums in copied])
                sums = mesh.everyone.sum_scalars(sums, "gradients of copies")
                wholes = sums.new_tensor([max(numel, 1) for _, numel, _, _ in copied])
                sums = sums[:, :-1] / (sums[:, -1:] / wholes[:, None]).clamp(min=1.0)  # as often as it lies there
                sums[:, -1].sqrt_()
                names += [name for name, *_ in copied]
                found.append(sums)
        device = self._meshes.dense.everyone.runtime.device
        return names, torch.cat(found) if found else torch.zeros(0, len(WAVES) + 1, dtype=torch.float64, device=device)


def _of_rows(bucket: Bucket, place: int) -> tuple[int, Tensor]:
    """How many elements of a parameter's gradient lie here, and their products with waves and with themselves."""
    slot = bucket.layout.slots[place]
    local = bucket.layout.local_slice(slot, bucket.cuts.layout_rank)
    shard = bucket.grad_shards[slot.segment].detach()
    sums = torch.zeros(len(WAVES) + 1, dtype=torch.float64, device=shard.device)
    for begin in range(0, local.numel, BLOCK):
        size = min(BLOCK, local.numel - begin)
        part = shard[local.offset + begin : local.offset + begin + size].double()
        first = local.start + begin
        ramp = torch.arange(first, first + size, dtype=torch.float64, device=shard.device)
        sums += torch.stack([*((ramp * wave).cos().dot(part) for wave in WAVES), part.dot(part)])
    return local.numel, sums


def _describe(names: list[str], norms: list[float]) -> str:
    others = f" (and of {len(names) - 1} more)" if len(names) > 1 else ""
    told = ", ".join(f"{norm:.3g}" for norm in norms)
    return (
        f"gradients of {names[0]}{others} differ between tensor-parallel ranks, which all have it whole: its norms"
        f" are {told}. Each rank would update its copy in its own way. Either the ranks of tp_dim did not see the same:"
        " give them the same batch, and seed dropout alike where activations are not cut. Or its module sees this"
        " rank's heads or positions only, and its gradient is a term of a sum: name it in the plan, with"
        " SequenceParallel() say, whose gradients are summed. No weight was changed; zero_grad() forgets the step"
    )
