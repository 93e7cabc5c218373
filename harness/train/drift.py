"""The plain model, asked the same as a run begins and as it ends: is it still the same function?

[Note: The same function] A step that is worked out again (`harness.train.again`) is worked out by the model's code as
it is then: what has changed in that since the run began, a softcap that came on, a table that was rounded, a constant,
a custom backward, changes both alike. So each rank asks the plain model twice for local gradients that depend on
nothing else: of the seed's first weights, on its own microbatches of step 1, before the first step that it runs and in
the step that is worked out again. The same modules are then called by one process with the same bits in the same shapes
by as many threads, and what differs began in between.

It costs a forward and a backward twice, and room for the whole model. Nobody looks where no step is worked out again.
What the code did otherwise before the first of the two, in an earlier attempt of a resumed run or in step 1 already, is
not seen so: that is what a run is held against others for.
"""

from __future__ import annotations

import torch
from torch import nn

from harness.config.schema import Config
from harness.control import Control
from harness.engines.plain import plain_model
from harness.models.registry import workload_for
from harness.probe.vouching.sketch import Signs, Sketch
from harness.train.again import have_room, local_gradients, step_of
from harness.train.session import Session

TOKENS_OF = 1


def is_looked_for(config: Config, done: int) -> bool:
    """True if a run that goes on after so many steps is to ask the plain model twice."""
    return step_of(config) > done + 1


def asked(session: Session, control: Control, names: list[str], signs: Signs) -> Sketch | None:
    """Sketches of the sum of the plain model's gradients [tensors, m] on this rank's microbatches of step 1, at the
    seed's first weights, and their squared norms, added up [tensors]; None where there is no memory. *Collective.*"""
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
