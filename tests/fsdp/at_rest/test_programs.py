"""Ordinary programs over parameters that are sharded at rest do what one process does, under every strategy."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_

from harness.fsdp import build, fully_shard_model, fully_shard_optimizer
from harness.fsdp.ragged import RaggedTensor
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.memory import BucketMemory
from tests.fsdp.at_rest.rows import OF_ROWS, SLIPS
from tests.fsdp.local_step import more_programs
from tests.fsdp.local_step.programs import RULES, adamw, over
from tests.fsdp.local_step.world import WORLD, Block, Net, Program, World, data, full, run
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import once
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

OWN: dict[str, Program] = {}
stepped = over(lambda model: adamw(model.parameters()), among=OWN)
unbound = over(lambda model: adamw(model.parameters()), among=OWN, binds=False)
"""Nobody hands the optimizer over."""


@unbound
def plain_loop(world: World, model: Any, optimizer: Any) -> None:
    world.loop(model, optimizer)


def rules_that_nobody_hands_over(world: World) -> None:
    """They step DTensors, one by a closure alone."""
    rules = {name: make for name, make in RULES.items() if name != "Rprop"}  # of a scalar it makes no DTensor
    for make in (*rules.values(), lambda p: optim.Adafactor(p, lr=0.01)):
        model = world.net()
        world.loop(model, make(model.parameters()), 2)
    model = world.net()
    lbfgs = optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        return world.backward(model)

    for _ in range(2):
        lbfgs.step(closure)  # type: ignore[arg-type] # torch declares a float


@stepped
def clipped(world: World, model: Any, optimizer: Any) -> None:
    for norm_type, foreach in itertools.product((2.0, 1.0, 3.0, float("inf")), (None, True, False)):
        world.backward(model)
        world.extras.append(clip_grad_norm_(model.parameters(), 0.3, norm_type, foreach=foreach).detach())
        optimizer.step()
        optimizer.zero_grad()


@stepped
def gradients_read_and_edited(world: World, model: Any, optimizer: Any) -> None:
    named = dict(model.named_parameters())
    for use in ("all", "block", "all"):
        world.backward(model, use=use)
        world.extras += [p.grad.norm() for p in model.parameters() if p.grad is not None]
        world.extras += [torch.tensor([p.grad is None for p in model.parameters()])]
        named["blocks.0.up.weight"].grad.mul_(0.5)
        named["blocks.1.up.weight"].grad = named["blocks.0.up.weight"].grad * 2
        named["entry.weight"].grad = full(named["entry.weight"].grad) * 2 + 0.01
        named["entry.bias"].grad = None
        optimizer.step()
        optimizer.zero_grad()


@stepped
def gradients_kept(world: World, model: Any, optimizer: Any) -> None:
    """Of one loss while those of another one come, and after the step; forgotten in every way there is."""
    ways = (optimizer.zero_grad, model.zero_grad, lambda: [setattr(p, "grad", None) for p in model.parameters()])
    for place, (forget, views) in enumerate(itertools.product(ways, (False, True))):
        world.backward(model)
        kept = [p.grad.detach() if views else p.grad for p in model.parameters()]
        forget()
        world.extras += [full(each.norm()) for each in kept]
        world.backward(model)
        for param, one in zip(model.parameters(), kept, strict=True):
            param.grad.add_(one, alpha=0.5)
        if place == 0:
            weight = model.get_parameter("exit.weight")
            weight.grad = weight.grad * 2
        optimizer.step()
        forget()
        world.extras += [full(each).clone() for each in kept]


@unbound
def accumulated(world: World, model: Any, optimizer: Any) -> None:
    for _ in range(3):
        world.backward(model, sync=False)
        world.step(model, optimizer)


@stepped
def raised_and_went_on(world: World, model: Any, optimizer: Any) -> None:
    world.loop(model, optimizer, 1)
    broken = world.loss(model)
    broken.register_hook(_fail)
    try:
        broken.backward()
    except ArithmeticError:
        optimizer.zero_grad()
    world.loop(model, optimizer, 2)


def _fail(_: Tensor) -> None:
    raise ArithmeticError


@stepped
def averaged(world: World, model: Any, optimizer: Any) -> None:
    """An average swapped in, looked at, and swapped out; torch's, and a copy of the parameters that stays as it was."""
    params = [*model.parameters()]
    ema = [p.detach().clone() for p in params]
    for _ in range(3):
        world.loop(model, optimizer, 1)
        with torch.no_grad():
            for mean, param in zip(ema, params, strict=True):
                mean.lerp_(param, 0.1)
            kept = copy.deepcopy(params)
            for param, mean in zip(params, ema, strict=True):
                param.copy_(mean)
            world.extras.append(model(data(7, 7)))
            for param, value in zip(params, kept, strict=True):
                param.data = value.detach()
    world.extras += ema


