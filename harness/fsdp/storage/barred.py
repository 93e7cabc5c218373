"""Storage that has no memory, whose use is an error of torch's and not the end of the process.

[Note: Barred storage] torch's kernels take a tensor's address without asking whether its storage still has memory: of
one that was emptied they read address zero, and the process ends by a signal. But a storage has a mark, looked at
wherever its address is taken, that makes this an error; and `_swap_data_ptr_` exchanges memory and mark of two. So
every bucket that is emptied between uses has a *bar*: an empty storage with the mark, which takes the place of the
memory while there is none. Whatever was made of the storage (a view in a closure, what C++ reads where Python is not
asked) raises then, and is right again once the storage is filled. Some builds of torch have a function that sets the
mark; in others it is set where it lies, between its two neighbours, for which all have functions. Where neither is
possible, storage is emptied and no more; nor under torch's stream sanitizer, which takes the address of whatever an
operation is given, also where only its shape is looked at.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

import torch

SANITIZER = "TORCH_CUDA_SANITIZER"
"""Variable with which torch watches every operation's addresses, from its import on."""
BAR = "_fsdp_bar"
"""Attribute of a bucket whose storage is barred while it is empty."""
_LOOKED_AT_BYTES = 80
"""How many bytes of torch's storage object are compared: its pointer, size and marks. The object is larger."""
_BY_TORCH = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
RELEASED = (
    "a view of weights of harness.fsdp is used after these were released: keep a copy, view.detach().clone(), or use it"
    " inside `with model.gathered():`"
)
"""What torch says then, where it can be told."""
TORCHS_WORDS = (
    RELEASED,
    "Cannot access data pointer of Storage that is invalid",
    "out of bounds for storage of size 0",
)
"""What its message has then: what it was told, its own words, and those for a view of what would be read."""


def bar(device: torch.device) -> torch.UntypedStorage | None:
    """An empty storage whose memory may not be looked for, to be exchanged with; None where torch has no such."""
    if not can_bar():
        return None
    made = torch.UntypedStorage(0, device=device)
    _mark(made)
    return made


def forbid(tensor: torch.Tensor) -> torch.Tensor:
    """Have whatever looks for the values of a tensor raise from now on, where torch can do that; returns it."""
    if can_bar():
        _mark(tensor.untyped_storage())
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def exchange(storage: torch.UntypedStorage, bar: torch.UntypedStorage) -> None:
    """Exchange memory and mark of two storages; what is made of `storage` sees what was of `bar`."""
    storage._swap_data_ptr_(bar)  # type: ignore[attr-defined] # newer than its stubs


@cache
def can_bar() -> bool:
    """Whether this torch can mark storage, and exchange it, and nothing takes addresses idly; tried once."""
    if SANITIZER in os.environ:  # as torch asks
        return False
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_") or (_BY_TORCH is None and _place_of_mark() is None):
        return False
    tried, other = torch.UntypedStorage(8), torch.UntypedStorage(0)
    _mark(other)
    exchange(tried, other)
    try:
        tried.data_ptr()
    except RuntimeError:
        exchange(tried, other)
        return tried.data_ptr() != 0
    return False


def _mark(storage: torch.UntypedStorage) -> None:
    if _BY_TORCH is not None:
        _BY_TORCH(storage._cdata, RELEASED)
    else:
        ctypes.c_ubyte.from_address(storage._cdata + (_place_of_mark() or 0)).value = 1


@cache
def _place_of_mark() -> int | None:
    """Where in torch's storage object its mark lies: between those that these two functions set; None if not there."""
    tensor = torch.empty(1)
    before = _bytes_of(tensor)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    between = _bytes_of(tensor)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(tensor)
    after = _bytes_of(tensor)
    first = [place for place, (was, now) in enumerate(zip(before, between, strict=True)) if was != now]
    second = [place for place, (was, now) in enumerate(zip(between, after, strict=True)) if was != now]
    if len(first) != 2 or second != [first[0] + 3] or first[1] != first[0] + 1 or after[first[0] + 2] != 0:
        return None
    return first[0] + 2


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.untyped_storage()._cdata, _LOOKED_AT_BYTES)
