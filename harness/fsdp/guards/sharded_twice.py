"""Other data-parallel engines around a sharded model, or a part of it, are refused.

Two engines would both reduce a gradient, or gather a weight. Every engine goes through the submodules of its module. So
the parts of a sharded model raise where a call that builds an engine asks for them. A module that is wrapped first and
sharded then is refused in the first forward with gradients.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_CONTRACT = ("torch.distributed._composable.contract", "wrapper")
_ENGINES = {
    ("torch.nn.parallel.distributed", "__init__"): "DistributedDataParallel",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "__init__"): "FullyShardedDataParallel",
    ("deepspeed.runtime.engine", "__init__"): "DeepSpeed",
}


def answer_other_engines(module: nn.Module, engine: Callable[[], object]) -> None:
    for part in module.modules():
        vars(part)["named_modules"] = partial(_named_modules, weakref.ref(part), engine)


def _named_modules(
    reference: weakref.ref[nn.Module],
    engine: Callable[[], object],
    memo: set[nn.Module] | None = None,
    prefix: str = "",
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Module]]:
    """The submodules. Of nested parts the outermost alone checks its caller."""
    part: Any = reference()
    caller = sys._getframe(1)
    held = caller.f_locals.get("self")
    is_within = memo is not None and isinstance(held, nn.Module) and "named_modules" in vars(held)
    if not is_within and engine():
        refuse_engine_at_work()
    return cast(Iterator[tuple[str, nn.Module]], type(part).named_modules(part, memo, prefix, remove_duplicate))


def refuse_engine_at_work() -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if name := _built_by(frame):
            _refuse(name)
        frame = frame.f_back


def _built_by(frame: FrameType) -> str:
    call = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    if call != _CONTRACT:
        return _ENGINES.get(call, "")
    name: str = frame.f_locals["func"].__name__
    return name if name in ("fully_shard", "replicate") else ""


def refuse_ddp_around(module: nn.Module) -> None:
    active = DistributedDataParallel._active_ddp_module
    if active is not None and any(part is module for part in active.module.modules()):
        _refuse("DistributedDataParallel")


def _refuse(engine: str) -> NoReturn:
    raise ValueError(
        f"{engine} around a model, or a part of one, that is sharded already: both would reduce its gradients, and"
        f" training would be wrong. Leave {engine} out and use the sharded model as it is (with accelerate: prepare the"
        " data loader, not model and optimizer); where it is a part of a larger model, shard the outermost module"
        " instead, and name what is gathered together in fsdp_unit_modules"
    )