@unbound
def clamped(world: World, model: Any, optimizer: Any) -> None:
    for _ in range(3):
        world.loop(model, optimizer, 1)
        for param in model.parameters():
            param.data.clamp_(-0.2, 0.2)
    world.extras = [p.detach().norm() for p in model.parameters()]


@stepped
def saved_and_loaded(world: World, model: Any, optimizer: Any) -> None:
    """Whole weights and the optimizer's state, taken up where they were saved."""
    module = model if world.rank is None else model.module
    world.loop(model, optimizer, 2)
    weights = {name: full(value).clone() for name, value in module.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    world.loop(model, optimizer, 1)
    module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    world.loop(model, optimizer, 1)


@unbound
def hooked(world: World, model: Any, optimizer: Any) -> None:
    """Hooks hung on parameters that are sharded see a rank's own gradient, and change what is summed."""
    seen: list[float] = []
    model.get_parameter("exit.weight").register_hook(lambda grad: (seen.append(grad.shape.numel()), grad * 3)[1])
    model.get_parameter("exit.bias").register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    world.loop(model, optimizer)
    world.extras = [torch.tensor(seen)]


@unbound
def edited_whole(world: World, model: Any, optimizer: Any) -> None:
    """Whole weights in a context, between steps."""
    for _ in range(3):
        world.loop(model, optimizer, 1)
        with nullcontext() if world.rank is None else model.unsharded(), torch.no_grad():
            for place in range(3):
                weight = model.get_parameter(f"blocks.{place}.up.weight")
                weight.div_(weight.norm())


@over(lambda model: optim.SGD(model.parameters(), lr=0.01), among=OWN)
def penalties(world: World, model: Any, optimizer: Any) -> None:
    """Of all weights, added to a rank's loss, multiplied with it, and mixed with it otherwise."""
    head = model.get_parameter("exit.weight")
    forms: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda loss, total: loss + 0.01 * total,
        lambda loss, total: loss * (1 + 0.01 * total),
        lambda loss, total: torch.lerp(loss, total.sqrt(), 0.1),
        lambda loss, total: torch.stack([loss, 0.01 * total]).sum(),
        lambda loss, total: (0.01 * total).add_(loss),
        lambda loss, total: loss + 0.1 * head.square().sum(),
        lambda loss, total: loss + 0.1 * (head.norm(dim=1).sum() + head.amax() + (head.t() @ head).sum()),
        lambda loss, total: loss + 0.1 * head.abs().mean(),
    ]
    for form in forms:
        total: Any = sum(p.square().sum() for p in model.parameters())
        total = total + torch.stack([p.norm() for p in model.parameters()]).sum()
        world.backward(model, scale=lambda loss, form=form, total=total: form(loss, total))
        world.extras.append(full(total).detach())
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = {name.replace("_", " "): program for name, program in (OWN | OF_ROWS).items()} | {
    "rules that nobody hands over": rules_that_nobody_hands_over,
    "further backward": more_programs.PROGRAMS["zeros_and_two_microbatches"],
    "bound loop": more_programs.PROGRAMS["AdamW"],
    "frozen for a while": more_programs.PROGRAMS["frozen_in_turn"],
}


