"""What a flat step promises beside right values: few tensors, safe writes, the same bits as before, clear refusals."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer

from harness.fsdp import MixedPrecisionPolicy, binding, fully_shard_model, fully_shard_optimizer
from harness.fsdp.ragged import RaggedTensor
from harness.fsdp.runtime import at_rest
from harness.fsdp.runtime.installation import WeightInstaller
from harness.fsdp.update import accepted, flat_step
from tests.fsdp.flat_step.programs import Decaying, adamw
from tests.fsdp.flat_step.world import WIDE, WORLD, Block, Net, World, data
from tests.support.covering import once
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks

Told = list[str]
FACTS: dict[str, Callable[[int], Told]] = {}


def fact(function: Callable[[int], Told]) -> Callable[[int], Told]:
    FACTS[function.__name__] = function
    return function


@contextlib.contextmanager
def _watching() -> Iterator[list[list[list[Tensor]]]]:
    """What torch's update of AdamW was given, call by call: weights, gradients, and moments."""
    seen: list[list[list[Tensor]]] = []
    module = importlib.import_module("torch.optim.adam")
    rule = module.adam

    def watched(*args: Any, **kwargs: Any) -> None:
        seen.append([[*each] for each in args[:3]])
        rule(*args, **kwargs)

    with mock.patch.object(module, "adam", watched):
        yield seen


@fact
def pieces_are_few(rank: int) -> Told:
    """A bucket has a piece for each row length, and one without a row; a class of its own steps parameters."""
    world = World(rank)
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    with (
        _watching() as seen,
        mock.patch.object(flat_step.FlatStep, "_build", autospec=True, side_effect=flat_step.FlatStep._build) as build,
    ):
        world.loop(model, optimizer, 5)
    segments = sum(len(bucket.layout.segments) for bucket in model.buckets)
    few = all(len(params) <= segments + len(model.buckets) for params, *_ in seen)
    told = [] if few else [f"{[len(params) for params, *_ in seen]} pieces"]
    told += [] if build.call_count <= 2 else [f"{build.call_count} plans"]
    own = world.bind(Decaying(model.parameters(), lr=0.01))
    with _watching() as seen:
        world.loop(model, own, 1)
    return told + ([] if all(type(each) is RaggedTensor for each in seen[0][0]) else ["another rule got flat pieces"])


@fact
def state_is_stored_once(rank: int) -> Told:
    """Moments take no memory beside the flat ones that the rule has made."""
    world = World(rank)
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    world.backward(model)
    with _watching() as seen:
        optimizer.step()
    ours = {span.flats["exp_avg"].data_ptr() for span in model._flat_steps[0]._spans.values() if span.end}
    theirs = {each.data_ptr() for each in seen[0][2] if each.numel()}
    return [] if ours == theirs else ["moments were copied"]


