"""A step's local gradients, worked out a second time beside the engine: does it compute the model?

[Note: Worked out again] What autograd hands out is what everything after it is held against; that it is the gradient of
the model, for these weights and these tokens, nobody who only listens can know. So in one step, the last captured one,
each rank builds the model anew as plain torch has it, fills it with the main weights that the engine gives, reads its
part of the batch from the source once more, and runs the same microbatches through it. Then the same modules are called
with the same bits, in the same shapes and dtypes, by as many threads: what differs from them was fed, computed,
gathered for a backward or kept in a buffer otherwise. Gradients are held against each other rank by rank, by sketches.

One step, because it costs a forward and a backward, and weights of the whole model on each rank for as long. Where a
rank has no room for that, nobody looks: no run is lost for having been checked. What began at some step and stayed is
there in the last one. No answer is given where a second time may rightly come to something else: for a model of the
user's own, which may draw random numbers or remember its calls, and under tensor parallelism, where no rank computes
with whole weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from harness.config.captured import captured
from harness.config.derived import global_microbatches
from harness.config.schema import Config, ModelFamily
from harness.control import Control
from harness.data.loader import Loader
from harness.engines.plain import plain_model
from harness.engines.protocol import Microbatch, Seen
from harness.engines.torch_dtypes import TORCH_DTYPES
from harness.fsdp import Fp8Linear
from harness.models.registry import workload_for
from harness.models.workload import TokenWorkload
from harness.probe.memory import free_bytes
from harness.probe.vouching.local import LocalWatch
from harness.probe.vouching.sketch import Signs, Sketch
from harness.train.session import Session

HANDFUL = 32
"""Elements from which on a tensor is looked at: fewer may cancel to nothing, and the others of their module speak for
them."""

COPIES = 4
"""Copies that need room, in the size of the main weights: weights, their cast, gradients, and some of what a
forward keeps. A device that has no room for the rest of that says so, and then nobody looks either."""


def step_of(config: Config) -> int:
    """The step that is worked out again; 0 for none."""
    if config.model.family is ModelFamily.ext or config.mesh.tp > 1:
        return 0
    return max(captured(config).gradients, default=0)


def worked_out(session: Session, control: Control, names: list[str], signs: Signs, step: int) -> Sketch | None:
    """Sketches of the sum of this rank's local gradients [tensors, m], as the engine's losses are scaled, and their
    squared norms, added up [tensors]. None where there is no memory for it: training goes on. *Collective.*

    Args:
        session: whose engine can be seen (`Engine.seen`), and whose step has not begun.
        control: for the ranks' own few numbers.
        names: of the model's parameters, in its order.
        signs: of all sketches.
        step: counted from 1.
    """
    seen = session.engine.seen()
    assert seen is not None
    if not have_room(session, control):
        return None
    with plain_model(workload_for(session.config), session.config, session.ranks.device) as model:
        _fill(model, session, seen)
        return local_gradients(model, session, names, signs, step, lambda loss: _scaled(loss, seen, session.config))


def have_room(session: Session, control: Control) -> bool:
    """True if every rank has room for the whole model. *Collective.*"""
    return all(fits for (fits,) in control.gather([int(_fits(workload_for(session.config), session))]))


def local_gradients(
    model: nn.Module,
    session: Session,
    names: list[str],
    signs: Signs,
    step: int,
    scaled: Callable[[Tensor], Tensor],
) -> Sketch | None:
    """Sketches of the sum of a plain model's gradients [tensors, m] on this rank's microbatches of a step, and their
    squared norms, added up [tensors]; None where memory ran out. scaled: makes what is differentiated of a loss."""
    workload, device = workload_for(session.config), session.ranks.device
    loader = Loader(session.config, session.ranks.data_rank)  # not the one that fed the run, which may have gone wrong
    with suppress(torch.OutOfMemoryError), LocalWatch(model, names, signs, weights=False) as watch:
        for tokens, targets in loader.batch(step):
            session.alive()
            batch = Microbatch(*(torch.from_numpy(rows).to(device) for rows in (tokens, targets)))
            scaled(workload.loss(model, batch)).backward()
            for param in model.parameters():
                param.grad = None
        return watch.gradients()
    return None


def _fits(workload: TokenWorkload, session: Session) -> bool:
    main = TORCH_DTYPES[session.config.dtype.main_params]
    whole = sum(param.nbytes for param in workload.build("meta", main).parameters())
    return COPIES * whole <= free_bytes(session.ranks.device, session.ranks.world_size)


@torch.no_grad()
def _fill(model: nn.Module, session: Session, seen: Seen) -> None:
    """Give the model the engine's main weights; scales of delayed scaling, which no weight tells, are the engine's."""
    weights = dict(model.named_parameters())
    for name, weight in session.engine.named_weights():
        weights[name].copy_(weight)
    theirs = Fp8Linear.delayed_state(seen.module)
    for name, buffer in Fp8Linear.delayed_state(model).items():
        if name in theirs:  # an engine of one's own may keep them elsewhere
            buffer.copy_(theirs[name])


def _scaled(loss: Tensor, seen: Seen, config: Config) -> Tensor:
    """The loss as the engine scales it: local gradients are larger by divisor / M than those of an unscaled one. In the
    same operation, a quotient by the microbatches of a rank or a product with a loss scale, so that it is rounded
    alike."""
    count = global_microbatches(config)
    if seen.divisor == count:
        return loss
    return loss / (count // seen.divisor) if count % seen.divisor == 0 else loss * (seen.divisor / count)


def off_by(found: Sketch, again: Sketch, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """By tensor: the largest difference of two sketches of this rank's gradients, over the norm of what was added the
    second time; infinite where only that is finite. fp64 [tensors]."""
    off = (found.values - again.values).abs().amax(1)
    relative = torch.where(off == 0, 0.0, off / again.squares.sqrt())
    relative = torch.where(again.squares.isfinite(), relative.nan_to_num(nan=torch.inf), 0.0)
    numel = torch.tensor([torch.Size(shape).numel() for shape in shapes])
    return torch.where(numel >= HANDFUL, relative, 0.0)
