"""The optimizer's side: main weights in, compute weights out; the norm and clipping.

The user's optimizer keeps its parameter groups and their settings; the tensors in them become flat runs of this rank's
main weights. State starts untouched: no step is ever taken to create it.

[Note: Disjoint] Several optimizers may have parts of one model, as the two of a GAN. Gradients of a model are reduced
and forgotten together; so when one of them calls `zero_grad`, the others lose theirs. One that calls its own before its
next step never notices, as it would have forgotten them itself; one that steps without doing so is told, on all ranks
if any rank had a gradient for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending
from harness.fsdp.comm.events import Label
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.layout import Slot
from harness.fsdp.update import order_free_norm
from harness.fsdp.update.accepted import check_optimizer
from harness.fsdp.update.blank import create_state_of
from harness.fsdp.update.norm import sum_of_squares
from harness.fsdp.update.runs import FlatRun, is_moment
from harness.fsdp.vocabulary import Numerics

_BLOCK = 1 << 20
"""Elements widened at a time."""


DECOUPLED = "decoupled_grad"
"""Attribute in which an optimizer of Megatron's protocol finds a gradient of another dtype than the weight's."""


class Forgotten(NamedTuple):
    """An optimizer, and whether this rank had a gradient of its parameters."""

    optimizer: torch.optim.Optimizer
    had: bool


class ShardedOptimizer:
    """Ties torch optimizers to the flat buffers of one model on one rank: one, or several over disjoint parameters.

    Args:
        optimizer: built over the module's own parameters; its groups are rewritten in place.
        buckets: in model order.
        decoupled: optimizers read `decoupled_grad`; one of torch's own would find no gradient and do nothing.
        steps_unused: it updates parameters without a gradient as if that were zero.

    Raises:
        TypeError: the optimizer needs whole tensors.
        ValueError: it updates a parameter that is not the module's, or that an optimizer updates already, or it has
            taken a step already; or `numerics` promises bits that its update of 16-bit weights does not keep.
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
        self._runs: list[FlatRun] = []
        self._stepped: set[int] = set()
        """Buckets that have runs, by identity: those that are trained, once somebody has asked."""
        self.has_updated = False
        """Whether gradients were handed to an optimizer, on any rank."""
        self._groups: list[tuple[torch.optim.Optimizer, int]] = []
        """An optimizer and one of its groups, by `Run.group`."""
        self._grouped: dict[str, int] = {}
        """Place in that list by parameter."""
        self._steps_unused: list[torch.optim.Optimizer] = []
        self.forgotten: list[Forgotten] = []
        """Optimizers whose gradients another one's `zero_grad` may have forgotten: the same on all ranks."""
        self.add(optimizer, steps_unused=steps_unused)

    def add(self, optimizer: torch.optim.Optimizer, *, steps_unused: bool = False) -> None:
        """Take in an optimizer over parameters that no other one has; raises as the constructor does."""
        check_optimizer(optimizer, self.buckets, self.numerics, decoupled=self.decoupled)
        names = self._names_of(optimizer.param_groups)
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
        params = group["params"]
        names = self._names_of([{"params": [params] if isinstance(params, Tensor) else list(params)}])
        type(optimizer).add_param_group(optimizer, group | {"params": list(_params(self.buckets, names))})
        self._take(optimizer, len(optimizer.param_groups) - 1, list(names))

    def _names_of(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Parameters by name, and which of `groups` each is in."""
        names = {id(param): name for bucket in self.buckets for name, param in bucket.params}
        found: dict[str, int] = {}
        for index, group in enumerate(groups):
            for param in group["params"]:
                name = names.get(id(param))
                if name is None:
                    raise ValueError(
                        f"optimizer group {index} holds a tensor of shape {tuple(param.shape)} that is no parameter of"
                        " the sharded module; build the optimizer over parameters of that module alone"
                    )
                if name in self._grouped:
                    raise ValueError(f"parameter {name} has an optimizer already; give it to one alone")
                found[name] = index
        return found

    def _take(self, optimizer: torch.optim.Optimizer, index: int, names: Sequence[str]) -> None:
        """Let a group of an optimizer step runs in place of parameters; of frozen ones, once they are trained."""
        taken = [bucket for bucket in self.buckets if id(bucket) in self._stepped]
        place = len(self._groups)
        self._groups.append((optimizer, index))
        self._grouped |= dict.fromkeys(names, place)
        group = optimizer.param_groups[index]
        group["params"] = []
        self._add_runs(taken, dict.fromkeys(names, place))
        exact = self.numerics is Numerics.exact
        if exact or (self.numerics.bitwise and not _all_fusable(self.buckets)):
            group.update({name: False for name in ("fused", "foreach") if name in group})

    @property
    def runs(self) -> list[FlatRun]:
        """What is stepped, bucket by bucket: also what was frozen when it was sharded and is trained since."""
        self._step_late()
        return self._runs

    def _step_late(self) -> None:
        """Make runs of buckets that are trained and have none yet."""
        late = [bucket for bucket in self.buckets if bucket.trainable and id(bucket) not in self._stepped]
        if late:
            self._stepped |= {id(bucket) for bucket in late}
            self._add_runs(late, self._grouped)

    def _add_runs(self, buckets: Sequence[Bucket], places: Mapping[str, int]) -> None:
        """Step parameters of these buckets that have a place among the groups."""
        runs = [run for bucket in buckets for run in _flat_runs(bucket, places)]
        for flat in runs:
            self.group_of(flat)["params"].append(flat.weight)
            if isinstance(self.stepped_by(flat), torch.optim.Adagrad):
                create_state_of(self.stepped_by(flat), {**self.group_of(flat), "params": [flat.weight]})
        order = {id(bucket): number for number, bucket in enumerate(self.buckets)}
        self._runs = sorted(
            [*self._runs, *runs], key=lambda flat: (order[id(flat.bucket)], flat.run.segment, flat.run.start)
        )

    # -- who steps what ------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All of them, in the order they came."""
        found: list[torch.optim.Optimizer] = []
        for optimizer, _ in self._groups:
            found += [] if any(each is optimizer for each in found) else [optimizer]
        return found

    def names_by_group(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Names of the parameters each group of an optimizer was given, in its order, frozen ones among them."""
        places = [place for place, (each, _) in enumerate(self._groups) if each is optimizer]
        return [[name for name, other in self._grouped.items() if other == place] for place in places]

    def stepped_by(self, flat: FlatRun) -> torch.optim.Optimizer:
        """The optimizer of a run."""
        return self._groups[flat.run.group][0]

    def group_of(self, flat: FlatRun) -> dict[str, Any]:
        """The settings a run is stepped with."""
        optimizer, index = self._groups[flat.run.group]
        group: dict[str, Any] = optimizer.param_groups[index]
        return group

    def state_of(self, flat: FlatRun) -> dict[str, Any]:
        """What an optimizer keeps of a run."""
        held: dict[str, Any] = self.stepped_by(flat).state.get(flat.weight, {})
        return held

    def put_state(self, flat: FlatRun, state: Mapping[str, Any]) -> None:
        """Let an optimizer keep this of a run."""
        held = self.stepped_by(flat).state[flat.weight]
        held.clear()
        held.update(state)

    def _runs_of(self, optimizer: torch.optim.Optimizer | None) -> list[FlatRun]:
        return [flat for flat in self.runs if optimizer is None or self.stepped_by(flat) is optimizer]

    # -- a step --------------------------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Give the runs of an optimizer (None: of all) their main gradients as `.grad`, in the main weights' dtype, or
        as `.decoupled_grad`, in their own.

        A run of parameters that got no gradient on any rank has None, as in plain torch: the optimizer leaves it alone.
        """
        self.has_updated = True
        for flat in self._runs_of(optimizer):
            if left := self._left_alone(flat):
                self.split(flat, partial(_is_in, left))
        for flat in self._runs_of(optimizer):
            gradient = None if flat.lies_in(self._left_alone(flat)) else flat.grad
            if self.decoupled:
                setattr(flat.weight, DECOUPLED, gradient)
            else:
                flat.weight.grad = None if gradient is None else gradient.to(flat.weight.dtype)

    def _leaves_unused(self, flat: FlatRun) -> bool:
        """Whether a run's optimizer leaves parameters alone that got no gradient."""
        return not any(each is self.stepped_by(flat) for each in self._steps_unused)

    @property
    def asks_for_unused(self) -> bool:
        """Whether any optimizer leaves parameters alone that got no gradient."""
        return len(self._steps_unused) < len(self.optimizers)

    def _left_alone(self, flat: FlatRun) -> frozenset[int]:
        """Parameters of a run's bucket that its optimizer leaves alone in this step: they got a gradient on no rank;
        where it updates such, they are frozen as well."""
        gradients = flat.bucket.gradients
        unused = frozenset[int]() if gradients is None else gradients.unused
        if not unused or self._leaves_unused(flat):
            return unused
        flags = flat.bucket.flags()
        return frozenset(place for place in unused if not flags[place])

    def detach(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take the gradients of an optimizer (None: of all) away again."""
        for flat in self._runs_of(optimizer):
            flat.weight.grad = None
            if self.decoupled:
                setattr(flat.weight, DECOUPLED, None)

    # -- several optimizers --------------------------------------------------------------------------------------

    def forget_for(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer forgets the gradients of a step that has begun: note those others may lose with its own."""
        lose = [Forgotten(each, self._has_gradients(each)) for each in self.optimizers if each is not optimizer]
        before = {id(each.optimizer): each.had for each in self.forgotten}
        self.forgotten = [each._replace(had=each.had or before.get(id(each.optimizer), False)) for each in lose]

    def remember(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has forgotten its gradients itself."""
        self.forgotten = [each for each in self.forgotten if each.optimizer is not optimizer]

    def _has_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(flat.has_gradients for flat in self._runs_of(optimizer))

    def check_forgotten(self, optimizer: torch.optim.Optimizer, everyone: Communicator) -> None:
        """Refuse a step without gradients that another optimizer forgot. *Collective* where that may be.

        Raises:
            RuntimeError: on all ranks, if there were any on one.
        """
        found = next((each for each in self.forgotten if each.optimizer is optimizer), None)
        if found is None:
            return
        had = torch.tensor([int(found.had)], dtype=torch.int64, device=everyone.runtime.device)
        if int(everyone.sum_scalars(had, "gradients that were forgotten")):
            raise RuntimeError(
                f"gradients that {type(optimizer).__name__} was to step with were forgotten by the zero_grad() of"
                " another optimizer of this model: they are reduced together, and forgotten together. Call zero_grad()"
                " of each optimizer before the backward it steps with, or shard each network by itself"
            )
        self.remember(optimizer)

    # -- runs ----------------------------------------------------------------------------------------------------

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
        optimizer = self.stepped_by(flat)
        state = optimizer.state.pop(flat.weight, {})
        for piece in pieces:
            if state:
                optimizer.state[piece.weight] = flat.state_of(piece, state)
        index = self.runs.index(flat)
        self.runs[index : index + 1] = pieces
        params: list[Tensor] = self.group_of(flat)["params"]
        place = next(place for place, weight in enumerate(params) if weight is flat.weight)
        params[place : place + 1] = [piece.weight for piece in pieces]
        return pieces

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of the optimizer's state on this rank: (for parameters, for padding). Step counters are left out."""
        used = total = 0
        for flat in self.runs:
            per_element = sum(value.itemsize for value in self.state_of(flat).values() if is_moment(value, flat.weight))
            total += per_element * flat.weight.numel()
            used += per_element * flat.param_numel
        return used, total - used

    def named_state(self) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
        """Per run: a name that tells bucket, segment and range, the optimizer's state of it, and the weights."""
        for flat in self.runs:
            yield flat.name, self.state_of(flat), flat.weight


def _is_in(places: frozenset[int], place: int, _: Slot) -> bool:
    return place in places


def _params(buckets: Sequence[Bucket], names: Container[str]) -> Iterator[Tensor]:
    return (param for bucket in buckets for name, param in bucket.params if name in names)


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
    whole, counted, split = _dealt(shards_of)
    count = order_free_norm.square_counters if numerics.bitwise else sum_of_squares
    device = everyone.runtime.device
    total = count(counted, _device_of(counted, device)).to(device)
    if split:
        everyone.sum_scalars(total, "norm")
    total += count(whole, _device_of(whole, device)).to(device)
    return order_free_norm.norm_from_counters(total) if numerics.bitwise else math.sqrt(float(total))


def _dealt(shards_of: Sequence[tuple[Bucket, list[Tensor]]]) -> tuple[list[Tensor], list[Tensor], bool]:
    """Shards that every rank holds, shards this rank counts for all that hold them, and whether any are split."""
    whole = [shard for bucket, shards in shards_of if bucket.is_whole_everywhere for shard in shards]
    split = [(bucket, shards) for bucket, shards in shards_of if not bucket.is_whole_everywhere]
    counted = [shard for bucket, shards in split if bucket.cuts.is_counted_here for shard in shards]
    return whole, counted, bool(split)


def gradient_p_norm(buckets: Sequence[Bucket], everyone: Communicator, numerics: Numerics, p: float) -> float:
    """The p-norm of the whole main gradient, p positive or inf, in fp64 and equal on all ranks. *Collective.*

    Raises:
        ValueError: p is neither; or it is not inf, and `numerics` promises bits that do not depend on the layout.
    """
    if not p > 0:
        raise ValueError(f"norm_type={p} must be a positive number or inf")
    whole, counted, _ = _dealt([(bucket, bucket.grad_shards) for bucket in buckets if bucket.trainable])
    if math.isinf(p):
        return _largest([*whole, *counted], everyone)
    if numerics.bitwise:
        raise ValueError(
            f"norm_type={p} with numerics={numerics.name}: bits of a sum of such powers would depend on the layout; use"
            " norm_type 2 or inf, or numerics=fast"
        )
    device = everyone.runtime.device
    total = everyone.sum_scalars(_sum_of_powers(counted, p, device), "norm") + _sum_of_powers(whole, p, device)
    norm: float = float(total) ** (1.0 / p)
    return norm


def _sum_of_powers(shards: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """Sum of |x|^p over all elements: fp64, shape [1]."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for shard in shards:
        for block in shard.detach().split(_BLOCK):
            total += block.double().abs().pow(p).sum().to(device)
    return total


def _largest(shards: Sequence[Tensor], everyone: Communicator) -> float:
    """The largest |x| on any rank; NaN where an element is."""
    largest = torch.zeros(everyone.size, dtype=torch.float64, device=everyone.runtime.device)
    found = [shard.detach().abs().amax().double().to(largest.device) for shard in shards if shard.numel()]
    largest[everyone.rank] = torch.stack(found).amax() if found else 0.0
    return float(everyone.sum_scalars(largest, "norm").amax())


def _device_of(shards: Sequence[Tensor], fallback: torch.device) -> torch.device:
    return shards[0].device if shards else fallback


def clip_gradients(buckets: Sequence[Bucket], norm: float, max_norm: float) -> None:
    """Scale the main gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does."""
    coefficient = max_norm / (norm + 1e-6)
    if coefficient < 1.0 or math.isnan(coefficient):
        scale_gradients(buckets, coefficient)


def scale_gradients(buckets: Sequence[Bucket], factor: float) -> None:
    """Multiply the main gradients, which are finished, by a factor."""
    for bucket in buckets:
        for shard in bucket.grad_shards:
            shard.mul_(factor)
