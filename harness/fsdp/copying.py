"""A copy of a sharded module as it was before it was sharded, without memory for its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from harness.fsdp.storage.at_rest import ShardedParameters
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.wrapper import engine_s_names

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


def bare_copy(
    module: nn.Module, buckets: Sequence[Bucket], handles: Sequence[RemovableHandle], memo: dict[int, Any]
) -> nn.Module:
    """A deep copy whose parameters are on the meta device, and on which nothing of the engine is hung.

    Args:
        handles: of the engine's hooks on modules.
        memo: of `copy.deepcopy`; knows the new parameters by the old ones afterwards.

    Raises:
        NotImplementedError: parameters are portions of a tensor-parallel plan, or kept in 8 bits.
    """
    for bucket in buckets:
        if bucket.context.tensor is not None or bucket.codec.is_lossy:
            kind = "kept in 8 bits" if bucket.codec.is_lossy else "portions of a tensor-parallel plan"
            raise NotImplementedError(
                f"a copy of a sharded model whose parameters are {kind}: build the module again, shard it, and load"
                " state_dict() of this one"
            )
        sharded = bucket.views.sharded()
        assert isinstance(sharded, ShardedParameters)
        for unsharded, at_rest, own in zip(sharded.unsharded, sharded.params, sharded.types, strict=True):
            memo[id(unsharded)] = memo[id(at_rest)] = _on_meta(at_rest, own, bucket)
    parts = [(part, engine_s_names(part)) for part in type(module).modules(module)]
    try:
        for part, held in parts:
            for name in held:
                del part.__dict__[name]
        copied: nn.Module = copy.deepcopy(module, memo)
    finally:
        for part, held in parts:
            part.__dict__.update(held)
    for hooks in _hooks_of(copied):
        for handle in handles:
            hooks.pop(handle.id, None)
    return copied


def _on_meta(param: nn.Parameter, own: type, bucket: Bucket) -> Tensor:
    data = torch.empty(param.shape, dtype=bucket.key.dtype, device="meta")
    made: Tensor = torch.Tensor._make_subclass(own, data, bucket.key.trainable)
    vars(made).update({name: value for name, value in vars(param).items() if not name.startswith("_")})
    return made


def _hooks_of(module: nn.Module) -> Iterator[dict[int, Any]]:
    for part in module.modules():
        for name in _HOOKS:
            yield getattr(part, name)
