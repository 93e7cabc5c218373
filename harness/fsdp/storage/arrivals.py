"""A gradient's way from where autograd left it to its place in a bucket.

[Note: Waiting for one another] A gradient that autograd makes is copied into its bucket: cast, and moved, two kernels a
parameter. Where work is queued, the first gradients of a unit stay as autograd made them until the unit's backward
ends; then one kernel casts and moves them all. For that long they exist twice, in the dtype of the unit's weights, as
FSDP2's do. `.grad` is empty meanwhile, so that a second gradient of a parameter comes apart from the first, and is
added to it in the bucket's dtype. Two kinds of unit do not wait: the root, whose first gradient and last are a whole
backward apart, and one that was called several times, whose gradients autograd adds up before it brings them: in the
dtype it is told to bring. Within one call it adds those of a weight that is used twice in the weight's dtype.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.fsdp.storage.parameter_access import grad_of, put_grad
from harness.fsdp.tensor_parallel.parameters import gradient_here

ADDED = "grad_added_to_main_grad"
"""Attribute that a kernel of Megatron's protocol sets: it has added a weight's gradient to `get_main_grad()` itself,
and what autograd gets of it is a stand-in without meaning."""


def may_wait(param: nn.Parameter) -> bool:
    """Whether a parameter's gradient may wait where autograd made it. The others have a meaning of their own."""
    return not (isinstance(param, DTensor) or getattr(param, ADDED, False))


def adopt(param: nn.Parameter, view: Tensor, *, fresh: bool) -> None:
    """Let `view` be the gradient of a parameter; one that autograd put elsewhere is moved there (`fresh`) or added."""
    early = grad_of(param)
    if isinstance(param, DTensor):  # it has no `.grad` but a DTensor: what came moves
        early = None if early is None else gradient_here(param, early)
        put_grad(param, None)
        _move(early, view, fresh=fresh)
        return
    if early is not None and early.data_ptr() == view.data_ptr() and early.dtype == view.dtype:
        return
    if param.grad_dtype != view.dtype:
        put_grad(param, None)
        param.grad_dtype = view.dtype
    put_grad(param, view)
    _move(early, view, fresh=fresh)


def _move(early: Tensor | None, view: Tensor, *, fresh: bool) -> None:
    """No gradient has one of its own: see [Note: Backwards inside a forward]."""
    if fresh:
        view.zero_() if early is None else view.copy_(early)
    elif early is not None:
        view.add_(early)
