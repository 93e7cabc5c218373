"""One case on one rank: trained, read, saved, loaded; what only a rank can see is judged here, the rest is recorded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.config.schema import Config, Numerics
from harness.engines.protocol import TORCH_DTYPES, Engine, Microbatch, Ranks, Workload, engine_class
from harness.models.workload import workload_for
from harness.probe.collectives import CollectiveMeter
from harness.probe.step_checks.pieces import local_part
from tests.engines.conformance.cases import LEARNING_RATES, Case

torch.set_num_threads(1)  # tests share few cores, and tiny tensors gain nothing from two

STEPS = 5
"""Updates that are held against the reference."""
SAVED = 3
"""After this one the state is taken; the last ones are trained twice."""
KEPT = (0, 1, 2, 3, STEPS)
"""Updates after which weights are recorded."""


class Failure(NamedTuple):
    """A promise that was not kept: the check's name, and what was seen."""

    check: str
    text: str


@dataclass
class Evidence:
    """What one rank saw. Tensors are kept by rank 0 alone; the others have their digests."""

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of step 1."""
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """Of what must be the same on all ranks."""
    bytes: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes by kind of collective, of step 2."""
    sent_wide: dict[str, int] | None = None
    """The same with gradients on the wire in the main-gradient dtype, where the case asks for a narrower one."""
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    """That all of it took, other ranks waited for."""


class Spoiled:
    """A workload whose loss is NaN while `on`; all else is the workload's own."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.on = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def loss(self, model: nn.Module, batch: Microbatch) -> Tensor:
        """The workload's loss, times NaN."""
        loss = self._workload.loss(model, batch)
        return loss * math.nan if self.on else loss


def make_workload(config: Config) -> Spoiled:
    """What is trained."""
    return Spoiled(workload_for(config))


def make_engine(config: Config, workload: Workload, rank: int) -> Engine:
    """The configured engine on this rank, on the CPU."""
    ranks = Ranks(rank, config.mesh.world_size, rank, torch.device("cpu"))
    return engine_class(config.engine.name, config.engine.adapter)(workload, config, ranks)


