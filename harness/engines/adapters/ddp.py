"""Torch's DistributedDataParallel, as documented.

Microbatches accumulate locally in the main dtype under `no_sync`; the last backward all-reduces DDP's buckets. A wire
narrower than the main gradients is torch's own `bf16_compress_hook` or `fp16_compress_hook`: each bucket is cast to 16
bits, divided by the number of ranks there, summed by the backend in 16 bits, and cast back.

`find_unused_parameters` is on where the model may leave parameters unused, which otherwise ends the next forward in
"Expected to have finished reduction". It costs a walk over the graph and one more all-reduce a step, of 4 bytes a
parameter tensor. It is on under numerics=deterministic too: without it DDP rebuilds its buckets after the first step,
and a resumed run would not repeat the bits of one never stopped.

Limits, on torch 2.13: gradients have the dtype of the main weights; a wire of 16 bits goes with any of these, one of
more bits must be theirs. Rules refuse others. The compute dtype is cast before each forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from harness.config.schema import Config, Dtype, Numerics
from harness.engines.base import ReplicatedEngine
from harness.engines.protocol import Ranks, Workload

COMPRESSION: dict[Dtype, Callable[..., Any]] = {
    # In a lambda, because DDP refuses torch's hook by its *name* where there is no NCCL; gloo sums bf16 well enough.
    Dtype.bf16: lambda group, bucket: bf16_compress_hook(group, bucket),
    Dtype.fp16: fp16_compress_hook,
}


class DdpEngine(ReplicatedEngine):
    """Every rank has all weights, gradients and optimizer state."""

    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        super().__init__(workload, config, ranks, fused=True)
        with warnings.catch_warnings():
            # Deprecated in torch 2.13 for forward_sync_buffers, which 2.11 does not have.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            self.wrapped = replica = DistributedDataParallel(
                self.model,
                device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
                broadcast_buffers=False,  # the rotary tables are computed alike on every rank
                init_sync=False,  # and so are the weights, from their names
                gradient_as_bucket_view=True,
                find_unused_parameters=workload.may_leave_unused or config.numerics.mode is not Numerics.fast,
            )
        if config.dtype.grad_comm is not config.dtype.main_grads:
            replica.register_comm_hook(None, COMPRESSION[config.dtype.grad_comm])

    def _rhythm(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.wrapped, DistributedDataParallel)
        return nullcontext() if last else self.wrapped.no_sync()