@fact
def counters_are_apart(rank: int) -> Told:
    """What is saved counts once a step where torch's own optimizer goes on with it."""
    world = World(rank)
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    world.loop(model, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    plain = adamw([nn.Parameter(torch.ones(1)) for _ in model.parameters()])
    saved = torch.load(file)
    for held in saved["state"].values():
        held |= {key: torch.zeros(1) for key in ("exp_avg", "exp_avg_sq")}
    plain.load_state_dict(saved)
    for param in plain.param_groups[0]["params"]:
        param.grad = torch.ones(1)
    plain.step()
    steps = {held["step"].item() for held in plain.state.values()}
    return [] if steps == {3.0} else [f"steps {steps}"]


@fact
def others_have_read(rank: int) -> Told:
    """Nothing is written before readers are waited for, whoever steps, with a closure or without."""
    told = []
    for make, closes in itertools.product((adamw, lambda p: Decaying(p, lr=0.01)), (False, True)):
        world, calls = World(rank), list[str]()
        model = world.net()
        optimizer = world.bind(make(model.parameters()))
        world.backward(model)

        def noted(name: str, function: Any, calls: list[str] = calls) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return function(*args, **kwargs)

            return mock.patch.object(WeightInstaller, name, call)

        version = [bucket.main_version for bucket in model.buckets]
        with noted("refuse_held", WeightInstaller.refuse_held), noted("before_update", WeightInstaller.before_update):
            before = WeightInstaller.before_update

            def first(own: Any, version: list[int] = version, model: Any = model, before: Any = before) -> None:
                now = [bucket.main_version for bucket in model.buckets]
                calls.append("clean" if now == version else "written")
                before(own)

            with mock.patch.object(WeightInstaller, "before_update", first):
                optimizer.step(*([lambda: torch.zeros(())] if closes else []))
        if calls[:3] != ["refuse_held", "clean", "before_update"]:
            told.append(f"{type(optimizer).__name__} {closes}: {calls}")
    return told


def _refused(kind: type[Exception], text: str, call: Callable[[], Any]) -> Told:
    try:
        call()
    except kind as error:
        return [] if text in str(error) else [f"says {error}"]
    return [f"did not say {text!r}"]


@fact
def whole_tensor_rules_are_refused(rank: int) -> Told:
    """When taken, not at the first step; where nothing is cut they are right."""

    class Renamed(optim.Muon):
        pass

    told = []
    matrices: list[tuple[type, Callable[[list[Any]], Any]]] = [
        (optim.Muon, lambda p: optim.Muon(p, lr=0.02)),
        (Renamed, lambda p: Renamed(p, lr=0.02)),
        (optim.LBFGS, optim.LBFGS),
        (optim.Adafactor, optim.Adafactor),
        (ZeroRedundancyOptimizer, lambda p: ZeroRedundancyOptimizer(p, optim.AdamW)),
    ]
    for kind, make in matrices:
        for stage in (3, 1, 0):
            model = World(rank, stage, binds=False).net()
            optimizer = make([param for param in model.parameters() if param.dim() == 2])
            if stage:
                told += _refused(
                    TypeError, f"{kind.__name__} cannot step", lambda m=model, o=optimizer: fully_shard_optimizer(m, o)
                )
            else:
                fully_shard_optimizer(model, optimizer)
    return told


@fact
def keywords_go_on_working(rank: int) -> Told:
    told = []
    world = World(rank, stage=1)
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    with model.no_sync():
        world.backward(model)
    told += _refused(RuntimeError, "never reduced", optimizer.step)
    told += _refused(RuntimeError, "never reduced", lambda: optimizer.step(sync_grad_before_optimizer_step=False))
    optimizer.zero_grad()
    world.backward(model)
    optimizer.step(sync_grad_before_optimizer_step=False, install_optimized_model_weights=False)
    told += _refused(RuntimeError, "not installed", lambda: model(data(0, rank)))
    model.install_optimized_model_weights()
    model(data(0, rank))
    told += _refused(NotImplementedError, "step(twice)", lambda: optimizer.step(twice=True))
    told += _refused(RuntimeError, "holds them whole", lambda: _inside_gathered(model, optimizer))
    optimizer.zero_grad(zero_grad_buffer=False)
    return told + ([] if all(param.grad is None for param in model.parameters()) else ["gradients stay"])


def _inside_gathered(model: Any, optimizer: Any) -> None:
    with model.gathered():
        optimizer.step()


@fact
def every_model_is_finished(rank: int) -> Told:
    """Of two models that one optimizer steps, the first is looked at, too."""
    world = World(rank, stage=1)
    one, other = world.net(0), world.net(1, 5)
    optimizer = world.bind(adamw([*one.parameters(), *other.parameters()]), one, other)
    with one.no_sync():
        world.backward(one)
    world.backward(other)
    return _refused(RuntimeError, "never reduced", optimizer.step)


@fact
def twice_is_once(rank: int) -> Told:
    world = World(rank)
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()), model, model)
    world.loop(model, optimizer, 2)
    steps = {held["step"].item() for held in optimizer.state.values()}
    return [] if steps == {2.0} and len(model._flat_steps) == 1 else [f"{steps}, {len(model._flat_steps)} flat steps"]


