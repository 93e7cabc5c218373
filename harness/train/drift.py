"""Plain model, evaluated alike at a run's begin and end, to detect changes of its code or buffers.

[Note: The same function] A recomputed step (`harness.train.again`) uses the model's present code: a softcap, table,
constant or custom backward that changed since the begin changes both alike. So each rank computes the plain model's
local gradients twice, for the seed's first weights and its own microbatches of step 1: before its first step, and in
the recomputed step. Equal modules, bits, shapes and threads must agree.

It takes two forwards and backwards, and memory for the unsharded model; without a recomputed step it is skipped.
Earlier changes, in a previous attempt or in step 1, are not seen.
"""

from __future__ import annotations

import torch
from torch import nn

from harness.config.schema import Config
from harness.control import Control
from harness.engines.plain import plain_model
from harness.models.registry import workload_for
from harness.probe.step_checks.sketch import Signs, Sketch
from harness.train.again import have_room, local_gradients, step_of
from harness.train.session import Session

TOKENS_OF = 1


def is_looked_for(config: Config, done: int) -> bool:
    """True if a run resumed after so many steps evaluates the plain model twice."""
    return step_of(config) > done + 1


def asked(session: Session, control: Control, names: list[str], signs: Signs) -> Sketch | None:
    """Sketches of the sum of the plain model's gradients [tensors, m] on this rank's microbatches of step 1 at the
    seed's first weights, and squared norms [tensors].

    None without memory. Collective over all ranks.
    """
    if not have_room(session, control):
        return None
    with plain_model(workload_for(session.config), session.config, session.ranks.device) as model:
        _fill(model, session)
        return local_gradients(model, session, names, signs, TOKENS_OF, lambda loss: loss)


@torch.no_grad()
def _fill(model: nn.Module, session: Session) -> None:
    workload = workload_for(session.config)
    for name, weight in model.named_parameters():
        session.alive()
        weight.copy_(workload.initial_weight(name, weight.shape))