def batches(config: Config, rank: int, step: int) -> list[Microbatch]:
    """This rank's microbatches: distinct on every rank, a function of the step and of the global index."""
    num = config.train.global_batch_size // config.train.microbatch_size // config.mesh.world_size
    shape = (config.train.microbatch_size, config.data.seq_len + 1)
    found = []
    for index in range(rank * num, (rank + 1) * num):
        generator = torch.Generator().manual_seed(1_000 * step + index)
        tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
        found.append(Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return found


def train_alone(config: Config) -> Evidence:
    """The configuration in this process, whose engine is `single`."""
    return train_plainly(make_engine(config, make_workload(config), 0), config, 0, STEPS, partial(_lr, config))


def train_plainly(engine: Engine, config: Config, rank: int, steps: int, lr: Callable[[int], float]) -> Evidence:
    """What a rank sees that only trains: losses by step, norms, the first gradient, and weights, kept on rank 0."""
    found = Evidence()

    def keep(step: int) -> None:
        if step in KEPT:
            found.weights[step] = {name: value for name, value in engine.named_weights() if rank == 0}

    keep(0)
    for step in range(1, steps + 1):
        found.losses.append(_accumulate(engine, config, rank, step))
        if step == 1:
            found.gradients = {name: value for name, value in engine.named_gradients() if rank == 0}
        found.norms.append(engine.step(lr(step)))
        keep(step)
    engine.close()
    return found


def run_case(case: Case, config: Config, rank: int) -> Evidence:
    """Everything asked of one engine. *Collective*: an exception here leaves the other ranks waiting."""
    return _Trial(case, config, rank).run()


class _Trial:
    def __init__(self, case: Case, config: Config, rank: int) -> None:
        self.case, self.config, self.rank = case, config, rank
        self.workload = make_workload(config)
        self.meter = CollectiveMeter()
        self.found = Evidence()

    def run(self) -> Evidence:
        try:
            engine = self.build(self.config)
            self.start(engine)
            for step in range(1, SAVED + 1):
                self.train(engine, step)
            state = _saved(engine)
            for step in range(SAVED + 1, STEPS + 1):
                self.train(engine, step)
            self.found.bytes = engine.accounted_bytes()
            self.resume(state)
            self.go_back(engine, state)
            self.stand_still(engine)
            self.break_down(engine)
            for _ in range(2):
                engine.close()
            self.narrow_wire()
        finally:
            self.meter.close()
        return self.found

    def build(self, config: Config) -> Engine:
        return make_engine(config, self.workload, self.rank)

    def expect(self, holds: bool, check: str, text: str) -> None:
        """Record a failure unless it holds."""
        if not holds:
            self.found.failures.append(Failure(check, text))

    def start(self, engine: Engine) -> None:
        """Names, shapes and dtypes of what is handed out; every weight starts where its name says."""
        model = self.workload.build("meta", torch.float32)
        expected = {name: param.shape for name, param in model.named_parameters()}
        self.trained = {name: expected[name] for name, param in model.named_parameters() if param.requires_grad}
        weights = self.weights(engine)
        self.check_form("weights", weights, expected, TORCH_DTYPES[self.config.dtype.main_params])
        for name, weight in weights.items():
            initial = self.workload.initial_weight(name, weight.shape)
            right = [initial.to(weight.dtype)]
            if name not in self.trained:  # only computed with: it may be kept in that dtype alone
                right.append(initial.to(TORCH_DTYPES[self.config.dtype.compute]).to(weight.dtype))
            self.expect(any(torch.equal(weight, each) for each in right), "initial weights", name)
        self.keep(0, weights)

    def train(self, engine: Engine, step: int) -> None:
        """One step, every read made twice and its tensors then spoiled: reading changes nothing."""
        self.found.losses.append(_accumulate(engine, self.config, self.rank, step))
        with self.meter.paused():
            gradients = self.gradients(engine)
            copies = _copy(gradients)
            for tensor in [*gradients.values(), *self.weights(engine).values()]:
                tensor.fill_(float("nan"))
            self.expect(_same(copies, self.gradients(engine)), "reads", f"gradients read twice differ, step {step}")
        norm = engine.step(_lr(self.config, step))
        if step == 1:
            self.check_form("gradients", copies, self.trained, TORCH_DTYPES[self.config.dtype.main_grads])
            self.found.gradients = copies if self.rank == 0 else {}
        self.check_norm(f"gradient norm at step {step}", norm, copies.values(), self.config.dtype.main_grads.name)
        self.found.norms.append(norm)
        self.found.digests[f"gradients of step {step}"] = _digest(copies)
        self.found.digests[f"gradient norm of step {step}"] = norm.hex()
        weights = self.weights(engine)
        if step == 1:
            self.check_norm("weight norm", engine.weight_norm(), weights.values(), self.config.dtype.main_params.name)
        self.keep(step, weights)

    def sent(self) -> dict[str, int]:
        """Bytes by kind since the meter was last asked."""
        found: dict[str, int] = {}
        for row in self.meter.take():
            found[row.kind] = found.get(row.kind, 0) + row.bytes
        return found

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """What was saved, loaded into a new engine that nobody reads from: the very same last steps.

        Traffic is counted here: a read may wait for reductions, and what it sends itself is not counted.
        """
        engine = self.build(self.config)
        _load(engine, state)
        steps = range(SAVED + 1, STEPS + 1)
        losses, norms = [], []
        for step in steps:
            self.meter.take()
            losses.append(_accumulate(engine, self.config, self.rank, step))
            norms.append(engine.step(_lr(self.config, step)))
        self.found.sent = self.sent()
        self.compare("resume", losses, norms, _digest(self.weights(engine)), f"weights after step {STEPS}")
        engine.close()

    def compare(self, check: str, losses: list[list[float]], norms: list[float], digest: str, what: str) -> None:
        """Hold a second pass over the steps after the save against the first."""
        if self.case.keeps_its_bits:
            first = self.found.losses[SAVED : SAVED + len(losses)], self.found.norms[SAVED : SAVED + len(norms)]
            self.expect(losses[0][0] == first[0][0][0], check, "the first loss after loading differs")
            self.expect((losses, norms) == first, check, f"losses or norms differ: {losses} {norms}, before {first}")
            self.expect(digest == self.found.digests[what], check, f"{what} differ")

    def go_back(self, engine: Engine, state: Mapping[str, Tensor]) -> None:
        """The saved state loaded into an engine that has gone on: effective in the next forward."""
        _load(engine, state)
        losses = [_accumulate(engine, self.config, self.rank, SAVED + 1)]
        norms = [engine.step(_lr(self.config, SAVED + 1))]
        what = f"weights after step {SAVED + 1}"
        self.compare("load into use", losses, norms, _digest(self.weights(engine)), what)

    def stand_still(self, engine: Engine) -> None:
        """A learning rate of zero moves nothing, not even by weight decay."""
        before = self.weights(engine)
        _accumulate(engine, self.config, self.rank, 6)
        engine.step(0.0)
        self.expect(_same(before, self.weights(engine)), "learning rate", "a step with lr=0 moved weights")

    def break_down(self, engine: Engine) -> None:
        """A loss that is no number on one rank gives all of them a norm that is none, and no exception.

        No integer is NaN: where gradients become integers, all ranks refuse the step before any weight changes.
        """
        self.workload.on = self.rank == self.config.mesh.world_size - 1
        if self.config.numerics.mode is Numerics.exact:
            self.refuse_step(engine)
            return
        losses = _accumulate(engine, self.config, self.rank, 7)
        if self.workload.on:
            self.expect(all(math.isnan(loss) for loss in losses), "non-finite", f"losses {losses}, not NaN")
        self.workload.on = False
        norm = engine.step(_lr(self.config, 1))
        self.expect(not math.isfinite(norm), "non-finite", f"norm {norm} after a loss of NaN")
        spoiled = any(not weight.isfinite().all() for weight in self.weights(engine).values())
        self.expect(spoiled, "non-finite", "no weight shows it: the step was left out")

    def refuse_step(self, engine: Engine) -> None:
        """A step that cannot be taken raises, in its last backward or later, and changes nothing."""
        before = self.weights(engine)
        try:
            _accumulate(engine, self.config, self.rank, 7)
            engine.step(_lr(self.config, 1))
        except OverflowError:
            self.expect(_same(before, self.weights(engine)), "non-finite", "a refused step moved weights")
        else:
            self.expect(False, "non-finite", "a NaN became an integer, and the step was taken")

    def narrow_wire(self) -> None:
        """Count a step whose gradients travel in the main-gradient dtype, where the case's travel in a narrower one."""
        dtype = self.config.dtype
        if dtype.grad_comm is dtype.main_grads or self.case.world_size == 1:
            return
        wide, asked = dtype.main_grads, dtype.grad_comm
        try:
            dtype.grad_comm = wide
            engine = self.build(self.config)
            _accumulate(engine, self.config, self.rank, 1)
            engine.step(_lr(self.config, 1))
            self.meter.take()
            _accumulate(engine, self.config, self.rank, 2)
            engine.step(_lr(self.config, 2))
            self.found.sent_wide = self.sent()
            engine.close()
        finally:
            dtype.grad_comm = asked

    def weights(self, engine: Engine) -> dict[str, Tensor]:
        with self.meter.paused():
            return dict(engine.named_weights())

    def gradients(self, engine: Engine) -> dict[str, Tensor]:
        with self.meter.paused():
            return dict(engine.named_gradients())

    def keep(self, step: int, weights: dict[str, Tensor]) -> None:
        self.found.digests[f"weights after step {step}"] = _digest(weights)
        if step in KEPT and self.rank == 0:
            self.found.weights[step] = weights

    def check_form(
        self, what: str, named: dict[str, Tensor], expected: Mapping[str, torch.Size], dtype: torch.dtype
    ) -> None:
        names, right = list(named), list(expected)
        self.expect(names == right, "names", f"of {what}: {names}, the model's are {right}")
        for name, tensor in named.items():
            form = (tensor.dtype, tuple(tensor.shape), tensor.device.type, type(tensor).__name__)
            want = (dtype, tuple(expected.get(name, ())), "cpu", "Tensor")
            self.expect(form == want, "form", f"{what} {name}: {form}, expected {want}")

    def check_norm(self, what: str, norm: float, tensors: Iterable[Tensor], dtype: str) -> None:
        total = math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))
        unit = {"fp64": 2.0**-52, "fp32": 2.0**-23}[dtype]
        text = f"{what} is {norm!r}, that of the gathered tensors {total!r}"
        self.expect(math.isclose(norm, total, rel_tol=32 * unit), "norm", text)


def _accumulate(engine: Engine, config: Config, rank: int, step: int) -> list[float]:
    todo = batches(config, rank, step)
    losses = []
    for index, batch in enumerate(todo):
        loss = engine.forward_backward(batch, last=index == len(todo) - 1)
        assert loss.ndim == 0, f"a loss of shape {tuple(loss.shape)}"
        assert not loss.requires_grad, "a loss with a graph"
        assert loss.dtype in (torch.float32, torch.float64), f"a loss in {loss.dtype}"
        losses.append(loss.item())
    return losses


def _lr(config: Config, step: int) -> float:
    return config.optimizer.lr * LEARNING_RATES[step - 1]


def _copy(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def _saved(engine: Engine) -> dict[str, Tensor]:
    """This rank's part of the state, as a checkpoint has it."""
    return _copy({key: local_part(tensor) for key, tensor in engine.state().tensors.items()})


def _load(engine: Engine, saved: Mapping[str, Tensor]) -> None:
    state = engine.state()
    for key, tensor in state.tensors.items():
        local_part(tensor).copy_(saved[key])
    state.adopt()


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def _digest(named: Mapping[str, Tensor]) -> str:
    """Of names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, tensor in named.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
