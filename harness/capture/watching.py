"""Observations of one rank: gradients as autograd hands them over and as the optimizer takes them, and weights.

Roundings in series through a model, counted on the graph that autograd keeps of one forward.

[Note: Counted graph] Bounds of a verdict need the number of operations through which a signal passes in turn. The
graph of a forward has them: the longest chain of its nodes, without those that only move numbers. A node of torch may
round more than once (a softmax, a norm), so each counts as `ROUNDINGS`. A compiled region, or a checkpoint that is
re-entrant, hides its operations in one node; without any product in the graph the matrices of the model are counted,
`BY_MATRIX` roundings each.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from harness.capture import shards
from harness.capture.parts import WIDTHS
from harness.capture.shards import Parts, Shard, named, plain_name
from harness.probe.hooks import ParameterHooks
from harness.probe.step_checks.pieces import NOTHING, Piece, local_part, sketches
from harness.probe.step_checks.sketch import Place, Signs, Sketch, added
from harness.probe.step_checks.table import StepTable

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class Watching:
    """Observations of the present step, in hooks that stay for the whole run.

    Args: optimizer, parts: as `watch` is given them. guard: keeps what its function raises from whoever called it.
    """

    def __init__(self, models: list[nn.Module], optimizer: Any, parts: Parts | None, guard: Guard) -> None:
        optimizers = optimizers_of(optimizer)
        self.models, self.optimizers, self._guard = models, optimizers, guard
        self._find: Callable[[], shards.Found] = partial(shards.find, models, optimizer, parts)
        self.params = named(models)
        self.found = self._find()
        self.index = {name: place for place, name in enumerate(self.shards)}
        self.decayed: set[str] = set()
        self.lr: float | None = None
        """Learning rate of the first parameter group in the last update."""
        self.signs = Signs()
        self.counted = Counted()
        self.compute: set[torch.dtype] = set()
        """Dtypes of what modules gave in the first forward."""
        self.grads: set[torch.dtype] = set()
        self.initial: dict[str, int] = {}
        self.forwards = 0
        states = [value for each in optimizers for state in each.state.values() for value in state.values()]
        self.is_fresh = not any(local_part(value).any() for value in states if isinstance(value, Tensor))
        """True if no optimizer had a state but noughts before the first step."""
        self._handles: list[Any] = []
        self._first: list[Any] = []
        self._listen(guard)
        self.begin(looks=True, captured=False)
        if not optimizers:  # with one, weights may still be loaded until its first update
            self.initial = self.digests(torch.float32)

    @property
    def shards(self) -> dict[str, Shard]:
        return self.found.shards

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _listen(self, guard: Guard) -> None:
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(guard(self._before_update)))
        for model in self.models:
            kinds = ((type(each).__name__, getattr(each, "_compiled_call_impl", None)) for each in model.modules())
            if any(name == "OptimizedModule" or compiled is not None for name, compiled in kinds):
                continue  # its hooks would be compiled too
            self._handles.append(model.register_forward_hook(guard(self._forward_ended)))
            hooks = ParameterHooks(model, guard(self._local_gradient), lambda name, weight: None)
            hooks.__enter__()
            self._handles.append(hooks)
            leaves = [module for module in model.modules() if not [*module.children()]]
            self._first += [leaf.register_forward_hook(guard(self._leaf_ended)) for leaf in leaves]

    def close(self) -> None:
        for handle in (*self._handles, *self._first):
            handle.remove()
        self._handles.clear()

    def _leaf_ended(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            self.compute.add(output.dtype)

    def _forward_ended(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.forwards += any(found.requires_grad for found in _tensors(output))
        if not self.counted.roundings:
            self.counted = count(output)

    def _local_gradient(self, raw: str, gradient: Tensor) -> None:
        if not self.looks:
            return
        shape, held = self.found.by_parameter.get(plain_name(raw), ((), []))
        found = gradient.detach()
        if isinstance(found, DTensor) or found.shape != shape:
            return
        for shard in held:
            if shard.whole is not None:
                self._local_part(shard, found.reshape(-1)[slice(*shard.whole)].view(shard.shape))

    def _local_part(self, shard: Shard, gradient: Tensor) -> None:
        place = Place.whole(shard.shape)
        found = self.signs.sketch(shard.name, shard.shape, gradient, place)
        self.local.append((self.index[shard.name], found))
        if self.is_captured:
            wide, key = gradient.to("cpu", torch.float64), f"local/{shard.name}"
            held = self.kept.get(key)
            self.kept[key] = wide if held is None else held + wide

    def _before_update(self, optimizer: Optimizer, args: Any, keywords: Any) -> Any:
        """Look at the gradients, or have a look where the optimizer itself calls for them (`step(closure)`)."""
        closure = next((each for each in (*args, *keywords.values()) if callable(each)), None)
        if closure is None:
            self._update(optimizer)
            return None

        def watched() -> Any:
            found = closure()
            self._guard(self._update)(optimizer)
            return found

        given = {key: watched if each is closure else each for key, each in keywords.items()}
        return tuple(watched if each is closure else each for each in args), given

    def _update(self, optimizer: Optimizer) -> None:
        if bool(getattr(optimizer, "found_inf", False)):  # a GradScaler lets a fused optimizer leave the update out
            return
        if not self.updated:
            self.lr = float(optimizer.param_groups[0]["lr"])  # now: a schedule may move it before the step ends
            self._first_update()
        self.updated += [id(param) for group in optimizer.param_groups for param in group["params"]]
        if not self.looks:
            return
        held: dict[int, list[Shard]] = {}
        for shard in self.shards.values():
            held.setdefault(id(shard.source), []).append(shard)
        for group in optimizer.param_groups:
            for param in group["params"]:
                for shard in held.get(id(param), ()):
                    if group.get("weight_decay", 0.0):
                        self.decayed.add(shard.name)
                    self._reduced_gradient(shard, param, optimizer)

    def _first_update(self) -> None:
        for handle in self._first:
            handle.remove()
        if not self.initial:
            self.initial = self.digests(torch.float32)
        if not self.looks:
            return
        self.table.put("begin", sketches(self.signs, self.shards.values(), squares=False))
        if self.is_captured:
            self.keep("before")

    def _reduced_gradient(self, shard: Shard, param: Tensor, optimizer: Optimizer) -> None:
        if not shard.blocks:
            return
        at = self.index[shard.name]
        if param.grad is None:
            self.reduced[at] = NOTHING
            return
        local = local_part(param.grad)
        self.grads.add(local.dtype)
        if local.shape != local_part(param).shape:
            return
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler: a fused optimizer divides by it itself
        gradient = local if scale is None else local / scale.to(local.device)
        here = shard.within(gradient)
        self.reduced[at] = shard.sketch(self.signs, here)
        if self.is_captured:
            self.kept[f"gradient/{shard.name}"] = here.clone()
            for entry, moment in optimizer.state.get(param, {}).items():
                if isinstance(moment, Tensor) and local_part(moment).shape == local.shape and local.ndim:
                    self.kept[f"moment/{shard.name}/{entry}"] = shard.within(moment).clone()

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin(self, *, looks: bool, captured: bool) -> None:
        """Begin a step. Args: looks: see its tensors. captured: keep them whole."""
        self.looks = looks
        self.table = StepTable(len(self.shards), WIDTHS, torch.nan)
        self.local: list[tuple[int, Sketch]] = []
        self.reduced: dict[int, Sketch] = {}
        """By the index of the tensor; copied from a device at the end, as a copy waits for it."""
        self.updated: list[int] = []
        """Parameters that were stepped, one after another."""
        self.is_captured = captured
        self.kept: dict[str, Tensor] = {}
        """Pieces of a captured step, by the names that `harness.probe.capture` gives them."""

    def end(self) -> None:
        """Look at the weights after the step. Raises `ValueError`: the model has other parameters than at first."""
        self.follow()
        if not self.looks:
            return
        self.table.put("after", sketches(self.signs, self.shards.values()))
        local, seen = added(self.local, len(self.shards)), sorted({at for at, _ in self.local})
        self.table.put("local", Sketch(local.values[seen], local.squares[seen]), seen)
        if self.reduced:
            self.table.put("reduced", Sketch.stack([*self.reduced.values()]), [*self.reduced])
        if self.is_captured:
            self.keep("after")

    def follow(self) -> None:
        """Take new parameters under the old names."""
        now = named(self.models)
        if [*now] != [*self.params]:
            odd = sorted(now.keys() ^ self.params.keys())
            what = ", ".join(odd[:3]) or "their order"
            raise ValueError(f"the model's parameters are others than when it began: {what}")
        if any(param is not self.params[name][1] for name, (_, param) in now.items()):
            before, self.found = self.shards, self._find()
            odd = [name for name, shard in self.shards.items() if shard.shape != before[name].shape]
            if odd:
                raise ValueError(f"the model's parameters have other shapes than when it began: {', '.join(odd[:3])}")
        self.params = now

    def keep(self, prefix: str) -> None:
        self.kept |= {f"{prefix}/{name}": local.clone() for name, local in self.weights().items()}

    def weights(self) -> dict[str, Tensor]:
        return {name: shard.local for name, shard in self.shards.items() if shard.blocks}

    def digests(self, dtype: torch.dtype | None = None) -> dict[str, int]:
        return {
            name: digest(self.shards[name], local.to(dtype or local.dtype)) for name, local in self.weights().items()
        }


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """Optimizers of torch, out of what wraps them; those of other kinds have no hooks, and are left out."""
    several = [(each, getattr(each, "optimizer", None)) for each in shards.several(optimizer)]
    found = [inner if isinstance(inner, Optimizer) else each for each, inner in several]  # as accelerate keeps it
    return [each for each in found if isinstance(each, Optimizer)]


AT_ONCE = 1 << 20
"""Elements of a part; a part takes some 40 bytes an element meanwhile."""
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd factors with bits everywhere: of splitmix64 and murmur3, as signed numbers."""


