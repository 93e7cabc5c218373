"""Where there is no GPU: what megatron-fsdp asks of CUDA and NCCL, done at once on the CPU. Unused on a GPU."""

import contextlib
import functools
import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)  # of a CUDA device that is not the current one


class Done:
    """A work handle or an event that is over."""

    def wait(self, *_):
        return True


class Stream:
    """Holds nothing."""

    def __init__(self, *_, **__): ...

    def wait_stream(self, _): ...

    def record_event(self):
        return Done()


def synchronous(collective):
    def issue(*args, async_op=False, **options):
        collective(*args, **options)
        return Done()

    return issue


torch.cuda.Stream = torch.cuda.current_stream = Stream
torch.cuda.stream = lambda _: contextlib.nullcontext()
torch.cuda.current_device = lambda: 0
torch.cuda.empty_cache = lambda: None
torch.Tensor.cuda = lambda tensor: tensor
for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
    setattr(dist, name, synchronous(getattr(dist, name)))


def leave():
    """End this rank at once: the package's hooks keep its groups alive, and gloo's threads with them.

    One that lets go of a tensor while the interpreter ends takes the process down with it ("terminate called without an
    active exception"): now and then, on a busy machine.
    """
    sys.stdout.flush()
    os._exit(0)


dist.destroy_process_group = leave  # the last line of every script's ranks

from megatron_fsdp import fully_shard, param_and_grad_buffer  # noqa: E402, F401

# The package exports a function under its module's name.
entry = sys.modules["megatron_fsdp.fully_shard"]
entry.DistributedDataParallelConfig = functools.partial(  # gloo has no PREMUL_SUM
    entry.DistributedDataParallelConfig, gradient_reduce_div_fusion=False
)
param_and_grad_buffer._coalescing_manager = lambda *_, **__: contextlib.nullcontext(Done())
