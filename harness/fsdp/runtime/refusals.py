"""Refusals of forwards and backwards that would go wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from harness.fsdp.runtime.readiness import due_among
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import by_engine
from harness.private_torch import in_forward_mode, in_transform, is_tracing, tree_leaves


def refuse_dtensors(args: Any, kwargs: Any) -> None:
    """Raise TypeError where an input of the model is a DTensor."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, DTensor):
            raise TypeError(
                f"an input of the sharded model is a DTensor (shape {tuple(value.shape)}, {value.placements}), and its"
                " weights are plain tensors while it runs: give each rank its own rows, as x.to_local()"
            )


def refuse_transforms() -> None:
    """Raise RuntimeError inside `torch.func.grad`, `vmap` and their like, and under `torch.jit.trace`."""
    if is_tracing():
        raise RuntimeError(
            "torch.jit.trace (and torch.onnx.export by TorchScript) cannot record a sharded model, whose weights are"
            " gathered in place: trace a plain copy of the module that has loaded full_weights()"
        )
    if in_transform():
        raise RuntimeError(
            "torch.func transforms (grad, vjp, jacrev, vmap) cannot go through units of a sharded model, whose weights"
            " are gathered in place and whose gradients leave by hooks of autograd: use loss.backward() or"
            " torch.autograd.grad(loss, inputs), or transform a plain copy of the module made of full_weights()"
        )


def refuse_forward_mode() -> None:
    """Raise RuntimeError inside `torch.func.jvp`, `jacfwd` and `torch.autograd.forward_ad.dual_level`."""
    if in_forward_mode():
        raise RuntimeError(
            "forward-mode differentiation (torch.func.jvp, jacfwd, torch.autograd.forward_ad) cannot go through units"
            " of a sharded model, whose weights are gathered in place and whose hooks know backwards alone:"
            " differentiate a plain copy of the module made of full_weights()"
        )


def refuse_backward(running: Collection[str], root: str) -> NoReturn:
    """Raise for a backward inside a forward (of units `running`), or one under create_graph."""
    if running:
        where = "the model" if root in running else ", ".join(sorted(running))
        raise RuntimeError(
            f"a backward (autograd.grad or backward) reached sharded units inside the forward of {where}; weights"
            " that the rest of the forward needs would be released. Differentiate after the model's forward"
        )
    raise NotImplementedError(
        "create_graph=True (differentiating a backward) is not built: weights are released when a unit's backward"
        " ends, and its gradient leaves for the reduction; only create_graph=False is accepted"
    )


@by_engine
def unfrozen_too_late(buckets: Iterable[ParamGroup]) -> str | None:
    """A parameter without gradient storage that the running backward would reach."""
    params = (each for bucket in buckets if not bucket.trainable for each in bucket.params)
    return next((name for name, param in params if param.requires_grad and due_among([param])), None)


def refuse_unfrozen(name: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {name} was frozen when it was sharded, and requires_grad became True inside the model's forward (or"
        " a part of the model ran by itself): it has nowhere to put its gradient. Unfreeze before the model's forward;"
        " or shard with requires_grad=True and freeze afterwards"
    )


def refuse_edit(unit: str) -> NoReturn:
    raise RuntimeError(
        f"unit {unit} edited an input in place that is a leaf, a view of another tensor, or was passed to it twice:"
        " autograd could not follow that through the unit. Edit a copy, x = x.clone(), or use the operation that makes"
        " a new tensor (relu for relu_, x + y for x.add_(y))"
    )


def refuse_handed_on(where: str, unit: str) -> NoReturn:
    raise RuntimeError(
        f"unit {unit} returns a weight of its own, or a view of one, in {where}, and its weights are released when its"
        " forward ends: return a copy, weight.clone(), or a tuple or a dict instead of a dataclass"
    )


def refuse_generator(unit: str) -> NoReturn:
    raise RuntimeError(
        f"unit {unit} returns a generator (its forward has a yield), whose code runs when the unit's weights are"
        " released again: return a list of what it yields"
    )


def refuse_sharded(what: str, unit: str) -> NoReturn:
    raise RuntimeError(
        f"{what} came from unit {unit} while its weights were sharded, so it is wrong: a backward reached the"
        " unit through a tensor that no hook could see (in an attribute, a closure, an object of another kind)."
        " Return such tensors from the unit's forward: in tuples, lists, dicts, dataclasses, or what pytree knows"
    )


def refuse_added(name: str) -> NoReturn:
    raise RuntimeError(
        f"a gradient of {name} was added to the finished one of an earlier backward, by a backward that no hook could"
        " see (its outputs are in attributes, closures, objects of other kinds): call zero_grad() before it, or return"
        " tensors from the model's forward in tuples, lists, dicts or dataclasses"
    )


def refuse_layout(name: str, gradient: torch.Tensor | None) -> None:
    if gradient is not None and gradient.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {name} is {gradient.layout}, and flat buffers hold dense ones alone: call embedding() and"
            " embedding_bag() with sparse=False"
        )


def refuse_late_gradient(name: str, unit: str) -> NoReturn:
    raise RuntimeError(
        f"a gradient of {name} arrived after unit {unit} was reduced: it came from a"
        " backward inside the backward that nothing announced; let the parameters that reentrant activation"
        " checkpointing hides belong to the root (leave the class out of the unit list), or use_reentrant=False"
    )
