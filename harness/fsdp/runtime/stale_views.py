"""Naming the weight whose view is used after its release, where only torch tells of it ([Note: Barred storage])."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor

from harness.fsdp.storage.barred import TORCHS_WORDS
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.parameter_access import HOME, ReleasedWeightError, by_engine


def explain_stale_view(buckets: Iterable[Bucket], unit: str) -> None:
    """To what is being raised out of a call of a unit, add a note, where a view of released weights is its cause: which
    parameters' views the variables of the functions are in which it was raised."""
    error = sys.exc_info()[1]
    if not isinstance(error, RuntimeError) or isinstance(error, ReleasedWeightError):
        return
    if not any(words in str(error) for words in TORCHS_WORDS):
        return
    if any("was kept from" in note for note in getattr(error, "__notes__", ())):
        return
    found = dict.fromkeys(_named(error.__traceback__, list(buckets)))
    whose = " and ".join(found) if found else "weights"
    error.add_note(
        f"harness.fsdp: in a call of unit {unit}, a view of {whose} was kept from an earlier forward, or"
        " from gathered(), and is used after these were released. Keep a copy, p.detach().clone()"
    )


@by_engine
def _named(trace: TracebackType | None, buckets: list[Bucket]) -> list[str]:
    released = [(bucket.compute.untyped_storage()._cdata, bucket) for bucket in buckets if not bucket.is_whole]
    found = []
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if type(value) is Tensor and value.layout is torch.strided and not value.is_nested:
                place = value.untyped_storage()._cdata
                found += [
                    _parameter_at(value, bucket) for at, bucket in released if at == place and _has(bucket, value)
                ]
        trace = trace.tb_next
    return found


def _has(bucket: Bucket, view: Tensor) -> bool:
    """Whether a view of its storage is of this bucket, and not of another one of its unit."""
    begin = bucket.compute.storage_offset() * bucket.compute.itemsize
    return begin <= view.storage_offset() * view.itemsize < begin + bucket.compute.nbytes


def _parameter_at(view: Tensor, bucket: Bucket) -> str:
    begins = [begin for _, _, begin in bucket.layout.views]
    offset = int(view.storage_offset()) - bucket.compute.storage_offset()
    place = max((p for p, begin in enumerate(begins) if begin <= offset), key=lambda p: begins[p])
    name, unit = getattr(bucket.params[place][1], HOME)
    return f"parameter {name} of unit {unit}"
