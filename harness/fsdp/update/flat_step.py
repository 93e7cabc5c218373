"""A flat step: torch's elementwise rules update few flat pieces of main weights in place of many sharded parameters.

[Note: Flat step] Flat pieces stand in the optimizer's groups only while its rule runs, below torch's step hooks: hooks,
closures and whoever catches an exception see sharded parameters. State is by parameter: moments are views of flat ones,
`step` and its like an element each. A piece is a run of neighbours of one bucket and group that have gradients and
equal counters. Any other rule (LAMB, a class with its own `step`) steps the sharded parameters themselves.
"""

from __future__ import annotations

import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from harness.fsdp.ragged import RaggedTensor, distribute_rows
from harness.fsdp.ragged.tensor import local_of
from harness.fsdp.storage.at_rest import LOCATION, ShardedParameters, location_of
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.dtensors import fill
from harness.fsdp.storage.parameter_access import HOME, by_engine, grad_of, put_grad
from harness.fsdp.update.blank import COUNTERS, ENTRIES
from harness.fsdp.update.flat_pieces import Counter, Piece, Span
from harness.fsdp.update.kernels import KERNELS, named

SYNC, INSTALL = "sync_grad_before_optimizer_step", "install_optimized_model_weights"
"""What `step` takes beside a closure, each True unless it is given: megatron-fsdp's names."""
DECOUPLED = "decoupled_grad"
"""Attribute in which an optimizer of Megatron's protocol finds a gradient of another dtype than the weight's."""
Opt = torch.optim.Optimizer
_Place = tuple[ShardedParameters, int]


def moments_of(optimizer: Opt) -> frozenset[str] | None:
    """Entries with a number an element, of a rule of torch that is elementwise; None for any other rule."""
    for kind, entries in ENTRIES.items():
        own = (inspect.unwrap(getattr(type(optimizer), name)) for name in ("step", "_init_group"))
        if all(
            each is inspect.unwrap(getattr(kind, name)) for each, name in zip(own, ("step", "_init_group"), strict=True)
        ):
            return frozenset(entries) - COUNTERS
    return None