OF_PROGRAMS = (
    slips(
        """
    edits uncounted: An edit at rest is not counted
        fsdp.ragged.operations._count_edit: torch.autograd.graph.increment_version( => len(
        clamped
    never installed: Weights written at rest are installed where nothing was
        fsdp.runtime.weights.Weights.bring_up_to_date: if any( => if not any(
        plain loop
    kept lost: A further backward forgets what .grad held
        fsdp.runtime.gradient_sync.GradientSync._install: shard.add_(flat) => pass
        further backward
    kept overwritten: A gradient that the program keeps is overwritten by the next one
        fsdp.storage.at_rest.ShardedParameters.leave_kept_grads: getrefcount(held) > _UNKEPT => False
        gradients kept
    views overwritten: Views of gradients that the program keeps see the next ones
        fsdp.storage.at_rest.ShardedParameters.leave_kept_grads: gradients.renew() => pass
        gradients kept
    all have gradients: An unused parameter has a gradient of zeros
        fsdp.storage.at_rest.ShardedParameters.install_grads: index in gradients.unused => False
        gradients read and edited
    loss alone: The gradient of a penalty of sharded parameters is dropped
        fsdp.storage.at_rest.ShardedParameters.add_own_grads: self._grad(index).add_(given) => pass
        penalties
    kept by reference: What .grad held is what the next backward brings
        fsdp.runtime.gradient_sync.GradientSync._begin_backward: shard.clone() => shard
        further backward
    unshown: Modules keep the parameters that they had
        fsdp.storage.at_rest.ShardedParameters.show: held[name] = coming => pass
        plain loop
    hooks stay: Hooks of sharded parameters are never called
        fsdp.storage.at_rest._Hooked.register_hook: self._unsharded() => self
        hooked
    never finished: A synchronising backward does not finish gradients
        fsdp.runtime.gradient_sync.GradientSync._end_backward: self.finish() => pass
        plain loop
    kept and shown: What .grad held counts twice in a further backward
        fsdp.runtime.gradient_sync.GradientSync._begin_backward: each.drop_grads() => pass
        further backward
    rows apart: What is stepped are copies of main weights
        fsdp.update.steps.LocalStep._local: .detach().requires => .detach().clone().requires
        bound loop
    replaced unseen: A whole gradient is given to each rank's rows
        fsdp.update.steps.LocalStep._take_gradients: given is not sharded.grads[place[1]] => False
        gradients read and edited
    each rank's penalty: A penalty in a loss counts once for each rank
        fsdp.ragged.tensor._IntoLoss.backward: grad / ctx.mesh.size() => grad
        penalties
    torch's DTensors: What is computed of a penalty is torch's own DTensor
        fsdp.ragged.tensor.Replicated.__torch_dispatch__: tree_map_only(DTensor, cls.of, func(*args_, **kwargs_))
            => func(*args_, **kwargs_)
        penalties
    own loss alone: A penalty that is multiplied with a loss has that rank's gradient alone
        fsdp.ragged.tensor._IntoLoss.backward: dist.all_reduce( => len(
        penalties
    torch mixes: A penalty of sharded weights stays a DTensor in a loss
        fsdp.ragged.tensor.Replicated.__torch_function__: each.requires_grad => False
        penalties
    replaced lost: A gradient that was replaced is not stepped
        fsdp.storage.at_rest.ShardedParameters._take: own.copy_(given) => pass
        gradients read and edited
    edits of rows uncounted: A step does not count as an edit
        fsdp.update.steps.LocalStep._end: torch.autograd.graph.increment_version => len
        bound loop
    copies of shards: A copy of sharded parameters follows every update
        fsdp.ragged.tensor.RaggedTensor.__deepcopy__: self.detach().clone() => self.detach()
        averaged
    flags stay: Freezing a sharded parameter has no effect
        fsdp.storage.at_rest.ShardedParameters.show: coming.requires_grad_(leaving.requires_grad) => pass
        frozen for a while
    """
    )
    | SLIPS
)
OF_REGISTERED = slips(
    """
    weights registered: Sharded parameters view a user buffer
        fsdp.storage.param_group.ParamGroup._build_main_weights:  and not is_user_buffer =>
    gradients registered: Gradients of sharded parameters view a user buffer
        fsdp.storage.gradients.Gradients.__init__:  or (SHARD in cuts.own and self.memory.registers) =>
    """
)


Told = dict[tuple[str, str], list[str]]
"""Differences by strategy and program."""


def run_all(rank: int, names: tuple[str, ...], strategies: tuple[str, ...], slip: str = "") -> Told:
    with pytest.MonkeyPatch.context() as patch:
        if slip:
            OF_PROGRAMS[slip][0].put(patch)
        return {
            (each, name): run(rank, STRATEGIES.index(each), PROGRAMS[name]) for each in strategies for name in names
        }


@once
def ran(strategy: str) -> list[Told]:
    return run_ranks(run_all, WORLD, tuple(PROGRAMS), (strategy,))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_one_process_does(name: str, strategy: str) -> None:
    assert [told[strategy, name] for told in ran(strategy)] == [[], []]


@pytest.mark.parametrize("slip", each("sharded parameters", OF_PROGRAMS))
def test_a_slip_is_found(slip: str) -> None:
    _, program = OF_PROGRAMS[slip]
    found = run_ranks(run_all, WORLD, (program,), ("optim", "optim_grads_params"), slip)
    assert any(told for of_rank in found for told in of_rank.values())


