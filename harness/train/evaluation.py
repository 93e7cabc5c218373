"""Loss on held-out sequences, every `measure.validate_every` steps.

Sequences are those of `measure.validation_path`, or the last ones of the first epoch, which training does not reach.
They are the same in every evaluation and layout, and training has the bits that it has without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from harness.config.data_source import held_out_batches
from harness.control import gather_json
from harness.data.loader import Loader
from harness.engines.protocol import Microbatch
from harness.store.metrics import read_metrics
from harness.train.record import global_loss
from harness.train.session import Session


class Evaluation:
    """Args: done: steps before this attempt, whose record is on rank 0's disk. Collective over all ranks.

    Raises `ValueError`: too few sequences are left for it.
    """

    def __init__(self, session: Session, done: int) -> None:
        self.session, config = session, session.config
        self.losses: dict[int, float] = {}
        """Held-out loss by step, also of earlier attempts."""
        self.every = config.measure.validate_every
        if not self.every:
            return
        if path := config.measure.validation_path:
            config = replace(config, data=replace(config.data, path=path))
        self.loader = Loader(config, session.ranks.data_rank)
        self.batches = held_out_batches(session.config, self.loader.source.num_sequences)
        before = read_metrics(session.run_dir / "metrics.jsonl") if done and session.ranks.rank == 0 else []
        found = ((each["step"], (each.get("validation") or {}).get("loss")) for each in before)
        pairs = [(step, loss) for step, loss in found if loss is not None]
        with session.meters.paused():
            self.losses = {step: float(loss) for step, loss in gather_json(pairs, session.control)[0]}

    def after(self, step: int) -> float | None:
        """Mean loss of the held-out batches; None unless one is due. Collective over all ranks, outside of a step."""
        if not self.every or step % self.every:
            return None
        session = self.session
        with session.meters.paused(), session.meters.memory.apart():
            rows = gather_json(session.engine.evaluate(self._microbatches()), session.control)
            self.losses[step] = global_loss([loss for row in rows[:: session.ranks.tp] for loss in row])
        session.meters.timers.take()  # no step's
        return self.losses[step]

    def _microbatches(self) -> Iterator[Microbatch]:
        for number in self.batches:
            for rows in self.loader.batch(number):
                self.session.alive()
                yield Microbatch(*(torch.from_numpy(each).to(self.session.ranks.device) for each in rows))

    def best(self, count: int) -> list[int]:
        """Steps of the lowest losses, best first."""
        return sorted(self.losses, key=lambda step: (self.losses[step], step))[:count]