@fact
def unused_are_stepped_where_asked(rank: int) -> Told:
    world, told = World(rank, binds=False), []
    for asked in (False, True):
        model = world.net()
        optimizer = adamw(model.parameters())
        fully_shard_optimizer(model, optimizer, steps_unused=asked)
        before = model.module.exit.weight.detach().clone()
        world.backward(model, use="block")
        optimizer.step()
        changed = not torch.equal(model.module.exit.weight, before)
        told += [] if changed is asked else [f"steps_unused={asked}: changed {changed}"]
    return told


@fact
def gradients_give_their_memory_back(rank: int) -> Told:
    world = World(rank)
    model = world.net()
    params = [*model.parameters()]
    one, other = world.bind(adamw(params[::2])), world.bind(adamw(params[1::2]))

    def held() -> int:
        return sum(bucket.gradients.has_sums for bucket in model.buckets)

    world.backward(model)
    one.step()
    one.zero_grad()
    told = [] if held() else ["the other's gradients are gone"]
    other.zero_grad()
    return told + ([f"{held()} buckets keep gradients"] if held() else [])


class Reads(optim.Optimizer):
    """Steps by `decoupled_grad`, in its dtype."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.dtypes: set[torch.dtype] = set()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # as programs write it
        for param in self.param_groups[0]["params"]:
            self.dtypes.add(param.decoupled_grad.dtype)
            param.sub_(param.decoupled_grad.to(param.dtype), alpha=0.1)


@fact
def decoupled_gradients(rank: int) -> Told:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, main_grads_dtype=torch.float32)
    model = fully_shard_model(
        Net().bfloat16(), fsdp_unit_modules=[Block], mixed_precision_policy=policy, use_decoupled_grad=True
    )
    told = _refused(ValueError, "decoupled_grad", lambda: fully_shard_optimizer(model, adamw(model.parameters())))
    optimizer = fully_shard_optimizer(model, Reads(model.parameters()))
    before = [param.detach().clone() for param in model.parameters()]
    model(data(0, rank).bfloat16()).square().mean().backward()
    optimizer.step()
    same = sum(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    left = sum(getattr(param, "decoupled_grad", None) is not None for param in model.parameters())
    found = [f"{optimizer.dtypes}, {same} unchanged, {left} left"]
    return told + ([] if optimizer.dtypes == {torch.float32} and same < 3 and not left else found)


BITS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "fp32": ({}, adamw),
    "exact": ({"numerics": "exact"}, adamw),
    "ordered": ({"numerics": "ordered"}, adamw),
    "momentum": ({}, lambda p: optim.SGD(p, lr=0.1, momentum=0.9)),
    "bf16": (
        {
            "mixed_precision_policy": MixedPrecisionPolicy(
                main_params_dtype=torch.bfloat16, main_grads_dtype=torch.float32
            )
        },
        adamw,
    ),
}


@fact
def bits_are_those_of_the_engine_before(rank: int) -> Told:
    told = []
    for (name, (options, make)), stage in itertools.product(BITS.items(), (1, 3)):
        found = []
        for at_rest.ENABLED in (False, True):
            module = Net().bfloat16() if name == "bf16" else Net()
            model = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=stage, **options)
            optimizer = fully_shard_optimizer(model, make(model.parameters()))
            for step in range(3):
                model(data(step, rank).to(next(module.parameters()).dtype)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(dict(model.full_weights()))
        off = [key for key, value in found[0].items() if not torch.equal(value, found[1][key])]
        told += [f"{name} ZeRO-{stage}: {off[:3]}"] if off else []
    return told


@fact
def trained_later(rank: int) -> Told:
    """Parameters that were frozen when they were sharded have other storage once they are trained."""
    found = []
    for sharded in (False, True):
        module: Any = Net().double()
        for param in module.blocks[1].parameters():
            param.requires_grad_(False)
        model, world = module, World(rank if sharded else None, binds=sharded)
        if sharded:
            model = fully_shard_model(module, fsdp_unit_modules=[Block], mixed_precision_policy=WIDE)
            world.models.append(model)
        optimizer = world.bind(adamw(model.parameters()))
        world.loop(model, optimizer, 2)
        for param in module.blocks[1].parameters():
            param.requires_grad_(True)
        world.loop(model, optimizer, 2)
        found.append([p.full_tensor() if isinstance(p, RaggedTensor) else p.detach() for p in model.parameters()])
    off = max((one - other).abs().max().item() for one, other in zip(*found, strict=True))
    return [] if off < 1e-9 else [f"off by {off}"]


def _run(rank: int, name: str) -> Told:
    at_rest.ENABLED = True
    return FACTS[name](rank)


def run_facts(rank: int, names: list[str]) -> dict[str, Told]:
    return {name: _run(rank, name) for name in names}


@once
def outcomes() -> dict[str, Told]:
    told = run_ranks(run_facts, WORLD, list(FACTS))
    return {name: [each for rank in told for each in rank[name]] for name in FACTS}


@pytest.mark.parametrize("name", FACTS)
def test_facts(name: str) -> None:
    assert not outcomes()[name]


Step = flat_step.FlatStep
MUTANTS = {
    "unsafe": (
        Slip(binding, "_bind_sharded", "parts.weights.before_update()", "pass", "Weights are written that others read"),
        "others_have_read",
    ),
    "held": (
        Slip(
            binding, "_bind_sharded", "parts.weights.refuse_held()", "pass", "Weights are updated that are held whole"
        ),
        "keywords_go_on_working",
    ),
    "unsafe before a closure": (
        Slip(Step, "_wrap", "            self._prepare()\n", "            pass\n", "A rule writes before its closure"),
        "others_have_read",
    ),
    "last model": (
        Slip(binding, "_bind_sharded", "flat.before.append(before)", "flat.before = [before]", "One model is finished"),
        "every_model_is_finished",
    ),
    "taken twice": (
        Slip(binding, "_bind_sharded", "any(each is flat for each in model._flat_steps)", "False", "Bound again"),
        "twice_is_once",
    ),
    "subclass taken": (
        Slip(accepted, "check_sharded", "type(optimizer).__mro__", "[type(optimizer)]", "A subclass of Muon is taken"),
        "whole_tensor_rules_are_refused",
    ),
    "unused": (
        Slip(binding, "_bind_sharded", "flat.steps_unused |= steps_unused", "pass", "steps_unused does nothing"),
        "unused_are_stepped_where_asked",
    ),
    "kept memory": (
        Slip(binding, "_bind_sharded", "parts.gradients.let_go()", "pass", "Forgotten gradients keep their memory"),
        "gradients_give_their_memory_back",
    ),
    "copied moments": (
        Slip(
            Step,
            "_bind",
            "piece.span.flats.setdefault(key, value)",
            "pass",
            "Moments are stored twice in the first step",
        ),
        "state_is_stored_once",
    ),
    "plans": (
        Slip(Step, "_put_state", "self._signature = list(self._sign())", "pass", "A plan is made anew in every step"),
        "pieces_are_few",
    ),
    "kernels": (
        Slip(Step, "_begin", "group.update(self.kernels(self.optimizer, group))", "pass", "torch chooses kernels"),
        "bits_are_those_of_the_engine_before",
    ),
    "aliases": (
        Slip(
            Step,
            "_bind",
            "piece.numbers[key].unbind()",
            "[piece.numbers[key][0]] * len(piece.params)",
            "A saved counter counts for each parameter",
        ),
        "counters_are_apart",
    ),
}


def with_mistakes(rank: int, names: list[str]) -> dict[str, Told]:
    found = {}
    for name in names:
        slip, fact_ = MUTANTS[name]
        with pytest.MonkeyPatch.context() as patch:
            slip.put(patch)
            found[name] = _run(rank, fact_)
    return found


@once
def mistakes() -> dict[str, Told]:
    told = run_ranks(with_mistakes, WORLD, list(MUTANTS))
    return {name: [each for rank in told for each in rank[name]] for name in MUTANTS}


@pytest.mark.parametrize("name", each("flat steps", [(name, slip.breaks) for name, (slip, _) in MUTANTS.items()]))
def test_a_mistake_is_found(name: str) -> None:
    assert not outcomes()[MUTANTS[name][1]]
    assert mistakes()[name]
