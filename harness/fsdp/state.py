"""The state of a sharded model as its user sees it, whole, by name, or as this rank's own; and how it is taken back.

Keys are `weights/<parameter>` (main weights; compute weights of frozen parameters), `optimizer/<parameter>/<entry>` and
`fp8/<layer>.<buffer>` (delayed scaling, unsharded and in place). Tensors with the parameter's shape are DTensors over
the engine's own memory, plain ones where nothing cuts them. Counters such as `step` are plain tensors of shape [], one
a parameter, and belong to the caller until `adopt`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.fp8.linear import Fp8Linear
from harness.fsdp.comm.mesh import Everyone
from harness.fsdp.guards.replicas import check_agreed
from harness.fsdp.ragged.tensor import local_of
from harness.fsdp.storage.at_rest import sharded_of
from harness.fsdp.storage.dtensors import as_target, refuse_split_experts
from harness.fsdp.storage.layout import Slot
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import HOME, check_names
from harness.private_torch import loads_in_own_way

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
COUNTER_DTYPE = torch.float32
NOTHING = "nothing"  # entry of a parameter that no step has updated yet
Opt = torch.optim.Optimizer
Held = tuple[ParamGroup, Slot, Tensor, Opt]


class StateMismatch(ValueError, RuntimeError):
    """Names or shapes differ; nothing was loaded. torch raises a RuntimeError."""


def check_fit(pairs: Sequence[tuple[str, Tensor, Tensor]], missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """pairs: name, own tensor, given one. Raises StateMismatch."""
    problems = [
        f"{n} is {list(given.shape)}, the model's {list(o.shape)}" for n, o, given in pairs if given.shape != o.shape
    ]
    problems += [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in unexpected]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        text = "; ".join(problems[:8])
        raise StateMismatch(
            f"state does not fit the model, nothing was loaded: {_renaming(missing, unexpected)}{text}{more}"
        )


def _renaming(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """The prefix that one side's names have and the other's lack, as wrappers make it."""
    for lacks, has, fix in (
        (missing, unexpected, "{{name.removeprefix({0!r}): value for name, value in state.items()}}"),
        (unexpected, missing, "{{{0!r} + name: value for name, value in state.items()}}"),
    ):
        for name in has if lacks else ():
            prefix = name.removesuffix(lacks[0])
            if prefix != name and {prefix + each for each in lacks} == {*has}:
                where = "the state's" if has is unexpected else "the model's"
                return f"{where} names begin with {prefix!r}: load {fix.format(prefix)} instead; "
    return ""


@dataclass
class ShardedState:
    """tensors: the state itself, and copies of counters. taking_back: keys of copies, and their setters."""

    tensors: dict[str, Tensor]
    taking_back: list[tuple[str, Callable[[Tensor], None]]] = field(default_factory=list)

    def adopt(self) -> None:
        for key, take in self.taking_back:
            take(self.tensors[key])


def held_by(buckets: Sequence[ParamGroup], optimizers: Sequence[Opt]) -> Iterator[Held]:
    owner = {id(param): each for each in optimizers for group in each.param_groups for param in group["params"]}
    for bucket in buckets:
        for slot, param in zip(bucket.layout.slots, bucket.views.at_rest, strict=True):
            if id(param) in owner:
                yield bucket, slot, param, owner[id(param)]


def _is_moment(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and (value.dim() > 0 or type(value) is type(param))


def add_optimizers(found: ShardedState, buckets: Sequence[ParamGroup], optimizers: Sequence[Opt]) -> None:
    for _, slot, param, optimizer in held_by(buckets, optimizers):
        held = optimizer.state.get(param) or {}
        for entry, value in held.items():
            key = f"{OPTIMIZER}{slot.spec.name}/{entry}"
            if _is_moment(value, param):
                found.tensors[key] = value.detach()
            elif value is not None:
                found.tensors[key] = (
                    value.detach().to("cpu", copy=True)
                    if isinstance(value, Tensor)
                    else torch.tensor(float(value), dtype=COUNTER_DTYPE)
                )
                found.taking_back.append((key, _setter(held, entry)))


def _setter(held: dict[str, Any], entry: str) -> Callable[[Tensor], None]:
    def take(value: Tensor) -> None:
        if isinstance(held[entry], Tensor):
            held[entry].copy_(value)
        else:
            held[entry] = type(held[entry])(value.item())

    return take


# -- this rank's own ---------------------------------------------------------------------------------------------------


def local_state(buckets: Sequence[ParamGroup], optimizers: Sequence[Opt]) -> dict[str, Tensor]:
    state = _weights(buckets)
    for bucket, slot, param, optimizer in held_by(buckets, optimizers):
        prefix, held = f"{OPTIMIZER}{slot.spec.name}/", optimizer.state.get(param) or {}
        values = {prefix + key: _flat(value, param) for key, value in held.items() if value is not None}
        if bucket.trainable:
            state |= values or {prefix + NOTHING: torch.empty(0)}
    return state


def _weights(buckets: Sequence[ParamGroup]) -> dict[str, Tensor]:
    return {f"{WEIGHTS}{b.name}:{index}": shard.detach() for b in buckets for index, shard in enumerate(b.main_shards)}


def _flat(value: Any, param: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return local_of(value).reshape(-1) if _is_moment(value, param) else value


def load_local_state(buckets: Sequence[ParamGroup], optimizers: Sequence[Opt], state: Mapping[str, Tensor]) -> None:
    """Put back what `local_state` gave on the same layout.

    Raises:
        ValueError: a key is missing, unexpected, or of another shape or dtype; nothing was loaded.
    """
    weights = _weights(buckets)
    held = {f"{OPTIMIZER}{each[1].spec.name}/": each for each in held_by(buckets, optimizers) if each[0].trainable}
    saved: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in held}
    for key in state:
        prefix, slash, entry = key.rpartition("/")
        saved.setdefault(prefix + slash, {})[entry] = state[key]
    entries: dict[int, set[str]] = {}
    for prefix, (*_, optimizer) in held.items():
        entries.setdefault(id(optimizer), set()).update(saved[prefix].keys() - {NOTHING})
    expected = {key: (shard.shape, shard.dtype) for key, shard in weights.items()}
    for prefix, each in held.items():
        keys = {NOTHING} if NOTHING in saved[prefix] else entries[id(each[-1])] or {NOTHING}
        expected |= {prefix + key: _expected(each, key, saved[prefix].get(key)) for key in keys}
    problems = [f"missing {key}" for key in expected if key not in state]
    problems += [f"unexpected {key}" for key in state if key not in expected]
    for key, (shape, dtype) in expected.items():
        if (given := state.get(key)) is not None and (given.shape, given.dtype) != (shape, dtype):
            problems.append(f"{key} is {tuple(given.shape)} {given.dtype}, not {tuple(shape)} {dtype}")
    if problems:
        raise ValueError("state does not fit this layout, nothing was loaded: " + "; ".join(problems[:8]))
    for key, shard in weights.items():
        shard.copy_(state[key])
    for prefix, (_, _, param, optimizer) in held.items():
        _load(param, optimizer, {key: value for key, value in saved[prefix].items() if key != NOTHING})


def _expected(held: Held, key: str, given: Tensor | None) -> tuple[torch.Size, torch.dtype]:
    bucket, _, param, optimizer = held
    if key == NOTHING:
        return torch.Size([0]), torch.float32
    own = (optimizer.state.get(param) or {}).get(key)
    given = torch.empty(0, dtype=bucket.dtypes.main) if given is None else given
    dtype = own.dtype if isinstance(own, Tensor) else bucket.dtypes.main if given.dim() else given.dtype
    return torch.Size([local_of(param).numel()] if given.dim() else []), dtype


def _load(param: Tensor, optimizer: Opt, values: Mapping[str, Tensor]) -> None:
    if not values:
        optimizer.state.pop(param, None)
        return
    held = optimizer.state[param]
    for key in held.keys() - values.keys():
        del held[key]
    for key, value in values.items():
        if value.dim():
            if not isinstance(held.get(key), Tensor):
                held[key] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
            rows = local_of(held[key])
            rows.copy_(value.view(rows.shape))
        else:
            is_plain = key in held and not isinstance(held[key], Tensor)
            held[key] = type(held[key])(value) if is_plain else value.clone()


FP8 = "fp8/"


class StateAccess:
    """weights, gradients: the model's `runtime.weights.Weights` and `runtime.gradient_sync.GradientSync`."""

    def __init__(self, module: nn.Module, weights: Any, gradients: Any) -> None:
        self._module = weakref.ref(module)  # which keeps this
        # the module's class before it was sharded, whose `state_dict` and `load_state_dict` are the program's
        self._own: type[nn.Module] = type(module)
        self.weights, self.gradients = weights, gradients
        self.buckets: Sequence[ParamGroup] = weights.buckets
        self.everyone: Everyone = weights.meshes.everyone

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded main weights by parameter name, on the CPU. *Collective*; run it to its end on all ranks.

        The scales of delayed scaling beside them are those of the next forward.
        """
        self.settle()
        self._fp8_state()
        return self._unsharded(self.buckets, lambda bucket: bucket.main_shards, "weights")

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded finished gradients, as `full_weights`. *Collective*; run it to its end on all ranks."""
        self.gradients.finish()
        self.gradients.collect()
        check_names(self.module)
        return self._unsharded(self._trainable(), lambda bucket: bucket.grad_shards, "gradients")

    def local_gradients(self) -> dict[str, Tensor]:
        """This rank's rows of every finished gradient, flat, by parameter name; not copied."""
        self.gradients.finish()
        self.gradients.collect()
        rows = (each for bucket in self._trainable() for each in bucket.cuts.own_rows(bucket.grad_shards))
        return {name: row.detach() for name, row in rows}

    def _trainable(self) -> list[ParamGroup]:
        return [bucket for bucket in self.buckets if bucket.trainable]

    def settle(self) -> None:
        """Raises RuntimeError: parameters have other names by now; or unsharded ones were edited."""
        self.weights.adopt_edits()
        self.weights.before_edit()  # by whoever is given them
        check_names(self.module)

    def _unsharded(
        self, buckets: Sequence[ParamGroup], shards_of: Callable[[ParamGroup], list[Tensor]], what: str
    ) -> Iterator[tuple[str, Tensor]]:
        present = {name for bucket in buckets for name, _ in bucket.params}
        homes = (getattr(param, HOME)[0] for _, param in self.module.named_parameters())
        order = [name for name in homes if name in present]
        early: dict[str, Tensor] = {}
        place = 0
        for bucket in buckets:
            group = None if bucket.tp is None else bucket.tp.group
            slices = bucket.named_slices(bucket.gather_whole(shards_of(bucket), what))
            for slot, (name, view) in zip(bucket.layout.slots, slices, strict=True):
                early[name] = bucket.tp_shard_of(slot).join(view.detach(), group).to("cpu", copy=True)
                while place < len(order) and order[place] in early:
                    yield order[place], early.pop(order[place])
                    place += 1

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
        """The module's own `state_dict`: main weights as DTensors over the engine's memory, the first rank's buffers.
        *Collective* where there are buffers.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
            RuntimeError: on all ranks: a buffer has another shape or dtype on one of them.
        """
        self.settle()
        refuse_split_experts(self.buckets)
        to: dict[str, Any] = {"destination": destination, "prefix": prefix} if destination is not None or prefix else {}
        found: dict[str, Any] = self._own.state_dict(self.module, keep_vars=True, **to)
        buffers = {id(each) for each in self.module.buffers()}
        kinds = [
            (f"buffer {name}", f"{each.dtype} {each.layout} {list(each.shape)}")
            for name, each in found.items()
            if id(each) in buffers
        ]
        if kinds:
            check_agreed(
                kinds,
                self.everyone,
                "kinds of buffers",
                "ranks have other buffers, and what is saved of buffers is the first rank's",
                "Give each the same shape and dtype on all ranks, or leave it out of what is saved:"
                " register_buffer(..., persistent=False)",
            )
        of_rank_0: dict[int, Tensor] = {}
        for name, entry in found.items():
            if id(entry) in buffers:
                if id(entry) not in of_rank_0:
                    of_rank_0[id(entry)] = self.everyone.from_first(entry, f"saved {name}").clone()
                found[name] = of_rank_0[id(entry)]
            elif isinstance(entry, Tensor):
                found[name] = sharded_of(entry).detach()
        return found

    def load_state_dict(self, given: Mapping[str, Any], *, strict: bool) -> Any:
        """Load by the module's own `load_state_dict`; gradients wait for their step. *Collective.*

        Raises:
            StateMismatch: with `strict` a name is missing or unexpected; or a shape differs. Nothing was loaded.
            RuntimeError: the same, found by a module that loads in a way of its own.
        """
        self.weights.refuse_held()
        self.settle()
        unsharded = [bucket for bucket in self.buckets if (held := bucket.views.sharded()) and held.shows_unsharded]
        for bucket in self.buckets:
            bucket.rest()
        try:
            return self._load(given, strict=strict)
        finally:
            for bucket in unsharded:
                bucket.use()

    def _load(self, given: Mapping[str, Any], *, strict: bool) -> Any:
        own = self._own.state_dict(self.module, keep_vars=True)
        parts = [(self._own if part is self.module else type(part), part) for part in self.module.modules()]
        if not any(_loads_otherwise(kind, part) for kind, part in parts):
            _check(own, given, strict=strict)
        by_entry = {id(own[name]): value for name, value in given.items() if name in own}
        tied = {name: by_entry[id(entry)] for name, entry in own.items() if name not in given and id(entry) in by_entry}
        found: Any = self._own.load_state_dict(
            self.module,
            {name: as_target(value, _sharded(own.get(name))) for name, value in {**given, **tied}.items()},
            **({} if strict else {"strict": False}),
        )
        return found

    def sharded_state(self, stepped: Sequence[torch.optim.Optimizer]) -> ShardedState:
        self.settle()
        refuse_split_experts(self.buckets)
        found = self._own_memory(stepped)
        found.tensors |= self._fp8_state()
        return found

    def _own_memory(self, stepped: Sequence[torch.optim.Optimizer]) -> ShardedState:
        found = ShardedState(
            {
                WEIGHTS + name: bucket.views.sharded().view(index, bucket.main_shards)
                for bucket in self.buckets
                for index, (name, _) in enumerate(bucket.params)
            }
        )
        add_optimizers(found, self.buckets, stepped)
        return found

    def _fp8_state(self) -> dict[str, Tensor]:
        """Buffers of delayed scaling, the same on all ranks; in place. *Collective* after a step."""
        if Fp8Linear.delayed_state(self.module):
            self.weights.bring_up_to_date()
        return {FP8 + name: buffer for name, buffer in Fp8Linear.delayed_state(self.module).items()}

    def adopt_state(self, state: ShardedState, stepped: Sequence[torch.optim.Optimizer]) -> None:
        """Make what was written into `sharded_state` count from now on, and forget gradients. *Collective.*

        Raises:
            ValueError: it is the state of another model, or a copy; nothing has changed.
        """
        own = self._own_memory(stepped)
        copies = {key for key, _ in (*own.taking_back, *state.taking_back)}
        held = {key: each for key, each in state.tensors.items() if key not in copies and not key.startswith(FP8)}
        for key, given in held.items():
            if key not in own.tensors or _memory(given) != _memory(own.tensors[key]):
                raise ValueError(
                    f"{key} of this state is not in this model's memory: the state is another model's, a copy, or from"
                    " before parameters moved, and nothing of it would arrive. Write into what sharded_state() of this"
                    " model gives now (tensors[name].copy_(values)), and adopt that; or use"
                    " load_state_dict(other.state_dict())"
                )
        state.adopt()
        self._written()

    def local_state(self, stepped: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
        self.weights.adopt_edits()
        self.weights.wait()
        return local_state(self.buckets, _some(stepped)) | self._fp8_state()

    def load_local_state(self, values: Mapping[str, Tensor], stepped: Sequence[torch.optim.Optimizer]) -> None:
        """Forgets gradients. *Collective.*

        Raises:
            ValueError: it does not fit; nothing was loaded.
            RuntimeError: there is no optimizer.
        """
        self.weights.before_edit()
        scales = self._fp8_state()
        check_fit(
            [(name, buffer, values[name]) for name, buffer in scales.items() if name in values],
            [name for name in scales if name not in values],
            [name for name in values if name.startswith(FP8) and name not in scales],
        )
        rest = {name: value for name, value in values.items() if not name.startswith(FP8)}
        load_local_state(self.buckets, _some(stepped), rest)
        for name, buffer in scales.items():
            buffer.copy_(values[name])
        self._written()

    def _written(self) -> None:
        self.weights.install()
        self.gradients.forget()


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Where this rank's rows begin, and how many numbers they are."""
    rows = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return rows.data_ptr() if rows.numel() else 0, rows.numel()


def _some(stepped: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
    if not stepped:
        raise RuntimeError("no optimizer is attached; call fully_shard_optimizer(model, optimizer) first")
    return stepped


def _loads_otherwise(kind: type[nn.Module], part: nn.Module) -> bool:
    """The program's own code decides which names and shapes are right. kind: the part's own class."""
    return kind.load_state_dict is not nn.Module.load_state_dict or loads_in_own_way(kind, part)


COUNT = "num_batches_tracked"  # torch's batch norms did not save it once, and do without


def _check(own: Mapping[str, Any], given: Mapping[str, Any], *, strict: bool) -> None:
    present = {id(own[name]) for name in given if name in own}
    missing = [name for name, entry in own.items() if id(entry) not in present and not name.endswith(COUNT)]
    unexpected = [name for name in given if name not in own]
    pairs = [(n, own[n], value) for n, value in given.items() if isinstance(own.get(n), Tensor)]
    check_fit(pairs, missing if strict else [], unexpected if strict else [])


def _sharded(entry: Any) -> Any:
    return sharded_of(entry) if isinstance(entry, Tensor) else entry
