"""What one rank of a tensor-parallel axis has of a parameter: all of it, or its cut of one dimension. Torch-free.

[Note: Under tensor parallelism] A plan (`torch.distributed.tensor.parallel.parallelize_module`, or modules that cut
themselves) comes first, and the engine shards what it left: rows of this rank's *portion*, over the data-parallel ranks
that have the same portion. So a bucket, its layout and its collectives know nothing of the plan. Four things do. Values
that come whole are cut to the portion, and made whole of portions where they are handed out (`harness.fsdp.state`).
What every rank of the axis has whole counts once in a norm, begins alike and must stay alike
(`harness.fsdp.guards.replicas`). What one rank finds, the ranks of the axis must hear of too
(`harness.fsdp.comm.crossed`). And autograd may bring such a parameter the term of a sum that this rank made, which is
summed over the axis before it is anybody's gradient (`harness.fsdp.tensor_parallel.parameters`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Portion:
    """The portion of a parameter that one rank of the tensor-parallel axis holds.

    shape: shape of the whole parameter. dim: the dimension that is split, as by `torch.chunk` (torch's `Shard(dim)`);
    None if every rank holds the whole parameter. rank, size: this rank's place on the axis, and its number of ranks.
    """

    shape: Shape
    dim: int | None = None
    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the whole parameter."""
        return self.dim is None or self.size == 1

    @property
    def is_copied(self) -> bool:
        """Whether several ranks of the axis have the same elements."""
        return self.dim is None and self.size > 1

    @property
    def is_counted_here(self) -> bool:
        """Whether this rank counts its elements where each counts once: of copies, those of the first rank."""
        return self.rank == 0 or not self.is_copied

    def span(self, rank: int | None = None) -> tuple[int, int]:
        """Begin and end of a rank's cut of the dimension; of this rank's own by default.

        Raises:
            ValueError: nothing is cut.
        """
        if self.dim is None:
            raise ValueError(f"a parameter of shape {self.shape} that is not cut has no span")
        length = self.shape[self.dim]
        width = -(-length // self.size)
        begin = min((self.rank if rank is None else rank) * width, length)
        return begin, min(begin + width, length)

    @property
    def here(self) -> Shape:
        """Shape of this rank's portion."""
        if self.dim is None:
            return self.shape
        begin, end = self.span()
        return (*self.shape[: self.dim], end - begin, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Elements of this rank's portion."""
        return prod(self.here)

    @property
    def offsets(self) -> Shape:
        """Where this rank's portion begins in the whole."""
        begin = 0 if self.dim is None else self.span()[0]
        return tuple(begin if dim == self.dim else 0 for dim in range(len(self.shape)))
