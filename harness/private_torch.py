"""Private names of torch that the engine, and what stands beside it, use.

torch may rename them at any time. Importing this needs none: one that is gone raises `MissingName` where it is used, or
a plain substitute takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor, Shard

NAMES: dict[str, Any] = {
    "_ddp_params_and_buffers_to_ignore": "a module inside DistributedDataParallel",
    "_parameters": nn.Module,
    "_execution_engine": torch.autograd.Variable,
    "_schema": "an aten operation",
    "_op_dispatcher": DTensor,  # as the next two before torch 2.12 alone
    "_propagate_op_sharding_dispatch_slow_path": "its dispatcher",
    "_custom_op_handlers": "its dispatcher",
    "_timeout": "a backend's options",
    "_dump_fr_trace_json": "torch._C._distributed_c10d",
}
"""Who has each name: a class or its objects, a module's path, or another thing in words."""


OVERRIDDEN = ("_apply", "_local_shard_size_and_offset")
"""Methods that torch calls of modules and placements."""


def fake_store() -> Any:
    """Store of process groups of the backend "fake", which have any number of ranks and move nothing."""
    return import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


class MissingName(RuntimeError):
    """torch has renamed, or removed, what the engine needs here."""


def _refuse(name: str) -> NoReturn:
    raise MissingName(f"torch {torch.__version__} has no {name} (harness/private_torch.py): use torch 2.11 to 2.13")


def _of(owner: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute of a class or of a module's path; if it is gone, `otherwise`, or a function that raises."""
    NAMES[name] = owner
    if isinstance(owner, str):
        try:
            owner = import_module(owner)
        except ImportError:
            owner = None
    found = getattr(owner, name, otherwise)
    return found if found is not None else lambda *_, **__: _refuse(name)


def _at(held: Any, name: str) -> Any:
    try:
        return getattr(held, name)
    except AttributeError:
        _refuse(name)


def _descriptor(owner: type, name: str, otherwise: Any = None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions of C that read and write an attribute."""
    held = _of(owner, name, otherwise)
    return (held.__get__, held.__set__) if hasattr(owner, name) else (held, held)


# -- tensors, storages and modules -------------------------------------------------------------------------------------

without_torch_function: Any = _of("torch._C", "DisableTorchFunctionSubclass")
"""Context manager: subclasses of Tensor count as plain tensors."""
version_of: Callable[[Tensor], int] = _descriptor(Tensor, "_version")[0]
foreach_copy_: Any = _of("torch", "_foreach_copy_")
foreach_add_: Any = _of("torch", "_foreach_add_")
foreach_mul_: Any = _of("torch", "_foreach_mul_")
foreach_norm: Any = _of("torch", "_foreach_norm")
"""One launch for several tensors; a bucket's gradients are hundreds."""
references_to: Callable[[int], int] = _of("torch._C", "_storage_Use_Count")
"""Number of tensors on a storage, given by `cdata` of its `StorageWeakRef`; torch tells it nowhere else."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own slots, to read and to write without its `__setattr__`."""
    found: dict[str, nn.Parameter | None] = _at(module, "_parameters")
    return found


# -- autograd ----------------------------------------------------------------------------------------------------------

running_node: Callable[[], Node | None] = _of("torch._C", "_current_autograd_node")
"""The node of a backward that this thread runs."""
will_run: Callable[[Node], bool] = _of("torch._C", "_will_engine_execute_node")


def at_end_of_backward(then: Callable[[], None]) -> None:
    _at(torch.autograd.Variable, "_execution_engine").queue_callback(then)


is_profiled: Callable[[], bool] = _of("torch._C._autograd", "_profiler_enabled", lambda: False)
"""True while a profiler records this thread; without this name marks are never made."""


# -- DTensors ----------------------------------------------------------------------------------------------------------

local_tensor: Callable[[Any], Tensor]
put_local_tensor: Callable[[Any, Tensor], None]
local_tensor, put_local_tensor = _descriptor(DTensor, "_local_tensor")
spec_of, put_spec = _descriptor(DTensor, "_spec")
DTensorSpec: Any = _of("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
TensorMeta: Any = _of("torch.distributed.tensor._dtensor_spec", "TensorMeta")
foreach_types: Sequence[list[type]] = [
    _of("torch.optim.optimizer", "_foreach_supported_types", []),
    _of("torch.utils._foreach_utils", "_foreach_supported_types", []),
]
"""Classes that optimizers and clip_grad_norm_ take several of at once."""


class UnevenShard(Shard):
    """A cut of dimension 0 that torch asks for each rank's rows."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        raise NotImplementedError

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        begin, end = self.spans[rank]  # asked by torch's compute_local_shape_and_global_offset
        return end - begin, begin


def dispatcher_before_2_12() -> tuple[Any, str, dict[Any, Any]]:
    """DTensor's dispatcher, the name of its slow path, and handlers of single operations."""
    dispatcher = _at(DTensor, "_op_dispatcher")
    return dispatcher, "_propagate_op_sharding_dispatch_slow_path", _at(dispatcher, "_custom_op_handlers")


# -- operations --------------------------------------------------------------------------------------------------------


def schema_of(func: Any) -> Any:
    """Arguments of an aten operation, and which of them it writes to."""
    return _at(func, "_schema")


_PYTREE = "torch.utils._pytree"
NAMES["_pytree"] = "torch.utils"
tree_flatten: Any = _of(_PYTREE, "tree_flatten")
tree_leaves: Any = _of(_PYTREE, "tree_leaves")
tree_map: Any = _of(_PYTREE, "tree_map")
tree_map_only: Any = _of(_PYTREE, "tree_map_only")
tree_unflatten: Any = _of(_PYTREE, "tree_unflatten")


# -- process groups ----------------------------------------------------------------------------------------------------

NAMES["_get_backend"] = dist.ProcessGroup
register_backend: Any = _of(dist.ProcessGroup, "_register_backend")
set_default_backend: Any = _of(dist.ProcessGroup, "_set_default_backend")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Backend of a group for a device, as the group's own class has it, which may be one of Python."""
    return _at(group, "_get_backend")(device)


def backends_of(group: Any, *devices: torch.device) -> list[Any]:
    """Backends of these devices, else of the CPU and of the accelerator."""
    found = []
    for device in devices or filter(None, (torch.device("cpu"), torch.accelerator.current_accelerator())):
        with suppress(RuntimeError):  # none for this device
            found.append(backend_of(group, device))
    return found


def timeout_of(*backends: Any) -> timedelta:
    """The shortest timeout of a collective; torch's default for gloo where no backend tells one."""
    timeouts = [getattr(getattr(each, "options", None), "_timeout", None) for each in backends]
    return min(filter(None, timeouts), default=default_pg_timeout)


def flight_recorder(kind: str) -> Callable[..., bytes]:
    """c10d's record of collectives as JSON: "nccl", or "fr" of other backends."""
    found: Callable[..., bytes] = _at(import_module("torch._C._distributed_c10d"), f"_dump_{kind}_trace_json")
    return found