def moving(rank: int, strategy: str) -> tuple[int, int]:
    """How often main gradients find other memory in loops that keep none, and in one that does."""
    with mock.patch.object(Gradients, "renew", autospec=True, side_effect=Gradients.renew) as renew:
        for name in ("clipped", "gradients read and edited", "accumulated"):
            run(rank, STRATEGIES.index(strategy), PROGRAMS[name])
        usual = renew.call_count
        run(rank, STRATEGIES.index(strategy), PROGRAMS["gradients kept"])
    return usual, renew.call_count


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_main_gradients_stay_where_they_are_unless_views_of_them_are_kept(strategy: str) -> None:
    for usual, kept in run_ranks(moving, WORLD, strategy):
        assert usual == 0
        assert kept > 0


def registering(rank: int, strategy: str, slip: str = "") -> list[str]:
    """What views memory that collectives move, where that is registered; and programs that are not right."""
    made: list[Tensor] = []

    class Registered(BucketMemory):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more | {"registers": True})

        def persistent(self, numel: int, dtype: torch.dtype) -> Tensor:
            made.append(super().persistent(numel, dtype))
            return made[-1]

        def sums(self, numel: int, dtype: torch.dtype) -> Tensor:
            made.append(super().sums(numel, dtype))
            return made[-1]

        def transient(self, numel: int, dtype: torch.dtype) -> Tensor:
            made.append(super().transient(numel, dtype))
            return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "BucketMemory", Registered)
        if slip:
            OF_REGISTERED[slip].put(patch)
        found = [name for name in ("clipped", "averaged") if run(rank, STRATEGIES.index(strategy), PROGRAMS[name])]
        made.clear()
        model = fully_shard_model(Net(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
        model(data(1, rank).float()).sum().backward()
        moved = {each.untyped_storage()._cdata for each in made}
        shown = [(n, t) for n, p in model.named_parameters() for t in (p, p.grad) if isinstance(t, RaggedTensor)]
        found += [name for name, each in shown if each.to_local().untyped_storage()._cdata in moved]
        model.close()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_sharded_parameter_views_a_user_buffer(strategy: str) -> None:
    assert run_ranks(registering, WORLD, strategy) == [[], []]


@pytest.mark.parametrize("slip", each("sharded parameters beside user buffers", OF_REGISTERED))
def test_a_slip_in_user_buffers_is_found(slip: str) -> None:
    assert all(run_ranks(registering, WORLD, "optim", slip))


class Muon(torch.optim.SGD):
    """Not torch's: by its name alone."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def refused(rank: int, strategy: str) -> dict[str, str]:
    """What is told of programs that cannot be right."""
    found: dict[str, str] = {}
    module = Net()
    early, kept = torch.optim.SGD(module.parameters(), lr=0.1), list(module.parameters())
    model = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    second = fully_shard_model(Net(), fsdp_unit_modules=[Block])
    model(data(1, rank).float()).sum().backward()
    muon = Muon([p for p in module.parameters() if p.dim() == 2])
    acts = {
        "early": early.step,
        "kept": lambda: kept[0].sum(),
        "elsewhere": lambda: nn.functional.linear(torch.ones(2, 7), module.blocks[0].up.weight),
        "muon": lambda: fully_shard_optimizer(model, muon),
        "none": lambda: fully_shard_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters())),
        "two": lambda: fully_shard_optimizer(torch.optim.SGD([*module.parameters(), *second.parameters()])),
    }
    for name, act in acts.items():
        try:
            act()
            found[name] = ""
        except Exception as error:
            found[name] = str(error)
    model.close()
    return found


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_what_cannot_be_right_is_refused_by_name(strategy: str) -> None:
    for found in run_ranks(refused, WORLD, strategy):
        assert "parameter gain" in found["early"]
        assert "fully_shard_optimizer(model, optimizer)" in found["early"]
        assert "parameter gain" in found["kept"]
        assert "model.unsharded()" in found["kept"]
        assert "blocks.0.up.weight" in found["elsewhere"]
        assert "`fully_shard` both together" in found["elsewhere"]
        assert "Muon cannot step sharded parameters" in found["muon"]
        assert "let `needs_whole(param)` of it say" in found["muon"]
        assert "zero_dp_strategy=0" in found["muon"]
        assert "SGD has parameters of 0 sharded models" in found["none"]
        assert "2 sharded models" in found["two"]
