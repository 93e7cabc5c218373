"""The optimizer's side: main weights in, compute weights out; the norm and clipping.

The user's optimizer keeps its parameter groups and their settings; the tensors in them become flat runs of this rank's
main weights. State starts untouched: no step is ever taken to create it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending
from harness.fsdp.comm.events import Label
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.layout import Slot
from harness.fsdp.update import order_free_norm
from harness.fsdp.update.norm import sum_of_squares
from harness.fsdp.update.runs import FlatRun, is_moment
from harness.fsdp.vocabulary import Numerics

ELEMENTWISE = frozenset({"SGD", "Adam", "AdamW", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop"})
"""torch optimizers whose update of an element depends on that element alone, so that flat pieces can be stepped."""


class ShardedOptimizer:
    """Ties a torch optimizer to the flat buffers of one model on one rank.

    Args:
        optimizer: built over the module's own parameters; its groups are rewritten in place.
        buckets: in model order.
        decoupled: the optimizer reads `decoupled_grad`; one of torch's own would find no gradient and do nothing.

    Raises:
        TypeError: the optimizer needs whole tensors.
        ValueError: it updates a parameter that is not the module's, or is frozen, or it has taken a step already; or
            `numerics` promises bits that its update of 16-bit weights does not keep.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        numerics: Numerics,
        *,
        decoupled: bool = False,
    ) -> None:
        _refuse_whole_tensor_updates(optimizer)
        self.decoupled = decoupled
        if decoupled and type(optimizer).__module__.startswith("torch.optim"):
            raise ValueError(
                f"use_decoupled_grad=True hands gradients over as `decoupled_grad`, which {type(optimizer).__name__} of"
                " torch does not read: it would update nothing. Use an optimizer that does, or use_decoupled_grad=False"
            )
        if numerics.bitwise:
            _refuse_updates_that_see_cuts(optimizer, buckets)
        if optimizer.state:
            raise ValueError("the optimizer holds state already; shard before the first step, or load the state after")
        self.optimizer = optimizer
        self.has_updated = False
        """Whether gradients were handed to the optimizer, on any rank."""
        groups = _group_of(optimizer, buckets)
        self.runs = [flat for bucket in buckets if bucket.trainable for flat in _flat_runs(bucket, groups)]
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [flat.weight for flat in self.runs if flat.run.group == index]
            if numerics is Numerics.exact or (numerics.bitwise and not _all_fusable(buckets)):
                group.update({name: False for name in ("fused", "foreach") if name in group})

    def attach(self) -> None:
        """Give every run its main gradient as `.grad`, in the main weights' dtype, or `.decoupled_grad`, in its own.

        A run of parameters that got no gradient on any rank has None, as in plain torch: the optimizer leaves it alone.
        """
        self.has_updated = True
        self._set_unused_apart()
        for flat in self.runs:
            gradient = None if flat.is_unused else flat.grad
            if self.decoupled:
                flat.weight.decoupled_grad = gradient  # type: ignore[attr-defined]
            else:
                flat.weight.grad = None if gradient is None else gradient.to(flat.weight.dtype)

    def _set_unused_apart(self) -> None:
        for flat in list(self.runs):
            if flat.bucket.gradients is not None and flat.bucket.gradients.unused:
                self.split(flat, partial(_is_in, flat.bucket.gradients.unused))

    def split(self, flat: FlatRun, kind: Callable[[int, Slot], Hashable]) -> list[FlatRun]:
        """Cut a run for good where neighbouring parameters are of different kinds; the pieces, or the run itself."""
        return self._replace(flat, flat.cut_between(kind))

    def split_at(self, flat: FlatRun, places: set[int]) -> list[FlatRun]:
        """Cut a run for good at places of the shard of its segment; the pieces, or the run itself."""
        return self._replace(flat, flat.cut_at(places))

    def _replace(self, flat: FlatRun, pieces: list[FlatRun]) -> list[FlatRun]:
        """Let the optimizer step pieces in place of a run, see [Note: Runs]."""
        if pieces == [flat]:
            return pieces
        state = self.optimizer.state.pop(flat.weight, {})
        for piece in pieces:
            if state:
                self.optimizer.state[piece.weight] = flat.state_of(piece, state)
        index = self.runs.index(flat)
        self.runs[index : index + 1] = pieces
        params: list[Tensor] = self.optimizer.param_groups[flat.run.group]["params"]
        place = next(place for place, weight in enumerate(params) if weight is flat.weight)
        params[place : place + 1] = [piece.weight for piece in pieces]
        return pieces

    def detach(self) -> None:
        """Take the gradients away again."""
        for flat in self.runs:
            flat.weight.grad = None
            if self.decoupled:
                flat.weight.decoupled_grad = None  # type: ignore[attr-defined]

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of the optimizer's state on this rank: (for parameters, for padding). Step counters are left out."""
        used = total = 0
        for flat in self.runs:
            per_element = sum(
                value.itemsize
                for value in self.optimizer.state.get(flat.weight, {}).values()
                if is_moment(value, flat.weight)
            )
            total += per_element * flat.weight.numel()
            used += per_element * flat.param_numel
        return used, total - used

    def named_state(self) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
        """Per run: a name that tells bucket, segment and range, the optimizer's state of it, and the weights."""
        for flat in self.runs:
            yield flat.name, self.optimizer.state[flat.weight], flat.weight


