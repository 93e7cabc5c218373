"""Observations of one rank: gradients as autograd hands them over and as the optimizer takes them, and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from harness.capture import graph
from harness.capture.names import named
from harness.capture.parts import COLUMNS, empty_rows
from harness.capture.weights import digest
from harness.probe.hooks import ParameterHooks
from harness.probe.step_checks.pieces import Piece, local_part
from harness.probe.step_checks.sketch import SKETCHES, Place, Signs

Guard = Callable[[Callable[..., None]], Callable[..., None]]


class Watching:
    """Observations of the present step, in hooks that stay for the whole run.

    Args: guard: keeps what its function raises from whoever called it.
    """

    def __init__(self, models: list[nn.Module], optimizers: list[Optimizer], guard: Guard) -> None:
        self.models, self.optimizers = models, optimizers
        self.params = named(models)
        self.unplaced: dict[str, str] = {}
        """Tensors without a place, and why."""
        self.pieces = {plain: self._piece(plain, param) for plain, (_, param) in self.params.items()}
        self.index = {plain: place for place, plain in enumerate(self.pieces)}
        self.signs = Signs()
        self.counted = graph.Counted()
        self.compute: set[torch.dtype] = set()
        """Dtypes of what modules gave in the first forward."""
        self.grads: set[torch.dtype] = set()
        self.initial: dict[str, int] = {}
        self.forwards = 0
        self.is_fresh = not any(optimizer.state for optimizer in optimizers)
        """True if no optimizer had a state before the first step."""
        self._handles: list[Any] = []
        self._first: list[Any] = []
        self._listen(guard)
        self.begin(captured=False)
        if not optimizers:  # with one, weights may still be loaded until its first update
            self.initial = self.digests(torch.float32)

    def _piece(self, plain: str, param: Tensor) -> Piece:
        try:
            return Piece.of(plain, param)
        except Exception as error:  # of any engine's own kind of DTensor
            self.unplaced[plain] = f"{type(error).__name__}: {error}"
            return Piece(plain, tuple(param.shape), param, None)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _listen(self, guard: Guard) -> None:
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(guard(self._before_update)))
        for model in self.models:
            if any(_is_compiled(each) for each in model.modules()):
                continue  # its hooks would be compiled too
            self._handles.append(model.register_forward_hook(guard(self._forward_ended)))
            plain = {raw: name for name, (raw, _) in self.params.items()}

            def local(raw: str, gradient: Tensor, plain: Mapping[str, str] = plain) -> None:
                self._local_gradient(plain[raw], gradient)

            hooks = ParameterHooks(model, guard(local), lambda name, weight: None)
            hooks.__enter__()
            self._handles.append(_Hooks(hooks))
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
        self.forwards += torch.is_grad_enabled()
        if not self.counted.roundings:
            self.counted = graph.count(output)

    def _local_gradient(self, plain: str, gradient: Tensor) -> None:
        piece, found = self.pieces[plain], gradient.detach()
        if isinstance(found, DTensor) or found.shape != piece.shape:
            return
        sketch = self.signs.sketch(plain, piece.shape, found, Place.whole(piece.shape))
        row = self._row(plain)
        self._add(row, "local", sketch.values)
        self._add(row, "terms_squares", sketch.squares.reshape(1))
        if self.is_captured:
            wide = found.to("cpu", torch.float64)
            held = self.kept.get(f"local/{plain}")
            self.kept[f"local/{plain}"] = wide if held is None else held + wide

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.updates:
            self._first_update()
        self.updates += 1
        held = {id(param): name for name, (_, param) in self.params.items()}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in held:
                    self._reduced_gradient(held[id(param)], param, optimizer.state.get(param, {}))

    def _first_update(self) -> None:
        for handle in self._first:
            handle.remove()
        if not self.initial:
            self.initial = self.digests(torch.float32)
        self._sketch("begin", squares=False)
        if self.is_captured:
            self.keep("before")

    def _reduced_gradient(self, plain: str, param: Tensor, state: Mapping[str, Any]) -> None:
        piece, row = self.pieces[plain], self._row(plain)
        if piece.place is None:
            return
        if param.grad is None:
            self._put(row, "reduced", torch.zeros(SKETCHES + 1))
            return
        local = local_part(param.grad)
        self.grads.add(local.dtype)
        if local.shape != piece.local.shape:
            return
        sketch = self.signs.sketch(plain, piece.shape, local, piece.place)
        self._put(row, "reduced", torch.cat([sketch.values.cpu(), sketch.squares.cpu().reshape(1)]))
        if self.is_captured:
            self.kept[f"gradient/{plain}"] = local.clone()
            for entry, moment in state.items():
                if isinstance(moment, Tensor) and local_part(moment).shape == local.shape and local.ndim:
                    self.kept[f"moment/{plain}/{entry}"] = local_part(moment).clone()

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin(self, *, captured: bool) -> None:
        self.rows = empty_rows(len(self.pieces))
        self.updates = 0
        self.is_captured = captured
        self.kept: dict[str, Tensor] = {}
        """Pieces of a captured step, by the names that `harness.probe.capture` gives them."""

    def end(self) -> None:
        """Look at the weights after the step. Raises `ValueError`: the model has other parameters than at first."""
        self.follow()
        self._sketch("after", squares=True)
        if self.is_captured:
            self.keep("after")

    def follow(self) -> None:
        """Take new parameters under the old names."""
        now = named(self.models)
        if [(n, p.shape) for n, (_, p) in now.items()] != [(n, p.shape) for n, (_, p) in self.params.items()]:
            odd = sorted(now.keys() ^ self.params.keys())
            raise ValueError(f"the model's parameters are others than when it began: {', '.join(odd[:3]) or 'shapes'}")
        for name, (_, param) in now.items():
            if param is not self.params[name][1]:
                self.pieces[name] = self._piece(name, param)
        self.params = now

    def keep(self, prefix: str) -> None:
        for plain, piece in self.pieces.items():
            if piece.place is not None:
                self.kept[f"{prefix}/{plain}"] = piece.local.clone()

    def weights(self) -> dict[str, Tensor]:
        return {plain: piece.local for plain, piece in self.pieces.items() if piece.place is not None}

    def digests(self, dtype: torch.dtype | None = None) -> dict[str, int]:
        found = {}
        for plain, piece in self.pieces.items():
            if piece.place is not None:
                local = piece.local if dtype is None else piece.local.to(dtype)
                found[plain] = digest(plain, local, piece.place, math.prod(piece.shape[1:]))
        return found

    def _sketch(self, kind: str, *, squares: bool) -> None:
        for plain, piece in self.pieces.items():
            if piece.place is None:
                continue
            found = self.signs.sketch(plain, piece.shape, piece.local, piece.place, squares=squares)
            values = torch.cat([found.values.cpu(), found.squares.cpu().reshape(1)]) if squares else found.values
            self._put(self._row(plain), kind, values)

    def _row(self, plain: str) -> Tensor:
        return self.rows[self.index[plain]]

    def _put(self, row: Tensor, kind: str, values: Tensor) -> None:
        at = COLUMNS.index(f"{kind}_0")
        row[at : at + SKETCHES] = values[:SKETCHES]
        if len(values) > SKETCHES:
            row[COLUMNS.index(f"{kind}_squares")] = values[SKETCHES]

    def _add(self, row: Tensor, kind: str, values: Tensor) -> None:
        at = COLUMNS.index(f"{kind}_0" if len(values) > 1 else kind)
        row[at : at + len(values)] = row[at : at + len(values)].nan_to_num(0.0) + values.cpu()


class _Hooks:
    def __init__(self, hooks: ParameterHooks) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        self._hooks.__exit__()


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """Optimizers of torch, out of what wraps them; those of other kinds have no hooks, and are left out."""
    several: Iterable[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    found = []
    for each in several:
        inner = getattr(each, "optimizer", None)  # as accelerate keeps it
        chosen = inner if isinstance(inner, Optimizer) else each
        if isinstance(chosen, Optimizer):
            found.append(chosen)
    return found