class FlatStep:
    """Wraps `step` of an optimizer over sharded parameters.

    Attributes:
        before: called, with further arguments of `step` by name, before the rule may write main weights. *Collective.*
        kernels: settings that choose kernels for a group, in place of the user's while the rule runs.
        steps_unused: a parameter without a gradient is stepped with zeros.
        decoupled: the rule reads gradients as `decoupled_grad`.
    """

    def __init__(self, optimizer: Opt) -> None:
        self.optimizer = optimizer
        self.before: list[Callable[..., None]] = []
        self.kernels: Callable[[Opt, dict[str, Any]], dict[str, bool]] = lambda *_: {}
        self.steps_unused = self.decoupled = False
        self.moments = moments_of(optimizer)
        self._others: dict[str, Any] = {}
        self._began = False
        self._signature: list[Any] | None = None
        self._plan: list[list[Any]] = []
        self._counters: list[Counter] = []
        self._spans: dict[int, Span] = {}
        """By identity of the parameter."""
        self._views: dict[tuple[int, str], Tensor] = {}
        self._saved: tuple[list[dict[str, Any]], Any] | None = None
        """The groups and the state as the program has them, while the rule runs."""
        self._wrap()

    def _wrap(self) -> None:
        optimizer, held = self.optimizer, self.optimizer.step
        rule: Any = type(optimizer).step
        while getattr(rule, "hooked", None) and hasattr(rule, "__wrapped__"):  # below torch's hooks
            rule = rule.__wrapped__

        def step(own: Opt, closure: Callable[[], Any] | None = None) -> Any:
            try:
                if closure is None:
                    self._begin()
                    return rule(own)
                if self.moments is None:  # it may write before it calls the closure
                    self._prepare()
                return rule(own, self._around(closure))
            finally:
                self._end()

        bare = partial(_disable_dynamo, recursive=False)  # whoever compiles `optimizer.step` compiles the rule
        hooked: Any = bare(torch.optim.Optimizer.profile_hook_step(bare(step)))

        @bare
        def outer(own: Any, *args: Any, **kwargs: Any) -> Any:
            own._opt_called = True  # schedulers ask
            self._others = {name: kwargs.pop(name) for name in (SYNC, INSTALL) if name in kwargs}
            if len(args) > 1 or any(value is not None for name, value in kwargs.items() if name != "closure"):
                raise NotImplementedError(
                    f"step({', '.join(kwargs) or '...'}) is not built: step() takes a closure, {SYNC} and {INSTALL}"
                )
            return hooked(own, *args, **{name: value for name, value in kwargs.items() if value is not None})

        if hasattr(held, "_wrapped_by_lr_sched"):  # one that was made before
            outer._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # torch's name
        optimizer.step = types.MethodType(outer, optimizer)  # type: ignore[method-assign] # later schedulers wrap its function

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, in which parameters are themselves."""

        def call() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._begin()
            return loss

        return call

    def _prepare(self) -> None:
        for before in self.before:
            before(**self._others)

    @_disable_dynamo
    def _begin(self) -> None:
        self._prepare()
        self._began = True
        self._exchange()

    @by_engine
    def _exchange(self) -> None:
        """Put flat pieces into the groups."""
        self._take_gradients()
        if self.moments is None:
            self.take_state()
            self._decouple(lambda param: grad_of(param))
            return
        signature = self._sign()
        if signature != self._signature or any(each.is_edited for each in self._counters):
            self._build()
            self._signature = None
        groups, held = self.optimizer.param_groups, self.optimizer.state
        self._saved = [dict(group) for group in groups], held
        state = self.optimizer.state = defaultdict(dict)
        for group, entries in zip(groups, self._plan, strict=True):
            group.update(self.kernels(self.optimizer, group))
            group["params"] = [each.flat if isinstance(each, Piece) else each for each in entries]
            state.update({each: held[each] for each in entries if not isinstance(each, Piece) and each in held})
        for piece in self._pieces():
            put_grad(piece.flat, piece.grad.to(piece.flat.dtype))
            if piece.entries:
                state[piece.flat] = piece.entries

    def _decouple(self, gradient_of: Callable[[Tensor], Tensor | None]) -> None:
        for param in (each for group in self.optimizer.param_groups for each in group["params"] if self.decoupled):
            setattr(param, DECOUPLED, gradient_of(param))

    @_disable_dynamo
    def _end(self) -> None:
        if not self._began:
            return
        self._began = False
        if self._saved is None:
            self._decouple(lambda _: None)
            return
        (groups, state), self._saved = self._saved, None
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({name: saved[name] for name in ("params", *KERNELS) if name in saved})
        found, self.optimizer.state = self.optimizer.state, state
        self._put_state(found)

    @by_engine
    def _put_state(self, found: dict[Tensor, Any]) -> None:
        """Let the program have what the rule keeps of pieces, and of parameters that are not sharded."""
        state, new = self.optimizer.state, list[Piece]()
        for piece in self._pieces():
            put_grad(piece.flat, None)
            torch.autograd.graph.increment_version(piece.flat)  # fused kernels do not
            held = found.pop(piece.flat, None)
            if held is None:
                continue
            made = any(held[key] is not piece.entries.get(key) for key in held) or not piece.entries
            piece.entries = held
            new += [piece] if made or held.keys() - state[piece.params[0]].keys() else []
        self._put_in_order(found, {id(param) for piece in new for param in piece.params})
        for piece in new:
            self._bind(piece)
        if new:
            self._count()
        for counter in self._counters if not new else ():
            counter.tell_params()
        if new or self._signature is None:
            self._signature = self._sign()

    def _put_in_order(self, found: dict[Tensor, Any], made_for: set[int]) -> None:
        """Let parameters have entries in their own order, which is one on all ranks."""
        state = self.optimizer.state
        for group in self.optimizer.param_groups if made_for or found else ():
            for param in group["params"]:
                if id(param) in made_for:
                    state[param]
                elif param in found:
                    state[param] = found[param]

    def _bind(self, piece: Piece) -> None:
        """Let parameters have state that the rule made for their piece."""
        assert self.moments is not None
        for key, value in piece.entries.items():
            if key in self.moments and isinstance(value, Tensor):
                if (piece.start, piece.end) == (piece.span.start, piece.span.end):
                    piece.span.flats.setdefault(key, value)
                part = piece.span.part(key, value.dtype, piece.start, piece.end)
                if part.data_ptr() != value.data_ptr():
                    part.copy_(value)
                piece.entries[key] = part
                for param in piece.params:
                    self.optimizer.state[param][key] = self._view(param, key, part.dtype)
            else:  # of a tensor, each has an element of its own: see `_count`
                for param in piece.params:
                    self.optimizer.state[param][key] = value

    def _count(self) -> None:
        """Let pieces and parameters have elements of counters."""
        kinds: dict[Any, list[Piece]] = {}
        for piece in self._pieces():
            for key, value in piece.entries.items():
                if isinstance(value, Tensor) and key not in (self.moments or ()):
                    kinds.setdefault((key, value.dtype, value.device), []).append(piece)
        self._counters = [Counter(key[0], pieces, self.optimizer.state) for key, pieces in kinds.items()]

    def _view(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        if (id(param), key) not in self._views:
            span, (sharded, index) = self._spans[id(param)], _place_of(param)
            span.part(key, dtype, span.start, span.end)
            self._views[id(param), key] = sharded.view_from(index, span.flats[key], span.start)
        return self._views[id(param), key]

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of moments on this rank: (of parameters, of padding)."""
        spans = {id(span): span for span in self._spans.values()}.values()
        total = sum(flat.nbytes for span in spans for flat in span.flats.values())
        used = 0
        for param, held in self.optimizer.state.items():
            moments = (held.get(key) for key in self.moments or ()) if location_of(param) is not None else ()
            used += sum(local_of(each).numel() * each.itemsize for each in moments if isinstance(each, Tensor))
        return used, max(total - used, 0)

    def chosen(self) -> list[str]:
        """How each group is stepped, and who has chosen that."""
        found = []
        for group in self.optimizer.param_groups:
            own = self.kernels(self.optimizer, group)
            found.append(f"{named({**group, **own})}, {'chosen by the engine' if own else 'as given'}")
        return found

    # -- what is stepped together --------------------------------------------------------------------------------------

    def _pieces(self) -> list[Piece]:
        return [each for entries in self._plan for each in entries if isinstance(each, Piece)]

    def _sign(self) -> list[Any]:
        """What a plan follows from."""
        found, keys = list[Any](), (*(self.moments or ()), *COUNTERS)
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                held = self.optimizer.state.get(param)
                place = getattr(param, LOCATION, None)
                sharded = None if place is None else place[0]()
                where = None if sharded is None else id(sharded.bucket.main_shards)  # spans keep those from before
                state = held and [id(held.get(key)) for key in keys]
                found.append((id(param), where, grad_of(param) is None, state))
            found.append(None)
        return found

    def _take_gradients(self) -> None:
        """Bring gradients that the program has replaced into the main gradients."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                place: Any = getattr(param, LOCATION, None)
                sharded, given = None if place is None else place[0](), grad_of(param)
                if sharded is not None and (given is None or given is not sharded.grads[place[1]]):
                    sharded.take_grad(place[1], zeros=self.steps_unused)

    def take_state(self) -> dict[int, Tensor]:
        """Move state that the program loaded or made to flat moments; returns sharded parameters by identity."""
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        placed = {id(param): param for param in params if location_of(param) is not None}
        if self.moments is None:
            self._cut_state(placed.values())
            return placed
        self._drop_moved(placed.values())
        self._add_spans([param for param in placed.values() if id(param) not in self._spans])
        for param in placed.values():
            self._take_state(param)
        return placed

    @by_engine
    def take_loaded(self) -> None:
        """As `take_state`, right after a load: nothing is shared with whoever the state came from."""
        for param in self.take_state().values():
            held = self.optimizer.state.get(param) or {}
            held.update({key: held[key].clone() for key in COUNTERS & held.keys() if isinstance(held[key], Tensor)})

    def _build(self) -> None:
        groups = self.optimizer.param_groups
        placed = self.take_state()
        self._plan = [[p for p in group["params"] if id(p) not in placed] for group in groups]
        kinds: dict[Any, int] = {}
        of_bucket: dict[int, dict[str, int]] = {}
        where: list[tuple[int, Tensor, int]] = []
        for number, group in enumerate(groups):
            for param in group["params"]:
                if id(param) in placed and grad_of(param) is not None:
                    kind = kinds.setdefault((number, id(self._spans[id(param)]), self._counts(param)), len(kinds))
                    bucket, name = _slot_of(param)
                    of_bucket.setdefault(id(bucket), {})[name] = kind
                    where.append((number, param, kind))
        self._add_pieces(where, of_bucket)
        self._count()

    def _add_pieces(self, where: Sequence[tuple[int, Tensor, int]], kinds: dict[int, dict[str, int]]) -> None:
        by_name = {(id(_slot_of(param)[0]), _slot_of(param)[1]): (number, param) for number, param, _ in where}
        done = set[int]()
        for bucket in {id(_slot_of(param)[0]): _slot_of(param)[0] for _, param, _ in where}.values():
            layout, rank = bucket.layout, bucket.cuts.layout_rank
            for stretch in layout.stretches(rank, kinds[id(bucket)]):
                found = [
                    by_name[id(bucket), slot.spec.name]
                    for slot in layout.slots_in(rank, stretch)
                    if (id(bucket), slot.spec.name) in by_name
                ]
                if found:
                    params = [param for _, param in found]
                    done |= {id(param) for param in params}
                    span = self._spans[id(params[0])]
                    self._add(found[0][0], Piece(span, stretch.start, stretch.end, params))
        empty: dict[int, tuple[int, list[Tensor]]] = {}
        for number, param, kind in where:  # no row of them lies here; they count their steps
            if id(param) not in done:
                empty.setdefault(kind, (number, []))[1].append(param)
        for number, params in empty.values():
            self._add(number, Piece(self._spans[id(params[0])], 0, 0, params))

    def _add(self, group: int, piece: Piece) -> None:
        self._plan[group].append(piece)
        held = self.optimizer.state.get(piece.params[0])
        if not held:
            return
        for key, value in held.items():
            if key in (self.moments or ()) and isinstance(value, Tensor):
                piece.entries[key] = piece.span.part(key, value.dtype, piece.start, piece.end)
            elif key in COUNTERS and isinstance(value, Tensor):
                piece.entries[key] = value.clone()
            elif value is None or key in COUNTERS:
                piece.entries[key] = value
        self._bind(piece)

    def _counts(self, param: Tensor) -> Any:
        held = self.optimizer.state.get(param)
        if not held:
            return None
        moments = tuple(sorted(key for key in self.moments or () if held.get(key) is not None))
        return moments, tuple(float(held[key]) for key in sorted(COUNTERS) if held.get(key) is not None)

    def _drop_moved(self, params: Any) -> None:
        """Forget spans of buckets that were laid out anew; nothing in them had been stepped."""
        for param in params:
            span = self._spans.get(id(param))
            if span is not None and span.shards is not span.bucket.main_shards:
                del self._spans[id(param)]
                self._views = {key: view for key, view in self._views.items() if key[0] != id(param)}

    def _add_spans(self, params: Sequence[Tensor]) -> None:
        buckets = {id(_slot_of(param)[0]): _slot_of(param)[0] for param in params}
        for key, bucket in buckets.items():
            own = {_slot_of(param)[1]: param for param in params if id(_slot_of(param)[0]) == key}
            layout, rank = bucket.layout, bucket.cuts.layout_rank
            for stretch in layout.stretches(rank, dict.fromkeys(own, 0)):
                span = Span(bucket, stretch.segment, stretch.start, stretch.end)
                for slot in layout.slots_in(rank, stretch):
                    self._spans[id(own[slot.spec.name])] = span
            nothing = Span(bucket, 0, 0, 0)
            for param in own.values():
                self._spans.setdefault(id(param), nothing)

    def _cut_state(self, params: Iterable[Tensor]) -> None:
        """Let state of whole parameters that was loaded be sharded as the parameters are."""
        for param in params:
            for key, value in self.optimizer.state.get(param, {}).items():
                whole = isinstance(value, Tensor) and not isinstance(value, RaggedTensor) and value.dim() > 0
                if whole and isinstance(param, RaggedTensor) and value.shape == param.shape:
                    self.optimizer.state[param][key] = distribute_rows(value, param)

    def _take_state(self, param: Tensor) -> None:
        held = self.optimizer.state.get(param)
        for key in self.moments or () if held else ():
            value = held.get(key) if held else None
            if isinstance(value, Tensor) and value is not self._views.get((id(param), key)):
                if value.shape != param.shape:
                    raise ValueError(
                        f"{key} of parameter {getattr(param, HOME)[0]} in the optimizer's state has shape"
                        f" {[*value.shape]}, and the parameter {[*param.shape]}: load the state of this model"
                    )
                view = self._view(param, key, value.dtype)
                fill(view, value)
                self.optimizer.state[param][key] = view


def _place_of(param: Tensor) -> _Place:
    return cast(_Place, location_of(param))


def _slot_of(param: Tensor) -> tuple[Bucket, str]:
    sharded, index = _place_of(param)
    return sharded.bucket, sharded.bucket.layout.slots[index].spec.name
