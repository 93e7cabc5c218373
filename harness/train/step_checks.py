"""Observations of every step of a run beside the engine.

[Note: StepChecks] A captured step is examined whole (`captures`); every other one is looked at through sketches and a
sample, which cost a few passes over what a rank holds and nothing on the wire but a small sum. From step to step:

    before      weights and a sample of moments against what the step before left; weights as forwards should see them.
                Weights that a rank keeps whole, and computes with where it keeps them, are looked at by the forward:
                once is enough of one memory
    again       in captured and drawn steps, local gradients by the plain model (`harness.train.again`); in the last of
                them also whether that is the function it was when the run began
    forward     weights as modules look them up; local gradients as autograd hands them over (`LocalWatch`)
    reduced     the engine's averaged gradients, in the places of its weights, before clipping
    after       weights after the update; of the sample, what the optimizer's rule makes of what was there before; of
                Muon, a whole matrix (`harness.train.pieces`)

Where a step is short, not every one is looked at (`Cadence`): its row in the stream is NaN.

Each rank looks at what it holds. One sum and one maximum over ranks, on the loop's own group and while the next batch
is loaded, give the first rank the numbers of the whole model, which it writes into the stream.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.captured import captured
from harness.config.derived import global_microbatches, microbatches_per_rank, tokens_per_step
from harness.config.roundoff import FINEST, lost_in_integers
from harness.config.schema import Config, MeasureMode, Numerics
from harness.config.update_rule import KNOWN, Rule
from harness.control import Control
from harness.engines import optim
from harness.engines.protocol import TORCH_DTYPES, Engine, Microbatch
from harness.models.workload import workload_for
from harness.probe.hooks import named_modules
from harness.probe.step_checks.cadence import Cadence
from harness.probe.step_checks.local import ForwardWatch, LocalWatch
from harness.probe.step_checks.pieces import NOTHING, Piece, own_places, portions, shares, sketches
from harness.probe.step_checks.sample import Made, Sample, Values, unit_of
from harness.probe.step_checks.sketch import SKETCHES, Signs, Sketch
from harness.probe.step_checks.table import (
    Table,
    closing_numbers,
    differ_from,
    largest_table,
    step_numbers,
    summed_table,
)
from harness.store import check_stream as stream
from harness.store.check_stream import CheckedTensor, StreamWriter
from harness.store.metrics import read_columns
from harness.train.again import is_same_function_asked, off_by, same_function, steps_of, worked_out
from harness.train.callbacks import Callback
from harness.train.pieces import WEIGHTS, WholeMatrices, pieces_of
from harness.train.session import Session

EXACT = 1e-9
"""Relative: beyond it, a skipped step has changed something."""


def _skipped_before(session: Session, control: Control, done: int) -> int:
    """Skipped updates among a resumed run's steps, from the first rank's record. Collective over all ranks."""
    if not done or session.config.dtype.loss_scale == "none":
        return 0
    left_out = []
    if session.ranks.rank == 0:
        left_out = read_columns(session.run_dir / "metrics.jsonl", ("skipped",))["skipped"]
    return control.gather([sum(map(bool, left_out))])[0][0]


def integer_floor(config: Config, shapes: Sequence[tuple[int, ...]]) -> Table | float:
    """Norm of each tensor from which on the integers of numerics=exact hold an averaged gradient to `FINEST`."""
    if config.numerics.mode is not Numerics.exact:
        return 0.0
    bits, terms = config.numerics.exact_bits, global_microbatches(config)
    return np.array([lost_in_integers(bits, terms, math.prod(shape)) / FINEST for shape in shapes])


def _followed(
    config: Config, control: Control, found: Mapping[str, Piece], weights: Sequence[Piece]
) -> tuple[Sample, WholeMatrices | None]:
    """Sample of weights and moments, and Muon's matrices, if any. Collective over all ranks."""
    rule, workload = Rule.of_config(config.optimizer), workload_for(config)
    params = dict(workload.build("meta", torch.float32).named_parameters())
    trained = {name for name, param in params.items() if param.requires_grad}
    asked = trained if rule.name == "muon" else ()
    by_muon = {name for name in asked if workload.orthogonalizes(name, params[name].shape)}
    moments, decays = dict[str, list[Piece]](), dict[str, float]()
    for piece in weights:
        entries = rule.of_tensor(orthogonalized=piece.name in by_muon).entries
        keys = (f"optimizer/{piece.name}/{entry}" for entry in entries)
        moments[piece.name] = [found[key] for key in keys if key in found]
        decays[piece.name] = rule.decay if workload.decays(piece.name, torch.Size(piece.shape)) else 0.0
    whole = {place: piece for place, piece in enumerate(weights) if piece.name in by_muon}
    matrices = WholeMatrices(rule, whole, moments, decays, control) if whole else None
    return Sample(rule, weights, moments, trained, decays, by_muon), matrices


