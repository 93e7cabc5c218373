"""One process that sees the whole global batch: in fp64, what every other engine is held against."""

from __future__ import annotations

from torch import Tensor

from harness.config.derived import global_microbatches
from harness.config.schema import Config
from harness.engines.protocol import Microbatch, Ranks, Seen, Workload
from harness.engines.replicated import ReplicatedEngine


class SingleEngine(ReplicatedEngine):
    """Plain torch: backward of each microbatch in global order, sums in the main dtype, one division by M."""

    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        """Build the model.

        Raises:
            ValueError: there is more than one rank.
        """
        if ranks.world_size != 1:
            raise ValueError(f"engine=single is one process, mesh.world_size={ranks.world_size}: set mesh.world_size=1")
        super().__init__(workload, config, ranks, fused=False)
        self.num_microbatches = 0

    def seen(self) -> Seen:
        """The user's module; its losses are unscaled."""
        return Seen(self.model, global_microbatches(self.config), self.compute_dtype)

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        """Add one microbatch's gradients; after the step's last one they are the mean."""
        loss = self.workload.loss(self.model, batch)
        loss.backward()
        self.num_microbatches += 1
        self.reduced = last
        if last:
            for _, gradient in self._gradients():
                gradient.div_(self.num_microbatches)
            self.num_microbatches = 0
        return loss.detach()
