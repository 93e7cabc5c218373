"""The optimizer's side: what it steps in place of parameters, and with which gradients.

The user's optimizer keeps its parameter groups and their settings; the tensors in them become flat stretches of this
rank's main weights. State starts untouched: no step is ever taken to create it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.options import steps_as_torch_does
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.layout import Slot
from harness.fsdp.storage.parameter_access import by_engine, put_grad
from harness.fsdp.update.accepted import check_optimizer
from harness.fsdp.update.blank import create_state_of
from harness.fsdp.update.flat_pieces import DECOUPLED
from harness.fsdp.update.groups import Groups
from harness.fsdp.update.kept_gradients import set_apart
from harness.fsdp.update.kernels import chosen_for
from harness.fsdp.update.lost_gradients import LostGradients
from harness.fsdp.update.stretches import FlatStretch, is_moment
from harness.fsdp.vocabulary import Numerics


class ShardedOptimizer:
    """Makes torch optimizers update this rank's flat buffers of one model: one optimizer, or several over disjoint
    parameters.

    Args:
        optimizer: built over the module's own parameters; its groups are rewritten in place.
        buckets: the model's buckets, in model order.
        decoupled: give gradients as `decoupled_grad`, which torch's own optimizers do not read.
        steps_unused: update parameters without a gradient as if their gradient were zero.

    Raises:
        TypeError: the optimizer needs whole tensors.
        ValueError: it updates a parameter that is not the module's, or that another optimizer updates, or it has
            already taken a step; or `numerics` promises bits that its update of 16-bit weights does not keep.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        numerics: Numerics,
        *,
        decoupled: bool = False,
        steps_unused: bool = False,
    ) -> None:
        self.buckets = buckets
        self.numerics = numerics
        self.decoupled = decoupled
        self._stretches: list[FlatStretch] = []
        self._stepped: set[int] = set()
        """Buckets that have stretches, by identity: those that are trained, once somebody has asked."""
        self.has_updated = False
        """Whether gradients were handed to an optimizer, on any rank."""
        self.groups = Groups(buckets)
        """Parameter groups of all optimizers, and who owns which parameter: `Stretch.group` is a place among them."""
        self._steps_unused: list[torch.optim.Optimizer] = []
        self.lost = LostGradients()
        """Gradients that one optimizer forgot for others."""
        self.add(optimizer, steps_unused=steps_unused)

    def add(self, optimizer: torch.optim.Optimizer, *, steps_unused: bool = False) -> None:
        """Take in an optimizer over parameters that no other one has; raises as the constructor does."""
        check_optimizer(optimizer, self.buckets, self.numerics, decoupled=self.decoupled)
        names = self.groups.names_of(optimizer.param_groups)
        optimizer.state.clear()  # at most what Adagrad makes when it is built; see below
        self._steps_unused += [optimizer] if steps_unused else []
        for index in range(len(optimizer.param_groups)):
            self._take(optimizer, index, [name for name, place in names.items() if place == index])
        self._step_late()

    def add_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Give an optimizer that was taken in another group, of parameters of the model that none has.

        Raises:
            ValueError: a parameter is not the module's, or an optimizer updates it already.
        """
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        labels = [each[0] for each in params if isinstance(each, tuple)]  # as named_parameters() gives them
        names = self.groups.names_of([{"params": [each[1] if isinstance(each, tuple) else each for each in params]}])
        own = [self._param(name) for name in names]
        given: list[Any] = list(zip(labels, own, strict=True)) if labels else own
        type(optimizer).add_param_group(optimizer, group | {"params": given})
        self._take(optimizer, len(optimizer.param_groups) - 1, list(names))

    def _param(self, name: str) -> Tensor:
        return next(param for bucket in self.buckets for each, param in bucket.params if each == name)

    def _take(self, optimizer: torch.optim.Optimizer, index: int, names: Sequence[str]) -> None:
        """Let a group of an optimizer step stretches in place of parameters; of frozen ones, once they are trained."""
        taken = [bucket for bucket in self.buckets if id(bucket) in self._stepped]
        group = optimizer.param_groups[index]
        group["params"] = []
        places = self.groups.add(optimizer, index, names)
        chosen = chosen_for(optimizer, group, self.numerics, fusable=_all_fusable(self.buckets))
        self.groups.choose(optimizer, index, chosen)
        self._add_runs(taken, places)

    @property
    def stretches(self) -> list[FlatStretch]:
        """What is stepped, bucket by bucket: also what was frozen when it was sharded and is trained since."""
        self._step_late()
        return self._stretches

    def _step_late(self) -> None:
        """Make stretches of buckets that are trained and have none yet."""
        late = [bucket for bucket in self.buckets if bucket.trainable and id(bucket) not in self._stepped]
        if late:
            self._stepped |= {id(bucket) for bucket in late}
            self._add_runs(late, self.groups.places)

    def _add_runs(self, buckets: Sequence[Bucket], places: Mapping[str, int]) -> None:
        """Step parameters of these buckets that have a place among the groups."""
        stretches = [stretch for bucket in buckets for stretch in _flat_stretches(bucket, places)]
        for flat in stretches:
            self.group_of(flat)["params"].append(flat.weight)
            if isinstance(self.stepped_by(flat), torch.optim.Adagrad):
                create_state_of(self.stepped_by(flat), {**self.group_of(flat), "params": [flat.weight]})
        order = {id(bucket): number for number, bucket in enumerate(self.buckets)}
        self._stretches = sorted(
            [*self._stretches, *stretches],
            key=lambda flat: (order[id(flat.bucket)], flat.stretch.segment, flat.stretch.start),
        )

    # -- who steps what ------------------------------------------------------------------------------------------

    def stepped_by(self, flat: FlatStretch) -> torch.optim.Optimizer:
        """The optimizer of a stretch."""
        return self.groups.optimizer(flat.stretch.group)

    def group_of(self, flat: FlatStretch) -> dict[str, Any]:
        """The settings a stretch is stepped with."""
        return self.groups.settings(flat.stretch.group)

    def state_of(self, flat: FlatStretch) -> dict[str, Any]:
        """What an optimizer keeps of a stretch."""
        held: dict[str, Any] = self.stepped_by(flat).state.get(flat.weight, {})
        return held

    def put_state(self, flat: FlatStretch, state: Mapping[str, Any]) -> None:
        """Let an optimizer keep this of a stretch."""
        held = self.stepped_by(flat).state[flat.weight]
        held.clear()
        held.update(state)

    def _stretches_of(self, optimizer: torch.optim.Optimizer | None) -> list[FlatStretch]:
        places = self.groups.places_of(optimizer)
        return [flat for flat in self.stretches if flat.stretch.group in places]

    def weights_of(self, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
        """What an optimizer (None: any) steps, stretch by stretch."""
        return [flat.weight for flat in self._stretches_of(optimizer)]

    # -- a step --------------------------------------------------------------------------------------------------

    @by_engine
    def attach(self, optimizer: torch.optim.Optimizer | None = None, *, zeros_alone: bool = False) -> None:
        """Give the stretches of an optimizer (None: of all) their main gradients as `.grad`, in the main weights'
        dtype, or as `.decoupled_grad`, in their own.

        A stretch of parameters that got a gradient on no rank has None, as in plain torch: the optimizer leaves it be.

        Args:
            zeros_alone: no backward has run, and gradients are what `zero_grad(set_to_none=False)` has left of others.
        """
        self.has_updated = True
        for flat in self._stretches_of(optimizer):
            left = flat.without_zeros if zeros_alone else self._left_alone(flat)
            for piece in self.split(flat, partial(_is_in, left)) if left else (flat,):
                self._attach_to(piece, None if left and piece.lies_in(left) else piece.grad)

    def _attach_to(self, flat: FlatStretch, gradient: Tensor | None) -> None:
        if self.decoupled:
            setattr(flat.weight, DECOUPLED, gradient)
        else:
            if gradient is not None and gradient.dtype != flat.weight.dtype:
                gradient = gradient.to(flat.weight.dtype)
            put_grad(flat.weight, gradient)

    def _leaves_unused(self, flat: FlatStretch) -> bool:
        """Whether a stretch's optimizer leaves parameters alone that got no gradient."""
        return not any(each is self.stepped_by(flat) for each in self._steps_unused)

    @property
    def asks_for_unused(self) -> bool:
        """Whether any optimizer leaves parameters alone that got no gradient."""
        return len(self._steps_unused) < len(self.groups.optimizers)

    def _left_alone(self, flat: FlatStretch) -> frozenset[int]:
        """Parameters of a stretch's bucket that its optimizer leaves alone in this step: they got a gradient on no
        rank; where it updates such, they are frozen as well."""
        gradients = flat.bucket.gradients
        unused = frozenset[int]() if gradients is None else gradients.unused
        if not unused or self._leaves_unused(flat):
            return unused
        flags = flat.bucket.views.flags()
        return frozenset(place for place in unused if not flags[place])

    @by_engine
    def detach(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take the gradients of an optimizer (None: of all) away again."""
        for flat in self._stretches_of(optimizer):
            stepped = self.stepped_by(flat)
            if not steps_as_torch_does(type(stepped)):
                set_apart(stepped, flat.weight)
            put_grad(flat.weight, None)
            if self.decoupled:
                setattr(flat.weight, DECOUPLED, None)

    def lost_to(self, forgetting: torch.optim.Optimizer) -> LostGradients:
        """What others lose when an optimizer forgets the gradients of a step that has begun."""
        had = [(each, self._has_gradients(each)) for each in self.groups.optimizers]
        return self.lost.to(forgetting, had)

    def _has_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(flat.has_gradients for flat in self._stretches_of(optimizer))

    # -- stretches ----------------------------------------------------------------------------------------------------

    def split(self, flat: FlatStretch, kind: Callable[[int, Slot], Hashable]) -> list[FlatStretch]:
        """Cut a stretch for good where neighbouring parameters are of different kinds; the pieces, or itself."""
        return self._replace(flat, flat.cut_between(kind))

    def split_at(self, flat: FlatStretch, places: set[int]) -> list[FlatStretch]:
        """Cut a stretch for good at places of the shard of its segment; the pieces, or the stretch itself."""
        return self._replace(flat, flat.cut_at(places))

    def _replace(self, flat: FlatStretch, pieces: list[FlatStretch]) -> list[FlatStretch]:
        """Let the optimizer step pieces in place of a stretch, see [Note: Stretches]."""
        if pieces == [flat]:
            return pieces
        optimizer = self.stepped_by(flat)
        state = optimizer.state.pop(flat.weight, {})
        for piece in pieces:
            if state:
                optimizer.state[piece.weight] = flat.state_of(piece, state)
        index = self.stretches.index(flat)
        self.stretches[index : index + 1] = pieces
        params: list[Tensor] = self.group_of(flat)["params"]
        place = next(place for place, weight in enumerate(params) if weight is flat.weight)
        params[place : place + 1] = [piece.weight for piece in pieces]
        return pieces

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of the optimizer's state on this rank: (for parameters, for padding). Step counters are left out."""
        used = total = 0
        for flat in self.stretches:
            per_element = sum(value.itemsize for value in self.state_of(flat).values() if is_moment(value, flat.weight))
            total += per_element * flat.weight.numel()
            used += per_element * flat.param_numel
        return used, total - used

    def named_state(self) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
        """Per stretch: a name that tells bucket, segment and range, the optimizer's state of it, and the weights."""
        for flat in self.stretches:
            yield flat.name, self.state_of(flat), flat.weight


def _is_in(places: frozenset[int], place: int, _: Slot) -> bool:
    return place in places


def _flat_stretches(bucket: Bucket, groups: Mapping[str, int]) -> list[FlatStretch]:
    return [FlatStretch.over(bucket, stretch) for stretch in bucket.layout.stretches(bucket.cuts.layout_rank, groups)]


def _all_fusable(buckets: Sequence[Bucket]) -> bool:
    return all(segment.fusable for bucket in buckets for segment in bucket.layout.segments)
