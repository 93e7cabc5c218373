"""Captures at chosen steps: gradients, witnesses, updates, and the effect of rounding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from harness.config.captured import captured
from harness.config.derived import global_microbatches
from harness.config.schema import OptimizerName
from harness.config.update_rule import Rule
from harness.control import Control
from harness.engines.adapters.single import SingleEngine
from harness.engines.protocol import Engine, Microbatch
from harness.models.workload import workload_for
from harness.probe.capture import beside, json_number, write_step
from harness.probe.rounding import COMPUTED, moves
from harness.probe.witness import Witness, wrong_weights
from harness.store.files import private_folder, write_json
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
        self._tensors: dict[str, Tensor] = {}
        """Tensors of the present step, on the first rank, as they are stored."""
        self._facts: dict[str, Any] = {}
        self._batches: Sequence[Microbatch] = ()
        self._witness: Witness | None = None

    def before(self, step: int, batches: Sequence[Microbatch], engine: Engine) -> None:
        """Keep main weights and moments before a captured update. Collective over all ranks.

        After a captured update both follow from it; before step 1 moments are zero.
        """
        if step in self.update_steps and step - 1 not in self.update_steps:
            self._keep("before", engine.named_weights())
            if step > 1:
                rule = Rule.of_config(self.config.optimizer)
                for entries in dict.fromkeys(rule.of_tensor(orthogonalized=each).entries for each in (True, False)):
                    self._keep("moment", whole_moments(self.session, self.control, entries))
        if step in self.steps:
            self._batches, seen = batches, engine.seen()
            self._witness = None if seen is None else Witness(seen, self.session.meters.timers.aside)

    def watch(self, step: int, engine: Engine) -> AbstractContextManager[Any]:
        return self._witness or nullcontext()

    def reduced(self, step: int, engine: Engine) -> None:
        """Keep a captured step's gradients, and what was observed beside the engine. Collective over all ranks."""
        if step not in self.steps:
            return
        if step == 1 and self.config.measure.rounding_draws:
            self._rounding(step, self._batches)
        expected = [] if self._witness is None else self._observed(self._witness)
        self._keep("gradient", ((name, gradient.clone()) for name, gradient in engine.named_gradients()))
        self._facts["num_microbatches"] = global_microbatches(self.config)
        for name, tensor in expected:
            stored, whole = beside(tensor, self._tensors.get(f"gradient/{name}"))
            self._tensors[f"local/{name}"] = stored
            self._facts["whole"] += [name] * whole
        self._batches, self._witness = (), None

    def after(self, step: int, lr: float, grad_norm: float, engine: Engine) -> None:
        """Keep the weights after a captured update, and write the step. Collective over all ranks."""
        if step in self.update_steps:
            self._keep("after", engine.named_weights())
        if self._tensors:
            if self.config.measure.capture_steps is None:
                self._facts["plan"] = self.plan._asdict()
            write_step(self.folder, step, self._tensors, self._facts)
        self._tensors, self._facts = {}, {}

    def _keep(self, prefix: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Keep tensors on the first rank; every rank takes part in gathering them."""
        for name, tensor in named:
            if self.is_first_rank:
                self._tensors[f"{prefix}/{name}"] = tensor.contiguous()

    def stepped(self) -> dict[str, list[str]]:
        """Parameters with weight decay, and those that Muon steps; empty without captured updates."""
        if not self.update_steps:
            return {}
        workload = workload_for(self.config)
        shapes = {name: param.shape for name, param in workload.build("meta", torch.float32).named_parameters()}
        found = {"decayed": [name for name, shape in shapes.items() if workload.decays(name, shape)]}
        if self.config.optimizer.name is OptimizerName.muon:
            found["orthogonalized"] = [name for name, shape in shapes.items() if workload.orthogonalizes(name, shape)]
        return found

    def _observed(self, witness: Witness) -> list[tuple[str, Tensor]]:
        """Expected gradients, on the first rank, if any rank saw one. Collective over all ranks."""
        kept = witness.kept(self.session.engine.named_weights())
        rows = self.control.gather([*kept, *witness.used(), int(witness.saw_gradients)])
        expected = witness.gradients(self.session.control)
        if not self.is_first_rank or not any(row[-1] for row in rows):
            return []
        names = list(witness.checksums)
        self._facts |= {
            "terms": {name: json_number(terms) for name, _, terms in expected},
            "wrong_weights": wrong_weights(names, [row[:-1] for row in rows]),
            "whole": [],
        }
        return [(name, tensor) for name, tensor, _ in expected]

    def _rounding(self, step: int, microbatches: Sequence[Microbatch]) -> None:
        """The rules allow this for one fp64 process only."""
        engine, draws = self.session.engine, self.config.measure.rounding_draws
        assert isinstance(engine, SingleEngine)
        found = moves(engine.workload.loss, engine.model, microbatches, COMPUTED, draws, self.config.train.seed)
        private_folder(self.folder)
        write_json(self.folder / f"rounding-{step:06d}.json", {"step": step, "draws": draws, "moves": found})
