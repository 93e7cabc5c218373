"""Digests of what a step was fed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

DIGEST_BYTES = 8


class Fed(NamedTuple):
    rows: list[str]
    """Digest of each row of the batch, 16 hex digits; of the whole batch where its tensors have no common length."""
    tokens: int
    """Numbers in the first tensor of integers; rows if there is none."""


def fed(data: Any) -> Fed:
    """Digests of a batch: a tensor, an array, a number, a text, or any nest of dicts and lists of them."""
    leaves = [(key, _tensor(leaf)) for key, leaf in _leaves(data)]
    lengths = {leaf.shape[0] if leaf.ndim else 0 for _, leaf in leaves}
    count = lengths.pop() if len(lengths) == 1 else 0
    if not count:
        return Fed([_digest(leaves)] if leaves else [], 1 if leaves else 0)
    rows = [_digest([(key, leaf[row]) for key, leaf in leaves]) for row in range(count)]
    each = next((math.prod(leaf.shape[1:]) for _, leaf in leaves if not leaf.is_floating_point()), 1)
    return Fed(rows, count * each)


def _leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if data is None:
        return
    if isinstance(data, Mapping):
        for name in sorted(data, key=str):
            yield from _leaves(data[name], f"{key}/{name}")
    elif isinstance(data, list | tuple) and not (data and all(isinstance(item, str | int | float) for item in data)):
        for place, item in enumerate(data):
            yield from _leaves(item, f"{key}/{place}")
    else:
        yield key, data


def _tensor(leaf: Any) -> Tensor:
    """A list of numbers or texts has an item a row."""
    if isinstance(leaf, list | tuple) and any(isinstance(each, str) for each in leaf):
        leaf = [list(hashlib.blake2b(str(each).encode(), digest_size=DIGEST_BYTES).digest()) for each in leaf]
    elif isinstance(leaf, str):
        leaf = list(leaf.encode())
    found = leaf.detach() if isinstance(leaf, Tensor) else torch.as_tensor(leaf)
    found = getattr(found, "_local_tensor", found)
    return found.to("cpu", copy=True).contiguous()


def _digest(leaves: list[tuple[str, Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for key, leaf in leaves:
        digest.update(f"{key} {leaf.dtype} {list(leaf.shape)}\n".encode())
        digest.update(leaf.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