class StepChecks(Callback):
    """Observer of every step of one run. `open` it after the first weights exist. Collective over all ranks."""

    def __init__(self, session: Session, control: Control, found: Mapping[str, Piece], done: int) -> None:
        """Args: found: this rank's pieces of the engine's state, by key. done: steps before this attempt."""
        config = session.config
        super().__init__(config)
        self.session, self.control = session, control
        self.pieces = pieces = [piece for key, piece in found.items() if key.startswith(WEIGHTS)]
        self.sample, self.matrices = _followed(config, control, found, pieces)
        self.names = [piece.name for piece in pieces]
        self.signs = Signs()
        rows = control.gather(own_places(pieces))
        self.counted, self.among = shares(rows, session.ranks.rank)
        self.portions = portions(pieces, rows, session.ranks.rank)
        compute, main = TORCH_DTYPES[config.dtype.compute], TORCH_DTYPES[config.dtype.main_params]
        self.cast = None if compute is main else compute
        self.is_first_rank = session.ranks.rank == 0
        self.left: tuple[Sketch, Values] | None = None
        """State after the step before: sketches by piece, and the sample."""
        self.whole: Table | None = None
        """Sketches of the unsharded weights after the step before, on the first rank; None if unknown."""
        self.moments: Table | None = None
        """Moments of the last step before a resume, on the first rank; else None."""
        self.done = done
        self.again_at = steps_of(config)
        self.again_s: dict[int, float] = {}
        """Seconds of the recomputed steps of this attempt."""
        self.looks_for_drift = is_same_function_asked(config, done)
        self.first: Sketch | None = None
        self.skipped = _skipped_before(session, control, done)
        self.least = integer_floor(config, [piece.shape for piece in pieces])
        always = {*self.again_at, *captured(config).gradients, *captured(config).updates, config.train.steps}
        on_device = session.ranks.device.type == "cuda"
        agreed = lambda every: control.gather([every])[0][0]  # noqa: E731 - the first rank's, on all
        self.cadence = Cadence(config.measure.step_checks_share, done, always, agreed, on_device=on_device)
        self.writer: StreamWriter | None = None
        if self.is_first_rank:
            if done:
                after = stream.numbered("after", SKETCHES)
                self.whole = stream.last(session.run_dir, done, self.names, after)
                self.moments = stream.last(session.run_dir, done, self.names, stream.MOMENTS)
            shapes = [CheckedTensor(piece.name, piece.shape) for piece in pieces]
            limit = config.measure.step_checks_limit_mib << 20
            every = stream.cadence(config.train.steps, len(pieces), SKETCHES, limit)
            self.writer = StreamWriter(session.run_dir, shapes, SKETCHES, every, done)
        self._begin()

    @classmethod
    def open(cls, session: Session, control: Control, done: int) -> StepChecks | None:
        """Observer of a run resumed after `done` steps; None if not configured, or if the state has no places.
        Collective over all ranks."""
        config = session.config
        if not config.measure.step_checks or config.measure.mode is MeasureMode.bench:
            return None
        found = pieces_of(session.engine)
        return None if found is None else cls(session, control, found, done)

    def _begin(self) -> None:
        self.summed, self.largest = summed_table(len(self.pieces)), largest_table(len(self.pieces))
        self.begun: dict[int, Sketch] = {}
        self.in_forward: dict[int, Tensor] = {}
        """Weights, by place, whose sketch in `begun` is taken by the step's first forward."""
        self.watching: LocalWatch | None = None
        self.forward: ForwardWatch | None = None
        self.again: Sketch | None = None
        self.drift: Sketch | None = None
        self.gradient_sample: Tensor | None = None
        self.gradient_unit = 0.0

    # -- a step ------------------------------------------------------------------------------------------------------

    def before(self, step: int, batches: Sequence[Microbatch], engine: Engine) -> None:
        """Observe the state before the step, except weights left to its first forward (`_settle`)."""
        if not self.cadence.looks(step):
            self.left = self.whole = self.moments = None
            return
        with self.cadence.looking():
            self._look_before(step)
        with self.cadence.apart():
            self.work_out_again(step)

    def _look_before(self, step: int) -> None:
        self._begin()
        if self.cast is None and self.left is not None and self.session.engine.seen() is not None:
            self.in_forward = {place: piece.local for place, piece in enumerate(self.pieces) if piece.is_whole}
        self.begun = {place: self._begins(place) for place in range(len(self.pieces)) if place not in self.in_forward}
        if self.cast is not None:
            cast = [piece.sketch(self.signs, piece.local.to(self.cast), squares=False) for piece in self.pieces]
            self.summed.put_shares("cast", Sketch.stack(cast), self.counted)
        self.values = self.sample.look()
        if self.matrices is not None:
            self.matrices.before(step)
        self.summed["moments_before"][:] = self.sample.of_moments(self.values, len(self.pieces))

    def _begins(self, place: int) -> Sketch:
        piece = self.pieces[place]
        return piece.sketch(self.signs, piece.local, squares=self.left is None)

    def _settle(self) -> None:
        """Complete the sketches before the step, after the forwards and before the update, with weights no forward used
        in place."""
        seen = {} if self.watching is None else self.watching.begun
        for place in self.in_forward:
            self.begun[place] = seen[place] if place in seen else self._begins(place)
        found = Sketch.stack([self.begun[place] for place in range(len(self.pieces))])
        if self.left is not None:  # squares are a scale, of what is the same where `kept` is nought
            found = found._replace(squares=self.left[0].squares)
            self.largest["kept"][:] = self._kept(found, self.values)
        self.summed.put_shares("before", found, self.counted)
        if self.cast is None:
            self.summed.put_shares("cast", found, self.counted)

    def work_out_again(self, step: int) -> None:
        """Recompute local gradients with the plain model in chosen steps, and evaluate it in the first and the last of
        them. Collective over all ranks, before `watch`."""
        if step not in (self.done + 1, *self.again_at) or self.session.engine.seen() is None:
            return
        of = self.session, self.control, self.names, self.signs
        with self.session.meters.memory.apart():
            if step in self.again_at:
                began = time.perf_counter()
                self.again = worked_out(*of, step)
                self.summed["blind"][:] = float(self.again is None)
                self.again_s[step] = time.perf_counter() - began
            is_last = step == max(self.again_at, default=0)
            if self.looks_for_drift and (is_last or step == self.done + 1):
                now = same_function(*of)
                self.first, self.drift = (self.first, now) if is_last else (now, None)
                self.summed["blind_twice"][:] = float(self.first is None or now is None)

    def watch(self, step: int, engine: Engine) -> AbstractContextManager[Any]:
        seen = engine.seen()
        if seen is None or not self.cadence.looks(step):
            return nullcontext()
        self.divisor, aside = seen.divisor, self._aside
        self.watching = LocalWatch(seen.module, self.names, self.signs, kept=self.in_forward, aside=aside)
        watches = ExitStack()
        watches.enter_context(self.watching)
        if step == 1 and seen.compute.is_floating_point and seen.compute.itemsize in (2, 4):
            config, rank = self.session.config, self.session.ranks.data_rank
            share = microbatches_per_rank(config) * config.train.microbatch_size * config.data.seq_len
            self.forward = ForwardWatch(seen.module, self.signs, tokens_per_step(config), rank * share, aside)
            watches.enter_context(self.forward)
        return watches

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with self.session.meters.timers.aside(), self.cadence.looking():
            yield

    def reduced(self, step: int, engine: Engine) -> None:
        """Observe this rank's rows of gradients among the ranks with copies, in the places of its pieces.

        Differences between copies show in the weights after the step (`dissent`).
        """
        if not self.cadence.looks(step):
            return
        with self.cadence.looking():
            self._settle()
            gradients = engine.local_gradients()
            if gradients is None:
                return
            found = [
                NOTHING if (own := gradients.get(piece.name)) is None else piece.sketch(self.signs, own, portion)
                for piece, portion in zip(self.pieces, self.portions, strict=True)
            ]
            self.summed.put("reduced", Sketch.stack(found))
            self.gradient_sample = self.sample.gradients(gradients)
            if self.matrices is not None:
                self.matrices.reduced(gradients)
            self.gradient_unit = max((unit_of(gradient.dtype) for gradient in gradients.values()), default=0.0)

    def after(self, step: int, lr: float, grad_norm: float, engine: Engine) -> None:
        """Observe the state after the step, and begin the sum to the first rank, which `step` waits for."""
        scaled = engine.scaled()
        was_skipped = scaled is not None and scaled.skipped
        self.skipped += was_skipped
        if self.cadence.looks(step):
            with self.cadence.looking():
                self._look_after(step, lr, grad_norm, was_skipped=was_skipped)

    def _look_after(self, step: int, lr: float, grad_norm: float, *, was_skipped: bool) -> None:
        if self.forward is not None:
            self._tell_forward(self.forward)
        found, values = sketches(self.signs, self.pieces), self.sample.look()
        self.summed["moments_after"][:] = self.sample.of_moments(values, len(self.pieces))
        self.summed.put_shares("after", found, self.counted)
        self.summed.put_shares("dissent", found, self.among)
        if self.gradient_sample is not None and self.sample.rule.name in KNOWN:
            self._hold_to_rule(step, lr, grad_norm, values, was_skipped=was_skipped)
        if self.watching is not None:
            self._tell_local(self.watching)
        self.left = found, values
        summed, largest, divisor = self.summed, self.largest, getattr(self, "divisor", 1)
        end = self.control.begin_totals(summed.values, largest.values)

        def write() -> None:
            end()
            if self.writer is not None:
                if self.whole is None and step > 1:
                    largest["kept"][:] = torch.nan
                differ_from(largest, summed, self.whole, self.moments)
                self.whole, self.moments = summed.read("after").copy(), None
                self.writer.write(step, *step_numbers(summed, largest, divisor, grad_norm, self.least))

        self._write = write

    def step(self, step: int, record: Mapping[str, Any], engine: Engine) -> None:
        if self.cadence.looks(step):
            with self.cadence.looking():
                self._write()
        elif self.writer is not None:
            self.writer.leave_out(step)
        self.cadence.end(step)

    def _hold_to_rule(self, step: int, lr: float, norm: float, values: Values, *, was_skipped: bool) -> None:
        assert self.gradient_sample is not None
        self.summed["followed"][:] = self.sample.elements(len(self.pieces))
        if was_skipped:
            moved = self.sample.moved(self.values, values)
            self.largest["rule"][:] = self.sample.largest(moved, len(self.pieces)) / EXACT
            return
        clipping = optim.clip_coefficient(norm, self.session.config.optimizer.clip_norm)
        made = Made(step - self.skipped, lr, self.gradient_unit)
        ratios, off = self.sample.held_to_rule(self.values, values, self.gradient_sample, clipping, made)
        self.largest["rule"][:] = self.sample.largest(ratios, len(self.pieces))
        self.largest["clipping"][:] = off
        told = None if self.matrices is None else self.matrices.ratio(clipping, lr)
        if told is not None:
            self.largest["rule"][told[0]] = self.largest["rule"][told[0]].clamp(min=told[1])

    def _tell_forward(self, watch: ForwardWatch) -> None:
        """Sum the forward sketches of all ranks. Collective over all ranks."""
        names = list(named_modules(watch.module))
        order = [*watch.found, *(name for name in names if name not in watch.found)]
        table = torch.stack([watch.found.get(name, torch.zeros(SKETCHES + 1, dtype=torch.float64)) for name in names])
        if self.session.control is not None:
            dist.all_reduce(table, group=self.session.control)
        if self.is_first_rank:
            counts = dict(zip(names, table.tolist(), strict=True))
            config = self.session.config
            batch = config.train.microbatch_size, config.data.seq_len
            called = {name: counts[name] for name in order if any(counts[name])}
            stream.write_forward(self.session.run_dir, watch.rows, batch, called)
        self.forward = None

    def _tell_local(self, watching: LocalWatch) -> None:
        gradients, (largest, least) = watching.gradients(), watching.weights()
        self.summed["local"][:] = gradients.values
        self.summed["terms"][:] = gradients.squares
        self.summed["saw"][:] = float(watching.saw_gradients)
        self.summed["hidden"][list(watching.hidden)] = 1.0
        self.largest["used"][:] = torch.cat([largest, -least], dim=1)
        shapes = [piece.shape for piece in self.pieces]
        if self.again is not None:
            self.largest["again"][:] = off_by(gradients, self.again, shapes)
        if self.drift is not None and self.first is not None:
            self.largest["drift"][:] = off_by(self.drift, self.first, shapes)

    # -- the end -----------------------------------------------------------------------------------------------------

    def checkpoint(self, step: int, engine: Engine) -> None:
        if self.writer is not None:
            self.writer.sync()

    def end(self, status: str, engine: Engine) -> None:
        """Observe the last weights of a finished run."""
        if status == "done" and self.left is not None:
            self._begin()
            self.largest["kept"][:] = self._kept(sketches(self.signs, self.pieces), self.sample.look())
            self.control.begin_totals(self.summed.values, self.largest.values)()
            if self.writer is not None:
                self.writer.write(0, closing_numbers(stream.step_columns(SKETCHES), self.largest["kept"].numpy()))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _kept(self, found: Sketch, values: Values) -> Tensor:
        assert self.left is not None
        left, sampled = self.left
        off = (found.values - left.values).abs().amax(1)
        relative = torch.where(off == 0, 0.0, off / left.squares.sqrt())
        return torch.maximum(relative, self.sample.largest(self.sample.moved(sampled, values), len(self.pieces)))