def _is_in(places: frozenset[int], place: int, _: Slot) -> bool:
    return place in places


def _refuse_whole_tensor_updates(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    known = type(optimizer).__module__.startswith("torch.optim") and name in ELEMENTWISE
    if not known and not getattr(optimizer, "elementwise", False):
        raise TypeError(
            f"{name} is not known to update each element on its own; shards are flat pieces of parameters. Use one of"
            f" {', '.join(sorted(ELEMENTWISE))}, or set `elementwise = True` on an optimizer of yours that does"
        )


def _refuse_updates_that_see_cuts(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
    """torch's `add(other, alpha=)` in 16 bits rounds once inside a tensor and twice in its last few elements.

    Of torch's optimizers, AdamW alone gets by without it.
    """
    narrow = {str(b.dtypes.main) for b in buckets if b.trainable and b.dtypes.main.itemsize < 4}
    if narrow and type(optimizer).__name__ != "AdamW":
        raise ValueError(
            f"numerics=ordered or exact with main_params_dtype={', '.join(sorted(narrow))} needs AdamW: what"
            f" {type(optimizer).__name__} adds to 16-bit weights is rounded otherwise at the end of a tensor, so that"
            " bits would depend on where shards are cut. Use main_params_dtype=torch.float32, AdamW, or numerics=fast"
        )


def _group_of(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> dict[str, int]:
    """Parameter name to index of its optimizer group."""
    names = {id(param): name for bucket in buckets for name, param in bucket.params}
    frozen = {name for bucket in buckets if not bucket.trainable for name, _ in bucket.params}
    groups: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            name = names.get(id(param))
            if name is None:
                raise ValueError(
                    f"optimizer group {index} holds a tensor of shape {tuple(param.shape)} that is no parameter of the"
                    " sharded module; build the optimizer from module.parameters() before sharding"
                )
            if name not in frozen:
                groups[name] = index
    return groups


def _flat_runs(bucket: Bucket, groups: Mapping[str, int]) -> list[FlatRun]:
    return [FlatRun.over(bucket, run) for run in bucket.layout.runs(bucket.cuts.layout_rank, groups)]


def _all_fusable(buckets: Sequence[Bucket]) -> bool:
    return all(segment.fusable for bucket in buckets for segment in bucket.layout.segments)


def install_weights(buckets: Sequence[Bucket]) -> list[Pending]:
    """After an update: bring main weights into compute weights that are kept (others are cast when gathered).

    Returns what must be waited for before this rank changes them again: others may still take them from it.
    """
    pending = [each for bucket in buckets for each in bucket.install()]
    with events.waiting(*(Label("all_gather", bucket.name) for bucket in buckets if bucket.is_resident)):
        for each in pending:
            each.receive()
    return pending


def gradient_norm(buckets: Sequence[Bucket], everyone: Communicator, numerics: Numerics) -> float:
    """Euclidean norm of the whole main gradient, fp64, equal on all ranks; each parameter counts once. *Collective.*"""
    return _norm([(bucket, bucket.grad_shards) for bucket in buckets if bucket.trainable], everyone, numerics)


def weight_norm(buckets: Sequence[Bucket], everyone: Communicator, numerics: Numerics) -> float:
    """Euclidean norm of all main weights, frozen ones included. *Collective.*"""
    return _norm([(bucket, bucket.main_shards) for bucket in buckets], everyone, numerics)


def _norm(shards_of: list[tuple[Bucket, list[Tensor]]], everyone: Communicator, numerics: Numerics) -> float:
    """Order-free where bits may not depend on the layout (`harness.fsdp.update.order_free_norm`), else fp64 squares.

    Buckets that every rank holds whole are counted by each for itself, the others by the first rank that holds a shard.
    """
    whole, counted, split = [], [], False
    for bucket, shards in shards_of:
        if bucket.is_whole_everywhere:
            whole += shards
            continue
        split = True
        if bucket.cuts.is_counted_here:
            counted += shards
    count = order_free_norm.square_counters if numerics.bitwise else sum_of_squares
    device = everyone.runtime.device
    total = count(counted, _device_of(counted, device)).to(device)
    if split:
        everyone.sum_scalars(total, "norm")
    total += count(whole, _device_of(whole, device)).to(device)
    return order_free_norm.norm_from_counters(total) if numerics.bitwise else math.sqrt(float(total))


def _device_of(shards: Sequence[Tensor], fallback: torch.device) -> torch.device:
    return shards[0].device if shards else fallback


def clip_gradients(buckets: Sequence[Bucket], norm: float, max_norm: float) -> None:
    """Scale the main gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does."""
    coefficient = max_norm / (norm + 1e-6)
    if coefficient < 1.0 or math.isnan(coefficient):
        for bucket in buckets:
            for shard in bucket.grad_shards:
                shard.mul_(coefficient)
