"""A step's local gradients, recomputed beside the engine with the plain model.

[Note: Worked out again] Observers compare everything with autograd's gradients, but cannot know that these belong to
the model, weights and tokens. So in captured and drawn steps each rank builds the model in plain torch, fills it with
the engine's main weights, reads its part of the batch again (`harness.data.reread`), and runs the same microbatches.
docs/verdicts.md ("Recomputed gradients") says what follows from that. It takes a forward, a backward and unsharded
weights on each rank. Without room for it, it is skipped. So it is where a repetition may rightly differ: for a user's
own model, which may be random or stateful, and under tensor parallelism, where no rank has unsharded weights.

[Note: The same function] These steps use the model's present code, which may have changed since the begin. So each rank
computes the plain model's local gradients twice more, for the seed's first weights and its own microbatches of step 1:
before its first step, and in the last recomputed one. Equal modules, bits, shapes and threads must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from harness.config.captured import captured
from harness.config.derived import global_microbatches
from harness.config.schema import Config, ModelFamily
from harness.control import Control
from harness.data.reread import Reread
from harness.engines.base import plain_model
from harness.engines.protocol import TORCH_DTYPES, Microbatch, Seen
from harness.models.workload import workload_for
from harness.probe.meters import free_bytes
from harness.probe.step_checks.local import LocalWatch
from harness.probe.step_checks.sketch import Signs, Sketch
from harness.train.session import Session

DRAWN = 0x616761696E
"""Beside the seed: no other draw of a run begins with it."""

HANDFUL = 32
"""Least elements of a compared tensor: smaller ones may cancel, and others of their module speak for them."""

COPIES = 4
"""Required memory in sizes of the main weights: weights, their cast, gradients, and part of a forward.

A device that runs out of memory beyond that skips the check.
"""


def steps_of(config: Config) -> frozenset[int]:
    """Steps that are recomputed: captured ones, and others drawn by the seed."""
    if config.model.family is ModelFamily.ext or config.mesh.tp > 1:
        return frozenset()
    count = math.ceil(config.measure.again * config.train.steps)
    drawn = np.random.default_rng([config.train.seed, DRAWN]).permutation(config.train.steps)[:count] + 1
    return frozenset((*captured(config).gradients, *drawn.tolist()))


def worked_out(session: Session, control: Control, names: list[str], signs: Signs, step: int) -> Sketch | None:
    """Sketches of the sum of this rank's local gradients [tensors, m], scaled as the engine's losses, and squared norms
    [tensors].

    None without memory. Collective over all ranks. Args: session: with an observable engine (`Engine.seen`), before the
    step. step: counted from 1.
    """
    seen = session.engine.seen()
    assert seen is not None
    scaled = partial(_scaled, seen=seen, config=session.config)
    return local_gradients(session, control, names, signs, step, partial(_fill, seen=seen), scaled)


def is_same_function_asked(config: Config, done: int) -> bool:
    """True if a run resumed after so many steps evaluates the plain model twice."""
    return max(steps_of(config), default=0) > done + 1


def same_function(session: Session, control: Control, names: list[str], signs: Signs) -> Sketch | None:
    """Sketches of the sum of the plain model's gradients [tensors, m] on this rank's microbatches of step 1 at the
    seed's first weights, and squared norms [tensors]; see [Note: The same function].

    None without memory. Collective over all ranks.
    """
    return local_gradients(session, control, names, signs, 1, _fill_first, lambda loss: loss)


def local_gradients(
    session: Session,
    control: Control,
    names: list[str],
    signs: Signs,
    step: int,
    fill: Callable[[nn.Module, Session], None],
    scaled: Callable[[Tensor], Tensor],
) -> Sketch | None:
    """Sketches of the sum of the plain model's gradients [tensors, m] on this rank's microbatches, and squared norms
    [tensors].

    None without memory. Collective over all ranks. Args: fill: gives the model its weights. scaled: maps a loss to the
    differentiated value.
    """
    workload, device = workload_for(session.config), session.ranks.device
    whole = workload.build("meta", TORCH_DTYPES[session.config.dtype.main_params]).parameters()
    fits = COPIES * sum(param.nbytes for param in whole) <= free_bytes(device, session.ranks.world_size)
    if not all(each for (each,) in control.gather([int(fits)])):
        return None
    sequences = torch.from_numpy(Reread(session.config, session.ranks.data_rank).sequences(step))
    with plain_model(workload, session.config, device) as model:
        fill(model, session)
        with suppress(torch.OutOfMemoryError), LocalWatch(model, names, signs, weights=False) as watch:
            for rows in sequences.split(session.config.train.microbatch_size):
                session.alive()
                batch = Microbatch(rows[:, :-1].to(device), rows[:, 1:].to(device))
                scaled(workload.loss(model, batch)).backward()
                for param in model.parameters():
                    param.grad = None
            return watch.gradients()
    return None


@torch.no_grad()
def _fill(model: nn.Module, session: Session, seen: Seen) -> None:
    weights = dict(model.named_parameters())
    for name, weight in session.engine.named_weights():
        weights[name].copy_(weight if seen.rounded is None else weight.to(seen.rounded))


@torch.no_grad()
def _fill_first(model: nn.Module, session: Session) -> None:
    workload = workload_for(session.config)
    for name, weight in model.named_parameters():
        session.alive()
        weight.copy_(workload.initial_weight(name, weight.shape))


def _scaled(loss: Tensor, seen: Seen, config: Config) -> Tensor:
    """Loss with the engine's scaling: local gradients are larger by divisor / M than those of an unscaled one.

    The same operation, a quotient by the rank's microbatches or a product with a loss scale, rounds alike.
    """
    count = global_microbatches(config)
    if seen.divisor == count:
        return loss
    return loss / (count // seen.divisor) if count % seen.divisor == 0 else loss * (seen.divisor / count)


def off_by(found: Sketch, again: Sketch, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """Largest difference of two sketches by tensor, over the second one's norm; infinite where only that is finite.
    fp64 [tensors]."""
    off = (found.values - again.values).abs().amax(1)
    relative = torch.where(off == 0, 0.0, off / again.squares.sqrt())
    relative = torch.where(again.squares.isfinite(), relative.nan_to_num(nan=torch.inf), 0.0)
    numel = torch.tensor([torch.Size(shape).numel() for shape in shapes])
    return torch.where(numel >= HANDFUL, relative, 0.0)
