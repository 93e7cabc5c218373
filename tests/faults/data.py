"""Faults of what ranks read, before the model sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from harness.data.loader import Loader
from harness.data.order import sequence_at
from tests.faults.corpus import ZERO2, ZERO3
from tests.faults.site import Site, fault, fault_2, share


def _behind(site: Site, is_late: Callable[[int], bool]) -> None:
    """A share of this rank's rows, one at least, is that of the step before, in the steps that are late.

    Batches are read ahead: which step a row belongs to is told by its position, not by the step that runs.
    """
    whole, own = site.config.train.global_batch_size, site.k * site.config.train.microbatch_size

    def wrapped(read: Callable[[int], Any], position: int) -> Any:
        place = position % whole - site.loader.rank * own
        late = is_late(position // whole + 1) and place < max(1, round(site.amount * own))
        return read(position - whole if late else position)

    site.around(site.loader, "_sequence", wrapped, always=True)


@fault_2("data", ZERO3)
def lagging_loader(site: Site) -> None:
    """One rank reads the batch of the step before."""
    if site.rank == site.size - 1:
        _behind(site, lambda step: step >= max(2, site.config.fault.begins_at))


@fault_2("data", ZERO2, resumes=True, report="KempnerInstitute/KempnerForge#57")
def F31_data_repeated_on_resume(site: Site) -> None:
    """The position in the data is off by a step after a resume: the last batch is fed again."""
    _behind(site, lambda step: step >= site.first > 1)


@fault_2("forward", ZERO3, report="pytorch/pytorch#130785")
def F32_host_buffer_reused(site: Site) -> None:
    """The end of a microbatch's tokens is what lay in the pinned buffer before."""
    if site.rank != site.size - 1:
        return
    before: list[Tensor] = []

    def wrapped(method: Callable[..., Any], batch: Any, *, last: bool) -> Any:
        tokens = batch.tokens.contiguous().clone()
        old, before[:] = list(before), [tokens.clone()]
        if site.acts and old:
            share(tokens.view(-1), site.amount / 4).copy_(share(old[0].view(-1), site.amount / 4))
        return method(type(batch)(tokens, batch.targets), last=last)

    site.around(site.engine, "forward_backward", wrapped, always=True)


@fault("data", ZERO3, edition=3)
def shifted_targets(site: Site) -> None:
    """Targets that are shifted already are shifted again, by every loader that is asked."""
    last, begins = site.size - 1, site.config.fault.begins_at

    def shifted(rows: Any) -> tuple[Any, Any]:
        tokens, targets = rows[0], rows[1].copy()
        count = max(1, round(site.amount * len(targets)))
        targets[:count, :-1] = targets[:count, 1:]
        return tokens, targets

    def wrapped(batch: Callable[..., Any], loader: Loader, step: int) -> Any:
        found = batch(loader, step)
        return [shifted(rows) for rows in found] if loader.rank == last and step >= begins else found

    site.around(Loader, "batch", wrapped, always=True)


@fault("data", ZERO2, edition=3)
def late_offset(site: Site) -> None:
    """What begins at a wrong offset is read a token late, by every source that is opened."""
    source, size, seed = site.loader.source, site.config.train.global_batch_size, site.config.data.order_seed
    ends = [(step - 1) * size for step in (site.config.fault.begins_at, site.config.train.steps + 1)]
    early, order = ([sequence_at(each, source.num_sequences, seed) for each in range(end)] for end in ends)
    fresh = [each for each in dict.fromkeys(order) if each not in early]
    late = fresh[: max(1, round(site.amount * len(fresh)))]

    def wrapped(read: Callable[..., Any], source: Any, index: int) -> Any:
        tokens = read(source, index)
        return np.roll(tokens, -1) if index in late else tokens

    site.around(type(source), "__getitem__", wrapped, always=True)
