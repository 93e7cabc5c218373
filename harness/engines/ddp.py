"""Torch's DistributedDataParallel, used as its users use it."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from harness.config.derived import microbatches_per_rank
from harness.config.schema import Config
from harness.engines.protocol import Microbatch, Ranks, Workload
from harness.engines.replicated import ReplicatedEngine


class DdpEngine(ReplicatedEngine):
    """Microbatches accumulate locally under `no_sync`; the last backward all-reduces buckets in the main dtype."""

    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        """Build and wrap the model.

        Raises:
            ValueError: gradients are to travel in another dtype than the main gradients', or as `ReplicatedEngine`.
        """
        if config.dtype.grad_comm is not config.dtype.main_grads:
            raise ValueError(
                f"engine=ddp sends gradients as they are stored: dtype.grad_comm={config.dtype.grad_comm.name}, "
                f"dtype.main_grads={config.dtype.main_grads.name}; make them equal or use engine=native"
            )
        super().__init__(workload, config, ranks, fused=True)
        self.microbatches_per_rank = microbatches_per_rank(config)
        with warnings.catch_warnings():
            # Deprecated in torch 2.13 for forward_sync_buffers, which 2.11 does not have.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            self.replica = DistributedDataParallel(
                self.model,
                device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
                broadcast_buffers=False,  # the rotary tables are computed alike on every rank
                init_sync=False,  # and so are the weights, from their names
                gradient_as_bucket_view=True,
            )

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        """One microbatch, its loss scaled by 1 / k; DDP itself divides by the number of ranks."""
        with nullcontext() if last else self.replica.no_sync():
            loss = self.workload.loss(self.replica, batch)
            (loss / self.microbatches_per_rank).backward()
        return loss.detach()
