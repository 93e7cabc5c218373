"""Weights that a module hands on: a slice of a table of positions, a transposed embedding, a scale.

[Note: Handed on] What a module returns may be a weight, or a view of one. Where weights are released after a forward,
its storage would be gone before the caller uses it. A copy takes its place, through which its gradient comes as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.runtime.refusals import refuse_handed_on
from harness.fsdp.storage.parameter_access import by_engine
from harness.private_torch import tree_flatten, tree_unflatten


@by_engine
def without_weights(output: Any, weights: Sequence[Tensor], unit: str) -> Any:
    """Output with copies of tensors that lie in the storage of `weights`.

    Raises:
        RuntimeError: one is in a dataclass, which cannot be rebuilt.
    """
    places = {weight.untyped_storage().data_ptr() for weight in weights if weight.numel()}
    if isinstance(output, Tensor):  # as almost always
        return output.clone() if _lies_in(output, places) else output
    leaves, shape = tree_flatten(output)
    found = [place for place, leaf in enumerate(leaves) if _lies_in(leaf, places)]
    for leaf in leaves:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            _refuse_within(leaf, places, unit)
    for place in found:
        leaves[place] = leaves[place].clone()
    return tree_unflatten(leaves, shape) if found else output


def _lies_in(value: Any, places: set[int]) -> bool:
    strided = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    return strided and value.numel() > 0 and _place(value) in places


def _place(value: Tensor) -> int:
    try:
        return value.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # DTensors and their like, which have none of their own
        return 0


def _refuse_within(held: Any, places: set[int], unit: str) -> None:
    for each in fields(held):
        value = getattr(held, each.name, None)
        if any(_lies_in(leaf, places) for leaf in tree_flatten(value)[0]):
            refuse_handed_on(f"{type(held).__name__}.{each.name}", unit)