def digest(piece: Piece, local: Tensor) -> int:
    """Sum over a piece's elements modulo 2**64; pieces of a tensor add up to the whole."""
    width, seed = math.prod(piece.shape[1:]), zlib.crc32(piece.name.encode())
    flat = local.contiguous().view(BITS[local.element_size()]).reshape(-1)
    total = 0
    for block in piece.own:
        (top, _), (left, right) = block.place.rows, block.place.columns
        bits, wide = flat[block.begin : block.end], right - left
        for begin in range(0, bits.numel(), AT_ONCE):
            part = bits[begin : begin + AT_ONCE].to(torch.int64)
            at = torch.arange(begin, begin + part.numel(), device=part.device)
            index = (top + at // wide) * width + left + at % wide
            mixed = part * ODD[0] + (index + seed) * ODD[1]
            mixed = (mixed ^ (mixed >> 29)) * ODD[2]
            mixed = (mixed ^ (mixed >> 32)) * ODD[0]
            total += int((mixed ^ (mixed >> 31)).sum())
    return total % 2**64


ROUNDINGS = 2
BY_MATRIX = 6
MOVING = (
    "Alias", "AsStrided", "Clone", "Detach", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze",
    "T", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View", "Cat", "Stack", "AccumulateGrad", "Embedding",
)  # fmt: skip
"""Beginnings of names of nodes that round nothing."""
PRODUCTS = ("Mm", "Bmm", "Addmm", "Baddbmm", "Convolution", "Linear", "ScaledDotProduct", "Mv", "Dot")


class Counted(NamedTuple):
    roundings: int = 0
    products: int = 0


def of_model(model: Iterable[nn.Module], counted: Counted) -> dict[str, int]:
    """Depth by a graph, or by the matrices of a model where the graph shows less; `inner`: most terms of a product."""
    matrices = [param.shape for each in model for param in each.parameters() if param.ndim > 1]
    inner = max([1, *(max(shape[0], shape[1:].numel()) for shape in matrices)])
    least = Counted(BY_MATRIX * len(matrices), len(matrices)) if counted.products < 1 else Counted(1, 1)
    most = Counted(*map(max, counted, least))
    return {**most._asdict(), "inner": inner}


def count(output: Any) -> Counted:
    """Longest chains behind the tensors of a module's output."""
    longest: dict[Any, Counted] = {}
    roots = [found.grad_fn for found in _tensors(output) if found.grad_fn is not None]
    waiting = list(roots)
    while waiting:
        node = waiting[-1]
        behind = [found for found, _ in node.next_functions if found is not None]
        missing = [found for found in behind if found not in longest]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if node not in longest:
            own, below = _own(node.name()), [longest[found] for found in behind]
            longest[node] = Counted(*map(sum, zip(own, map(max, Counted(), Counted(), *below), strict=True)))
    return Counted(*map(max, Counted(), Counted(), *(longest[root] for root in roots)))


def _own(name: str) -> Counted:
    kind = name.rpartition("::")[2].partition("Backward")[0]
    if kind.startswith(PRODUCTS):
        return Counted(ROUNDINGS, 2 if kind.startswith("Scaled") else 1)
    return Counted() if kind in MOVING else Counted(ROUNDINGS)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _tensors(each)
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _tensors(each)
