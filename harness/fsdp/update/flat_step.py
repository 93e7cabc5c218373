"""A flat step: torch's elementwise rules update few flat pieces of main weights in place of many sharded parameters.

[Note: Flat step] Flat pieces stand in the optimizer's groups only while its rule runs, below torch's step hooks: hooks,
closures and exception handlers see sharded parameters. State is by parameter: moments are views of flat ones, `step`
and its like one element each. A piece is a run of neighbours of one bucket and group with gradients and equal counters.
Any other rule (LAMB, a class with its own `step`) steps the sharded parameters themselves.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.fsdp.ragged import RaggedTensor, distribute_rows
from harness.fsdp.storage.at_rest import LOCATION, ShardedParameters, location_of
from harness.fsdp.storage.dtensors import fill
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import HOME, by_engine, grad_of, put_grad
from harness.fsdp.tensor_parallel import values_here
from harness.fsdp.update.matrices import MatrixStep
from harness.fsdp.update.rules import COUNTERS, KERNELS, kernel_settings, moments_of
from harness.private_torch import note_step, tree_map_only, version_of

SYNC, INSTALL = "sync_grad_before_optimizer_step", "install_optimized_model_weights"
"""Arguments of `step` beside a closure, True by default: megatron-fsdp's names."""
Opt = torch.optim.Optimizer
_Place = tuple[ShardedParameters, int]
_Stepped = tuple[int, Tensor, int]  # number of its group, the parameter, and one number for those that step alike


@dataclass(eq=False)
class Span:
    bucket: ParamGroup
    segment: int
    start: int
    end: int
    flats: dict[str, Tensor] = field(default_factory=dict)

    def part(self, key: str, dtype: torch.dtype, start: int, end: int) -> Tensor:
        if key not in self.flats:
            like = self.bucket.main_shards[self.segment][self.start : self.end]
            self.flats[key] = torch.zeros_like(like, dtype=dtype, requires_grad=False)
        return self.flats[key][start - self.start : end - self.start]


@dataclass(eq=False)
class Piece:
    span: Span
    start: int
    end: int
    params: list[Tensor]
    entries: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flat = self.span.bucket.main_shards[self.span.segment][self.start : self.end].detach().requires_grad_()

    @property
    def grad(self) -> Tensor:
        return cast(Gradients, self.span.bucket.gradients).main_shards[self.span.segment][self.start : self.end]


class Counter:
    def __init__(self, key: str, pieces: Sequence[Piece], state: Any) -> None:
        self.of_pieces = torch.stack([piece.entries[key] for piece in pieces])
        places = [place for place, piece in enumerate(pieces) for _ in piece.params]
        self.index = torch.tensor(places, device=self.of_pieces.device)
        self.of_params = self.of_pieces[self.index]
        for piece, element in zip(pieces, self.of_pieces.unbind(), strict=True):
            piece.entries[key] = element
        self.elements = self.of_params.unbind()  # kept, so that nothing that replaces one has its identity
        params = (param for piece in pieces for param in piece.params)
        for param, element in zip(params, self.elements, strict=True):
            state[param][key] = element
        self.version = version_of(self.of_params)

    def tell_params(self) -> None:
        torch.index_select(self.of_pieces, 0, self.index, out=self.of_params)
        self.version = version_of(self.of_params)

    @property
    def is_edited(self) -> bool:
        return version_of(self.of_params) != self.version


