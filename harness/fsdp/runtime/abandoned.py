"""Collectives that a model leaves under way when nobody has it any more."""

from __future__ import annotations

from contextlib import suppress

from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.guards.watches import Watches
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.weights import Weights


def abandon(
    runtime: DeviceRuntime, reduce: ReducePipeline, gather: GatherPipeline, weights: Weights, watches: Watches
) -> None:
    """End what a model that was collected has under way, without waiting for other ranks.

    Python's collector comes to a model on each rank at another moment. A rank that waited there, for one whose model is
    not collected yet and that waits for this rank in its program, would wait for ever. On CUDA streams wait, and not
    the host. On a CPU nobody waits for a rank that has cancelled its part.
    """
    watches.close()
    with suppress(Exception):
        if runtime.has_streams:
            reduce.discard()
            gather.reshard_all()
            weights.wait()
        else:
            reduce.cancel()
            gather.cancel()
