"""Lets megatron-fsdp run where there is no CUDA: a synchronous stand-in for its streams and its NCCL-only calls.

The package is written for CUDA alone. `install` gives its modules, and nothing else, another `torch`: a thin face over
the real one in which the few names that need a device are replaced. Torch itself is left as it is, so that meters, the
other engines and the rest of the process never see the layer, whatever runs in it later.

What the layer changes, and what that means for a number measured on a CPU:

1. Streams and events do nothing: the one thread runs everything in the order of issue. On a GPU the package orders the
   same operations by events; a result that differs there is a missing event, which a CPU cannot show.
2. `all_gather_into_tensor`, `reduce_scatter_tensor` and `all_reduce` return when they are done. gloo works in threads
   of its own and the package frees buffers in stream order, so that a pending one would read freed memory. Nothing
   overlaps, and times say nothing of a GPU.
3. Collectives of one unit are issued one by one: gloo cannot coalesce them. A meter sees the same bytes in more calls.
4. `gradient_reduce_div_fusion=False`: gradients are multiplied by 1 / DP before the sum instead of inside it
   (PREMUL_SUM is NCCL's). Both round each product once, in the wire's dtype; bf16 takes this way on GPUs too.
5. Buffers and checks that ask for the current CUDA device get the CPU.

Layout, buffers, hooks, the order of collectives, dtypes, scaling and the optimizer are the package's own code. So what
is wrong here by more than rounding is wrong on a GPU too, unless it hangs on the order of streams. Rounding carries
over for fp32. For 16-bit wires it does not: gloo adds in the wire's dtype at every hop, where NCCL may keep fp32.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
"""Collectives that the package may leave in flight."""


def install() -> None:
    """Patch the package's modules for the rest of the process; idempotent.

    For ranks on a CPU, whether or not this machine has a GPU. Raises `ModuleNotFoundError`: megatron-fsdp is not
    installed.
    """
    names = ("megatron_fsdp", "param_and_grad_buffer", "fully_shard", "uneven_dtensor", "utils")
    modules: list[Any] = [import_module(f"megatron_fsdp.{name}") for name in names]
    engine, buffers, entry, uneven, utils = modules
    if isinstance(engine.torch, _Face):
        return
    streams = _Face(
        torch.cuda,
        Stream=_Stream,
        stream=lambda _stream: nullcontext(),
        current_stream=_Stream,
        current_device=lambda: 0,
        synchronize=lambda: None,
        empty_cache=lambda: None,
    )
    engine.torch = _Face(torch, cuda=streams, device=lambda _name: CPU)  # "cuda:0" is where the module already is
    collectives = _Face(dist, **{name: _synchronous(getattr(dist, name)) for name in COLLECTIVES})
    buffers.torch = _Face(torch, cuda=streams, distributed=collectives)
    buffers._coalescing_manager = lambda *_, **__: nullcontext(_Done())
    uneven.torch = _Face(torch, tensor=_already_there)
    utils.torch = _Face(torch, cuda=_Face(torch.cuda, current_device=lambda: CPU))
    entry.DistributedDataParallelConfig = functools.partial(
        entry.DistributedDataParallelConfig, gradient_reduce_div_fusion=False
    )


class _Face:
    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Done:
    def wait(self, *_: object) -> bool:
        return True


class _Stream:
    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, _stream: _Stream) -> None: ...

    def record_event(self) -> _Done:
        return _Done()


def _synchronous(collective: Callable[..., Any]) -> Callable[..., _Done]:
    @functools.wraps(collective)
    def issue(*args: Any, async_op: bool = False, **options: Any) -> _Done:
        with warnings.catch_warnings():
            # torch 2.13 renamed two of the three; the names are the package's choice.
            warnings.filterwarnings("ignore", category=FutureWarning)
            collective(*args, async_op=False, **options)
        return _Done()

    return issue


def _already_there(*args: Any, **options: Any) -> Any:
    return SimpleNamespace(cuda=functools.partial(torch.tensor, *args, **options))