class FlatStep:
    """before: called, with further arguments of `step`, before the rule may write main weights. *Collective.* unfused:
    see `kernel_settings`. steps_unused: None is stepped as zeros. matrices: step what is
    needed whole, and call the rule for the rest. agree: called before that, once gradients are known. *Collective.*
    """

    def __init__(self, optimizer: Opt, matrices: MatrixStep | None = None) -> None:
        self.optimizer, self.matrices = optimizer, matrices
        self.before: list[Callable[..., None]] = []
        self.unfused = self.steps_unused = False
        self.agree: Callable[[Opt], None] = lambda _: None
        self.moments = moments_of(optimizer)
        self._others: dict[str, Any] = {}
        self._signature: list[Any] | None = None
        self._plan: list[list[Any]] = []
        self._counters: list[Counter] = []
        self._spans: dict[int, Span] = {}
        self._views: dict[tuple[int, str], Tensor] = {}
        self._saved: tuple[list[dict[str, Any]], Any] | None = None
        self._wrap()

    def _wrap(self) -> None:
        optimizer, held = self.optimizer, self.optimizer.step
        rule: Any = type(optimizer).step
        while getattr(rule, "hooked", None) and hasattr(rule, "__wrapped__"):  # below torch's hooks
            rule = rule.__wrapped__

        begin, end = map(torch.compiler.disable, (FlatStep._begin, FlatStep._end))

        def around(closure: Callable[[], Any]) -> Any:
            with torch.enable_grad():
                loss = closure()
            begin(self)
            return loss

        def step(own: Opt, closure: Callable[[], Any] | None = None) -> Any:
            try:
                if self.matrices is not None:
                    loss = begin(self) if closure is None else around(closure)
                    self.matrices.step(own, rule)
                    return loss
                if closure is None:
                    begin(self)
                    return rule(own)
                if self.moments is None:  # it may write before it calls the closure
                    self._prepare()
                return rule(own, partial(around, closure))
            finally:
                end(self)

        bare = partial(torch.compiler.disable, recursive=False)  # whoever compiles `optimizer.step` compiles the rule
        hooked: Any = bare(torch.optim.Optimizer.profile_hook_step(bare(step)))

        @bare
        def outer(own: Any, *args: Any, **kwargs: Any) -> Any:
            note_step(own)
            self._others = {name: kwargs.pop(name) for name in (SYNC, INSTALL) if name in kwargs}
            if len(args) > 1 or any(value is not None for name, value in kwargs.items() if name != "closure"):
                raise NotImplementedError(
                    f"step({', '.join(kwargs) or '...'}) is not built: step() takes a closure, {SYNC} and {INSTALL}"
                )
            return hooked(own, *args, **{name: value for name, value in kwargs.items() if value is not None})

        if "step" in vars(optimizer):  # a scheduler that was made before has marked it
            vars(outer).update(vars(held))
        optimizer.step = types.MethodType(outer, optimizer)  # type: ignore[method-assign] # later schedulers wrap its function

    def _prepare(self) -> None:
        for before in self.before:
            before(**self._others)

    def _begin(self) -> None:
        self._prepare()
        self._exchange()

    @by_engine
    def _exchange(self) -> None:
        self._take_gradients()
        if self.matrices is not None and not self.steps_unused:
            self.agree(self.optimizer)
        if self.moments is None:
            self.take_state()
            return
        signature = self._sign()
        if signature != self._signature or any(each.is_edited for each in self._counters):
            self._build()
            self._signature = None
        groups, held = self.optimizer.param_groups, self.optimizer.state
        self._saved = [dict(group) for group in groups], held
        state = self.optimizer.state = defaultdict(dict)
        for group, entries in zip(groups, self._plan, strict=True):
            group.update(kernel_settings(self.optimizer, group, unfused=self.unfused))
            group["params"] = [each.flat if isinstance(each, Piece) else each for each in entries]
            state.update({each: held[each] for each in entries if not isinstance(each, Piece) and each in held})
        for piece in self._pieces():
            put_grad(piece.flat, piece.grad.to(piece.flat.dtype))
            if piece.entries:
                state[piece.flat] = piece.entries

    def _end(self) -> None:
        if self._saved is None:
            return
        (groups, state), self._saved = self._saved, None
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({name: saved[name] for name in ("params", *KERNELS) if name in saved})
        found, self.optimizer.state = self.optimizer.state, state
        self._put_state(found)

    @by_engine
    def _put_state(self, found: dict[Tensor, Any]) -> None:
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
        for piece in new:
            self._bind(piece)
        state.update(found)
        params = [param for group in self.optimizer.param_groups for param in group["params"] if new or found]
        for param in (each for each in params if each in state):  # in their order, whatever pieces lie here
            state[param] = state.pop(param)
        if new:
            self._count()
        else:
            for counter in self._counters:
                counter.tell_params()
        if new or self._signature is None:
            self._signature = self._sign()

    def _bind(self, piece: Piece) -> None:
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
        kinds: dict[Any, list[Piece]] = {}
        for piece in self._pieces():
            for key, value in piece.entries.items():
                if isinstance(value, Tensor) and key not in (self.moments or ()):
                    kinds.setdefault((key, value.dtype, value.device), []).append(piece)
        self._counters = [Counter(key[0], pieces, self.optimizer.state) for key, pieces in kinds.items()]

    def _view(self, param: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        if (id(param), key) not in self._views:
            span, (sharded, index) = self._spans[id(param)], cast(_Place, location_of(param))
            span.part(key, dtype, span.start, span.end)
            self._views[id(param), key] = sharded.view_from(index, span.flats[key], span.start)
        return self._views[id(param), key]

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of moments on this rank: (of parameters, of padding)."""
        spans = {id(span): span for span in self._spans.values()}.values()
        total = sum(flat.nbytes for span in spans for flat in span.flats.values())
        whole = {id(param) for _, param in self.matrices.params(self.optimizer)} if self.matrices is not None else ()
        used = apart = 0
        for param, held in self.optimizer.state.items():
            keys = held if id(param) in whole else self.moments or ()
            moments = (held.get(key) for key in keys) if location_of(param) is not None else ()
            found = sum(values_here(each).numel() * each.itemsize for each in moments if isinstance(each, Tensor))
            used += found
            apart += found if id(param) in whole else 0
        return used, max(total + apart - used, 0)

    # -- what is stepped together --------------------------------------------------------------------------------------

    def _pieces(self) -> list[Piece]:
        return [each for entries in self._plan for each in entries if isinstance(each, Piece)]

    def _sign(self) -> list[Any]:
        found, keys = list[Any](), (*(self.moments or ()), *COUNTERS)
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                held = self.optimizer.state.get(param)
                state = held and [id(held.get(key)) for key in keys]
                found.append((id(param), grad_of(param) is None, state))
            found.append(None)
        return found

    def _take_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                place: Any = getattr(param, LOCATION, None)  # `location_of` would be a call for each parameter
                sharded, given = None if place is None else place[0](), grad_of(param)
                if sharded is not None and (given is None or given is not sharded.grads[place[1]]):
                    sharded.take_grad(place[1], zeros=self.steps_unused)

    def take_state(self) -> dict[int, Tensor]:
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        placed = {id(param): param for param in params if location_of(param) is not None}
        if self.matrices is not None:
            self.matrices.settle(self.optimizer)
            for _, param in self.matrices.params(self.optimizer):
                del placed[id(param)]
        if self.moments is None:
            self._cut_state(placed.values())
            return placed
        self._add_spans([param for param in placed.values() if id(param) not in self._spans])
        for param in placed.values():
            self._take_state(param)
        return placed

    @by_engine
    def take_loaded(self) -> None:
        for param in self.take_state().values():
            held = self.optimizer.state.get(param) or {}
            held.update({key: held[key].clone() for key in COUNTERS & held.keys() if isinstance(held[key], Tensor)})

    def _build(self) -> None:
        groups = self.optimizer.param_groups
        placed = self.take_state()
        self._plan = [[p for p in group["params"] if id(p) not in placed] for group in groups]
        kinds: dict[Any, int] = {}
        stepped: dict[ParamGroup, dict[str, _Stepped]] = {}
        for number, group in enumerate(groups):
            for param in group["params"]:
                if id(param) in placed and grad_of(param) is not None:
                    alike = number, id(self._spans[id(param)]), self._counts(param)
                    kind = kinds.setdefault(alike, len(kinds))
                    bucket, name = _slot_of(param)
                    stepped.setdefault(bucket, {})[name] = number, param, kind
        for bucket, by_name in stepped.items():
            self._add_pieces(bucket, by_name)
        self._count()

    def _add_pieces(self, bucket: ParamGroup, stepped: dict[str, _Stepped]) -> None:
        rank, done = bucket.cuts.layout_rank, set[int]()
        for run in bucket.layout.runs(rank, {name: kind for name, (_, _, kind) in stepped.items()}):
            names = (slot.spec.name for slot in bucket.layout.slots_in(rank, run))
            found = [stepped[name] for name in names if name in stepped]
            if found:
                params = [param for _, param, _ in found]
                done |= set(map(id, params))
                self._add(found[0][0], Piece(self._spans[id(params[0])], run.start, run.end, params))
        empty: dict[int, tuple[int, list[Tensor]]] = {}
        for number, param, kind in stepped.values():  # no row of them lies here; they count their steps
            if id(param) not in done:
                empty.setdefault(kind, (number, []))[1].append(param)
        for number, params in empty.values():
            self._add(number, Piece(self._spans[id(params[0])], 0, 0, params))

    def _add(self, group: int, piece: Piece) -> None:
        self._plan[group].append(piece)
        held = self.optimizer.state.get(piece.params[0])
        for key, value in held.items() if held else ():
            if key in (self.moments or ()) and isinstance(value, Tensor):
                piece.entries[key] = piece.span.part(key, value.dtype, piece.start, piece.end)
            elif value is None or key in COUNTERS:
                piece.entries[key] = value.clone() if isinstance(value, Tensor) else value
        self._bind(piece)

    def _counts(self, param: Tensor) -> Any:
        held = self.optimizer.state.get(param)
        if not held:
            return None
        moments = tuple(sorted(key for key in self.moments or () if held.get(key) is not None))
        return moments, tuple(float(held[key]) for key in sorted(COUNTERS) if held.get(key) is not None)

    def _add_spans(self, params: Sequence[Tensor]) -> None:
        by_bucket: dict[ParamGroup, dict[str, Tensor]] = {}
        for param in params:
            bucket, name = _slot_of(param)
            by_bucket.setdefault(bucket, {})[name] = param
        for bucket, own in by_bucket.items():
            layout, rank = bucket.layout, bucket.cuts.layout_rank
            for run in layout.runs(rank, dict.fromkeys(own, 0)):
                span = Span(bucket, run.segment, run.start, run.end)
                self._spans |= {id(own[slot.spec.name]): span for slot in layout.slots_in(rank, run)}
            nothing = Span(bucket, 0, 0, 0)
            for param in own.values():
                self._spans.setdefault(id(param), nothing)

    def _cut_state(self, params: Iterable[Tensor]) -> None:
        for param in params:
            held = self.optimizer.state.get(param, {})
            if not isinstance(param, DTensor):
                held.update(tree_map_only(DTensor, DTensor.full_tensor, dict(held)))
            for key, value in held.items() if isinstance(param, RaggedTensor) else ():
                unsharded = isinstance(value, Tensor) and not isinstance(value, RaggedTensor) and value.dim() > 0
                if unsharded and value.shape == param.shape:
                    held[key] = distribute_rows(value, cast(DTensor, param))

    def _take_state(self, param: Tensor) -> None:
        held = self.optimizer.state.get(param) or {}
        for key in self.moments or ():
            value = held.get(key)
            if isinstance(value, Tensor) and value is not self._views.get((id(param), key)):
                if value.shape != param.shape:
                    raise ValueError(
                        f"{key} of parameter {getattr(param, HOME)[0]} in the optimizer's state has shape"
                        f" {[*value.shape]}, and the parameter {[*param.shape]}: load the state of this model"
                    )
                held[key] = view = self._view(param, key, value.dtype)
                fill(view, value)


def _slot_of(param: Tensor) -> tuple[ParamGroup, str]:
    sharded, index = cast(_Place, location_of(param))
    return sharded.bucket, sharded.bucket.layout.slots[index].spec.name
