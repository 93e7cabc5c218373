"""Captures at chosen steps: gradients, witnesses, updates, and the effect of rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from harness.config.captured import captured
from harness.config.derived import global_microbatches
from harness.config.projections import fitting
from harness.config.update_rule import Rule
from harness.control import Control
from harness.engines.adapters.single import SingleEngine
from harness.engines.protocol import Engine, Microbatch, Seen
from harness.models.registry import workload_for
from harness.probe import structure
from harness.probe.capture import (
    write_capture,
    write_final,
    write_moments,
    write_plan,
    write_rounding,
    write_update,
    write_weights,
    write_witness,
)
from harness.probe.rounding import COMPUTED, moves
from harness.probe.witness import Witness, wrong_weights
from harness.train.callbacks import Callback
from harness.train.pieces import whole_moments
from harness.train.session import Session


class Captures(Callback):
    def __init__(self, session: Session, control: Control) -> None:
        config = session.config
        super().__init__(config)
        self.session = session
        self.control = control
        self.folder = session.run_dir / "capture"
        self.is_first_rank = session.ranks.rank == 0
        self.plan = captured(config)
        self.steps, self.update_steps = set(self.plan.gradients), set(self.plan.updates)
        self._last: dict[str, Tensor] = {}
        self._batches: Sequence[Microbatch] = ()
        self._weights_before: dict[str, Tensor] = {}
        self._witness: Witness | None = None
        self.structure: dict[str, Any] | None = None
        """Aliased or untied tensors of the engine; None if they cannot be seen."""

    def write_plan(self) -> None:
        if self.is_first_rank and self.config.measure.capture_steps is None:
            write_plan(self.folder, self.plan)

    def begin(self, step: int, engine: Engine) -> None:
        seen = engine.seen() if self.steps else None
        if seen is not None:
            self.structure = self._structure(seen)

    def before(self, step: int, batches: Sequence[Microbatch], engine: Engine) -> None:
        """Keep main weights before a captured update on the first rank, and write moments. Collective over all ranks.

        After a captured update both follow from it; before step 1 moments are zero.
        """
        if step in self.update_steps:
            if step > 1 and self._begins_anew(step):
                self._moments(step)
            self._weights_before = self._weights()
        if step in self.steps:
            self._batches, seen = batches, engine.seen()
            self._witness = None if seen is None else Witness(*seen, self.session.meters.timers.aside)

    def watch(self, step: int, engine: Engine) -> AbstractContextManager[Any]:
        return self._witness or nullcontext()

    def reduced(self, step: int, engine: Engine) -> None:
        """Write a captured step's gradients and witness. Collective over all ranks."""
        if step in self.steps:
            self._gradients(step, self._witness, self._batches)
            self._batches, self._witness = (), None

    def after(self, step: int, lr: float, grad_norm: float, engine: Engine) -> None:
        """Write the update of a step. Collective over all ranks."""
        if step in self.update_steps:
            before, self._weights_before = self._weights_before, {}
            self._update(step, before)

    def _structure(self, seen: Seen) -> dict[str, Any]:
        aliases = structure.overlaps(self.session.engine.state_dict())
        untied = structure.untied(workload_for(self.config).build("meta", torch.float32), seen.module)
        rows = self.control.gather([len(aliases), len(untied)])
        others = [f"rank {rank}" for rank, row in enumerate(rows) if any(row) and rank != self.session.ranks.rank]
        return {"aliases": [list(pair) for pair in aliases], "untied": untied, "elsewhere": others}

    def decayed(self) -> list[str] | None:
        """Parameters with weight decay; None without captured updates."""
        if not self.update_steps:
            return None
        workload = workload_for(self.config)
        params = workload.build("meta", torch.float32).named_parameters()
        return [name for name, param in params if workload.decays(name, param.shape)]

    def _gradients(self, step: int, witness: Witness | None, microbatches: Sequence[Microbatch]) -> None:
        if step == 1 and self.config.measure.rounding_draws:
            self._rounding(step, microbatches)
        if witness is not None:
            self._testimony(step, witness)
        gradients = self.session.engine.named_gradients()
        if self.is_first_rank:
            write_capture(self.folder, step, global_microbatches(self.config), gradients)
        else:
            for _ in gradients:  # gathering is collective: every rank takes part in every parameter
                pass

    def _testimony(self, step: int, witness: Witness) -> None:
        kept = witness.kept(self.session.engine.named_weights())
        rows = self.control.gather([*kept, *witness.used(), int(witness.saw_gradients)])
        expected = {name: (tensor, terms) for name, tensor, terms in witness.gradients(self.session.control)}
        if self.is_first_rank and any(row[-1] for row in rows):
            names = list(witness.checksums)
            wrong = [asdict(each) for each in wrong_weights(names, [row[:-1] for row in rows])]
            write_witness(self.folder, step, expected, dict(zip(names, kept, strict=True)), wrong)

    def _rounding(self, step: int, microbatches: Sequence[Microbatch]) -> None:
        """The rules allow this for one fp64 process only."""
        engine, draws = self.session.engine, self.config.measure.rounding_draws
        assert isinstance(engine, SingleEngine)
        recipes = [each.name for each in fitting(self.config.model)] if self.config.measure.rounding_fp8 else []
        seed = self.config.train.seed
        found = moves(engine.workload.loss, engine.model, microbatches, COMPUTED, draws, seed, recipes)
        write_rounding(self.folder, step, draws, found)

    def _begins_anew(self, step: int) -> bool:
        """True if earlier captures do not determine the state before a step."""
        return step - 1 not in self.update_steps

    def _moments(self, step: int) -> None:
        moments = whole_moments(self.session, self.control, Rule.of_config(self.config.optimizer).entries)
        found = {name: moment for name, moment in moments if self.is_first_rank}
        if found:
            write_moments(self.folder, step, found.items())

    def _update(self, step: int, before: dict[str, Tensor]) -> None:
        after = self._weights()
        if self.is_first_rank:
            write_update(self.folder, step, before, after.items())
            if self._begins_anew(step):  # later ones follow from these and the updates
                write_weights(self.folder, step, before)

    def looking(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Last weights passed through to another reader, because they are gathered once; for `final`."""
        for name, weight in weights:
            if self.plan.final and self.is_first_rank:
                self._last[name] = weight
            yield name, weight

    def final(self) -> None:
        if self._last:
            write_final(self.folder, self.config.train.steps, self._last)
            self._last = {}

    def _weights(self) -> dict[str, Tensor]:
        """Main weights on the first rank, empty on the others. Collective over all ranks."""
        return {name: weight for name, weight in self.session.engine.named_weights() if self.is_first_rank}
