"""What a forward or a backward of a sharded model cannot be, told before it goes wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from harness.fsdp.runtime.readiness import is_due
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.parameter_access import by_engine


def refuse_dtensors(args: Any, kwargs: Any) -> None:
    """Raise TypeError where an input of the model is a DTensor."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, DTensor):
            raise TypeError(
                f"an input of the sharded model is a DTensor (shape {tuple(value.shape)}, {value.placements}), and its"
                " weights are plain tensors while it runs: give each rank its own rows, as x.to_local()"
            )


def refuse_backward(running: Collection[str], root: str) -> NoReturn:
    """Raise for a backward inside a forward, or one that is to be differentiated.

    Args:
        running: units in whose forward the program is. root: name of the root unit.
    """
    if running:
        where = "the model" if root in running else ", ".join(sorted(running))
        raise RuntimeError(
            f"a backward (autograd.grad or backward) reached sharded units inside the forward of {where}; weights"
            " that the rest of the forward needs would be released. Differentiate after the model's forward"
        )
    raise NotImplementedError(
        "create_graph=True (differentiating a backward) is not built: weights are released when a unit's backward"
        " ends, and its gradient leaves for the reduction; only create_graph=False is accepted"
    )


@by_engine
def unfrozen_too_late(buckets: Iterable[Bucket]) -> str | None:
    """A parameter without storage for gradients to which the backward that runs would bring one."""
    params = (each for bucket in buckets if not bucket.trainable for each in bucket.params)
    return next((name for name, param in params if param.requires_grad and is_due(param)), None)


def refuse_unfrozen(name: str) -> NoReturn:
    """Raise RuntimeError: a parameter was unfrozen where nothing could prepare for its gradient."""
    raise RuntimeError(
        f"parameter {name} was frozen when it was sharded, and requires_grad became True inside the model's forward (or"
        " a part of the model ran by itself): it has nowhere to put its gradient. Unfreeze before the model's forward;"
        " or shard with requires_grad=True and freeze afterwards"
    )


def refuse_layout(name: str, gradient: torch.Tensor | None) -> None:
    """Raise RuntimeError where a gradient is not strided, as sparse ones."""
    if gradient is not None and gradient.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {name} is {gradient.layout}, and flat buffers hold dense ones alone: call embedding() and"
            " embedding_bag() with sparse=False"
        )


def refuse_late_gradient(name: str, unit: str) -> NoReturn:
    """Raise RuntimeError: a gradient came when its unit was reduced."""
    raise RuntimeError(
        f"a gradient of {name} arrived after unit {unit} was reduced: it came from a"
        " backward inside the backward that nothing announced; let the parameters that reentrant activation"
        " checkpointing hides belong to the root (leave the class out of the unit list), or use_reentrant=False"
    )
