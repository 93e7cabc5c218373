"""The programs: optimizers as people build, call and mix them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from tests.fsdp.flat_step.world import Program, World, full

Make = Callable[[Any], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def adamw(params: Any, **more: Any) -> optim.AdamW:
    return optim.AdamW(params, **{"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3, **more})


def _rule(make: Make, **more: Any) -> Program:
    def trains(world: World) -> None:
        model = world.net()
        world.loop(model, world.bind(make(model.parameters())), **more)

    return trains


class Renamed(optim.AdamW):
    """Inherits the rule."""


class Decaying(optim.AdamW):
    """Has a rule of its own, which reads norms of whole parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - 0.001 * param.norm())
        return super().step(closure)


class Lamb(optim.Optimizer):
    """Scales the update of a parameter by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # as programs write it
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                held = self.state[param]
                if not held:
                    held["m"] = torch.zeros_like(param)
                held["m"].mul_(0.9).add_(param.grad, alpha=0.1)
                param.sub_(held["m"] * (param.norm() / (held["m"].norm() + 1e-6)) * group["lr"])


RULES: dict[str, Make] = {
    "AdamW": adamw,
    "AdamW foreach": lambda p: adamw(p, foreach=True),
    "AdamW one by one": lambda p: adamw(p, foreach=False),
    "AdamW fused": lambda p: adamw(p, fused=True),
    "AdamW amsgrad": lambda p: adamw(p, amsgrad=True),
    "AdamW maximize": lambda p: adamw(p, maximize=True),
    "AdamW, lr a tensor": lambda p: adamw(p, lr=torch.tensor(0.05)),
    "Adam": lambda p: optim.Adam(p, lr=0.05, eps=1e-3),
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD dampened": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "SGD fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, eps=1e-3),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.05, eps=1e-3),
    "Adamax": lambda p: optim.Adamax(p, lr=0.05, eps=1e-3),
    "NAdam": lambda p: optim.NAdam(p, lr=0.05, eps=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=0.05, eps=1e-3),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "subclass": lambda p: Renamed(p, lr=0.05, eps=1e-3),
    "subclass with its own step": lambda p: Decaying(p, lr=0.05, eps=1e-3),
    "LAMB": Lamb,
}
PROGRAMS.update({name: _rule(make) for name, make in RULES.items()})
PROGRAMS["clipped"] = _rule(adamw, clip=0.3)


def two(model: Any) -> list[dict[str, Any]]:
    """Groups of matrices, and of the rest."""
    params = [*model.parameters()]
    rest = {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02}
    return [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}, rest]


# -- schedulers --------------------------------------------------------------------------------------------------------


@program
def scheduler_after(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(two(model)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*optimizer.step.*")
        world.loop(model, optimizer, scheduler=LambdaLR(optimizer, lambda n: 1 / (1 + n)))


@program
def scheduler_before(world: World) -> None:
    model = world.net()
    optimizer = adamw(model.parameters())
    scheduler = LambdaLR(optimizer, lambda n: 1 / (1 + n))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*optimizer.step.*")
        world.loop(model, world.bind(optimizer), scheduler=scheduler)


@program
def betas_cycle(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(two(model)))
    world.loop(model, optimizer, 6, scheduler=OneCycleLR(optimizer, max_lr=0.1, total_steps=8))


# -- closures ----------------------------------------------------------------------------------------------------------


@program
def closure(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))

    def again() -> Tensor:
        optimizer.zero_grad()
        assert len(optimizer.param_groups[0]["params"]) == len([*model.parameters()])
        return world.backward(model)

    for _ in range(4):
        assert isinstance(optimizer.step(again), Tensor)


@program
def closure_by_keyword(world: World) -> None:
    model = world.net()
    optimizer = world.bind(optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

    def again() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        return world.backward(model)

    for _ in range(4):
        optimizer.step(closure=again)


@program
def closure_of_own_step(world: World) -> None:
    model = world.net()
    optimizer = world.bind(Decaying(model.parameters(), lr=0.05, eps=1e-3))

    def again() -> Tensor:
        optimizer.zero_grad()
        return world.backward(model)

    for _ in range(3):
        optimizer.step(again)


# -- edits -------------------------------------------------------------------------------------------------------------


def _sam(assign: bool) -> Program:
    def sam(world: World) -> None:
        model = world.net()
        optimizer = world.bind(optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        params = [*model.parameters()]
        for _ in range(4):
            world.backward(model)
            old = [param.data.clone() for param in params]
            with torch.no_grad():
                norm = torch.stack([full(param.grad.norm()) for param in params]).norm()
                for param in params:
                    param.add_(param.grad * (0.05 / (norm + 1e-12)))
            optimizer.zero_grad()
            world.backward(model, new=False)
            for param, value in zip(params, old, strict=True):
                if assign:
                    param.data = value
                else:
                    param.data.copy_(value)
            optimizer.step()
            optimizer.zero_grad()

    return sam


PROGRAMS["SAM, copied back"], PROGRAMS["SAM, assigned back"] = _sam(assign=False), _sam(assign=True)


@program
def lookahead_and_average(world: World) -> None:
    """Slow weights live in the optimizer's state; an average in place over the groups."""
    model = world.net()
    optimizer = world.bind(adamw(two(model)))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    average = [param.detach().clone() for param in params]
    for step in range(6):
        world.backward(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in params:
                held = optimizer.state[param]
                if "slow" not in held:
                    held["slow"] = param.detach().clone()
                elif step % 2:
                    held["slow"].add_(param - held["slow"], alpha=0.5)
                    param.data.copy_(held["slow"])
            torch._foreach_lerp_(average, params, 0.1)
    world.extras = average


@program
def edits_between_forwards(world: World) -> None:
    model = world.net()
    optimizer = world.bind(optim.SGD(model.parameters(), lr=0.05))
    world.loop(model, optimizer, 1)
    for edit in (lambda p: p.mul_(0.9), lambda p: p.data.mul_(0.9)):
        world.backward(model)
        with torch.no_grad():
            for param in model.parameters():
                edit(param)
    world.backward(model)
    optimizer.step()


# -- gradients ---------------------------------------------------------------------------------------------------------


@program
def zeros_and_two_microbatches(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    for _ in range(4):
        world.backward(model)
        world.backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@program
def zeros_of_the_model(world: World) -> None:
    """Zeros decay weights and momentum, of parameters without a gradient in the next backward, too."""
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    for step in range(4):
        world.backward(model, use=("all", "block")[step % 2])
        optimizer.step()
        model.zero_grad(set_to_none=False)
        optimizer.step()


@program
def unused_in_turn(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    for step in range(9):
        world.backward(model, use=("all", "block", "half")[step % 3])
        optimizer.step()
        optimizer.zero_grad()


@program
def late_momentum(world: World) -> None:
    """Parameters get their first gradient, and state, at different steps."""
    model = world.net()
    optimizer = world.bind(optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for use in ("half", "block", "all", "half", "all"):
        world.backward(model, use=use)
        optimizer.step()
        optimizer.zero_grad()


@program
def some_set_to_none(world: World) -> None:
    model = world.net()
    optimizer = world.bind(optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.3))
    world.backward(model)
    optimizer.step()
    for param in [*model.parameters()][::3]:
        param.grad = None
    optimizer.step()
    optimizer.zero_grad()
    world.loop(model, optimizer, 2)


@program
def frozen_in_turn(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    names = dict(model.named_parameters())
    for step in range(6):
        for name in ("blocks.1.up.weight", "entry.bias"):
            names[name].requires_grad_(step not in (0, 1, 4))
        world.backward(model)
        optimizer.step()
        optimizer.zero_grad()


@program
def replaced(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    for _ in range(4):
        world.backward(model)
        for param in model.parameters():
            param.grad = param.grad * 0.5 + 0.01
        optimizer.step()
        optimizer.zero_grad()


@program
def given_without_a_backward(world: World) -> None:
    """Gradients that the program makes: of this parameter's cut, and whole on every rank."""
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    for step in range(3):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.1 * (step + 1)).requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
    world.loop(model, optimizer, 1)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.2).requires_grad_(False)
    optimizer.step()
    optimizer.step()
    world.backward(model)  # which is added
    optimizer.step()
    for param in model.parameters():
        param.grad = None
    world.loop(model, optimizer, 1)


@program
def whole_gradients(world: World) -> None:
    """A gradient that is replicated, as arithmetic over whole tensors gives it."""
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    for _ in range(3):
        world.backward(model)
        for param in (each for each in model.parameters() if each.dim() == 2):
            param.grad = (param.grad.t() * 0.5).t()
        optimizer.step()
        optimizer.zero_grad()


# -- groups and optimizers ---------------------------------------------------------------------------------------------


@program
def group_added(world: World) -> None:
    model = world.net()
    params = [*model.parameters()]
    optimizer = world.bind(adamw(params[::2]))
    for step in range(5):
        world.backward(model)
        optimizer.step()
        model.zero_grad()
        if step == 1:
            optimizer.add_param_group({"params": params[1::2], "lr": 0.02})


@program
def moved_to_another_group(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(two(model)))
    world.loop(model, optimizer, 2)
    moved = optimizer.param_groups[0]["params"].pop(1)
    optimizer.param_groups[1]["params"].append(moved)
    world.loop(model, optimizer, 2)


@program
def two_in_one_bucket(world: World) -> None:
    model = world.net()
    params = [*model.parameters()]
    one = world.bind(adamw(params[::2]))
    other = world.bind(optim.SGD(params[1::2], lr=0.05, momentum=0.9))
    for _ in range(4):
        world.backward(model)
        one.step()
        other.step()
        one.zero_grad()
        other.zero_grad()


@program
def own_gradients_alone(world: World) -> None:
    """`zero_grad` of one leaves those of the other, to which the next backward adds."""
    model = world.net()
    params = [*model.parameters()]
    one, other = world.bind(adamw(params[::2])), world.bind(optim.SGD(params[1::2], lr=0.05, momentum=0.9))
    for step in range(5):
        world.backward(model)
        one.step()
        one.zero_grad()
        if step % 2:
            other.step()
            other.zero_grad()


def _several_backwards(again: Callable[[Any, Any, Any], None]) -> Program:
    def trains(world: World) -> None:
        model = world.net()
        params = [*model.parameters()]
        one, other = world.bind(adamw(params[::2])), world.bind(optim.SGD(params[1::2], lr=0.05, momentum=0.9))
        for _ in range(3):
            world.backward(model)
            one.step()
            again(world, model, one)
            world.backward(model)
            one.step()
            other.step()
            one.zero_grad()
            other.zero_grad()

    return trains


def _forgets_unfinished(world: World, model: Any, one: Any) -> None:
    """A backward inside no_sync that is forgotten; what the other had before it stays."""
    if world.rank is not None:
        with model.no_sync():
            world.backward(model)
    else:
        world.batch += 1
    one.zero_grad()


PROGRAMS["forgotten inside no_sync"] = _several_backwards(_forgets_unfinished)


@program
def one_after_another(world: World) -> None:
    """Several in a model's life."""
    model = world.net()
    for make in (adamw, lambda p: optim.SGD(p, lr=0.05, momentum=0.9), adamw):
        world.loop(model, world.bind(make(model.parameters())), 2)


@program
def two_models_and_loose(world: World) -> None:
    model, other = world.net(0), world.net(1, 5)
    loose = nn.Parameter(torch.ones(3, dtype=torch.float64))
    groups = [{"params": [*model.parameters(), loose]}, {"params": [*other.parameters()], "lr": 0.01}]
    optimizer = world.bind(adamw(groups), model, other)
    for _ in range(4):
        world.backward(model)
        world.backward(other)
        loose.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    world.extras = [loose.detach()]


@program
def loose_and_fused(world: World) -> None:
    model = world.net()
    loose = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = world.bind(adamw([loose, *model.parameters()], fused=True))
    for _ in range(4):
        world.backward(model)
        loose.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    world.extras = [loose.detach()]


@program
def built_before_sharding(world: World) -> None:
    from harness.fsdp import fully_shard
    from tests.fsdp.flat_step.world import WIDE, Block, Net

    model: Any = Net().double()
    optimizer: Any = optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
    scheduler = LambdaLR(optimizer, lambda n: 1 / (1 + n))
    if world.rank is not None:
        model, optimizer = fully_shard(
            model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=world.stage, mixed_precision_policy=WIDE
        )
    world.models.append(model)
    world.optimizers.append(optimizer)
    world.loop(model, optimizer, scheduler=scheduler)


# -- state -------------------------------------------------------------------------------------------------------------


@program
def state_there_and_back(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    assert not optimizer.state_dict()["state"]
    world.loop(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    world.loop(model, optimizer, 2)
    optimizer.load_state_dict(saved)
    world.loop(model, optimizer, 2)
    other = world.bind(adamw(model.parameters(), lr=0.9))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    world.loop(model, other, 2)


@program
def state_of_one_process(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    world.loop(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {
        i: {k: full(v).clone() if isinstance(v, Tensor) else v for k, v in s.items()} for i, s in saved["state"].items()
    }
    other = world.bind(adamw(model.parameters(), lr=0.9))
    other.load_state_dict(saved)
    world.loop(model, other, 2)


@program
def helpers_of_torch(world: World) -> None:
    model = world.net()
    plain = model.module if world.rank is not None else model
    optimizer = world.bind(adamw(model.parameters()))
    whole = StateDictOptions(full_state_dict=True)
    get_optimizer_state_dict(plain, optimizer, options=whole)
    world.loop(model, optimizer, 3)
    other = world.bind(adamw(model.parameters(), lr=0.9))
    set_optimizer_state_dict(plain, other, copy.deepcopy(get_optimizer_state_dict(plain, optimizer)))
    world.loop(model, other, 2)
    third = world.bind(adamw(model.parameters(), lr=0.9))
    found = get_optimizer_state_dict(plain, other, options=whole)
    sends = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world.rank is not None)
    set_optimizer_state_dict(plain, third, copy.deepcopy(found), options=sends)
    world.loop(model, third, 2)


@program
def state_edited(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    world.loop(model, optimizer, 2)
    params = optimizer.param_groups[0]["params"]
    del optimizer.state[params[3]]
    optimizer.state[params[4]]["exp_avg"].zero_()
    optimizer.state[params[5]]["step"].zero_()
    optimizer.state[params[6]].pop("step")
    optimizer.state[params[6]]["step"] = torch.tensor(7.0)
    keys = ("step", "exp_avg", "exp_avg_sq")
    optimizer.state[params[6]] = {key: optimizer.state[params[6]][key] for key in keys}
    optimizer.state[params[3]] = {}
    del optimizer.state[params[3]]
    order = {param: optimizer.state[param] for param in params if param in optimizer.state}
    optimizer.state = defaultdict(dict, order)
    world.loop(model, optimizer, 2)


@program
def counter_edited(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    world.loop(model, optimizer, 2)
    optimizer.state[optimizer.param_groups[0]["params"][5]]["step"].zero_()
    world.loop(model, optimizer, 2)


@program
def state_cleared(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    world.loop(model, optimizer, 3)
    optimizer.state.clear()
    world.loop(model, optimizer, 2)
    optimizer.state = defaultdict(dict)
    world.loop(model, optimizer, 2)


@program
def counters_replaced(world: World) -> None:
    """A new counter may take the place, in memory, of the one that it replaces."""
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    world.loop(model, optimizer, 2)
    for held in optimizer.state.values():
        held.pop("step")
        held["step"] = torch.tensor(20.0)
    for held in optimizer.state.values():  # keys in torch's order again
        for key in ("exp_avg", "exp_avg_sq"):
            held[key] = held.pop(key)
    world.loop(model, optimizer, 2)


@program
def deep_copy(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    world.loop(model, optimizer, 2)
    world.backward(model)
    copied = copy.deepcopy(optimizer)
    pairs = zip(optimizer.param_groups[0]["params"], copied.param_groups[0]["params"], strict=True)
    for param, twin in pairs:
        twin.grad = param.grad.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    copied.step()
    world.extras = [param.detach() for param in copied.param_groups[0]["params"]]
    world.loop(model, optimizer, 1)


@program
def pickled(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    world.loop(model, optimizer, 2)
    loaded = pickle.loads(pickle.dumps(optimizer))
    world.extras = [loaded.state[param]["exp_avg"] for param in loaded.param_groups[0]["params"]]


# -- scalers, hooks, exceptions, compilers -----------------------------------------------------------------------------


def _scaled(make: Make, spoils: bool, unscales: bool) -> Program:
    def trains(world: World) -> None:
        model = world.net()
        optimizer = world.bind(make(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(5):
            world.backward(model, scale=scaler.scale)
            if step == 2 and spoils:
                grad = dict(model.named_parameters())["blocks.0.up.weight"].grad
                rows = grad if world.rank is None else getattr(grad, "_local_tensor", grad)
                if world.rank in (None, 1) or rows is grad:
                    rows[-1] = float("inf")
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        world.extras = [torch.tensor(scaler.get_scale())]

    return trains


PROGRAMS["GradScaler, SGD, inf"] = _scaled(lambda p: optim.SGD(p, lr=0.05), True, False)
PROGRAMS["GradScaler, fused, inf"] = _scaled(lambda p: adamw(p, fused=True), True, False)
PROGRAMS["GradScaler, fused"] = _scaled(lambda p: adamw(p, fused=True), False, False)
PROGRAMS["GradScaler, clipped, inf"] = _scaled(adamw, True, True)


@program
def clipped_by_a_hook(world: World) -> None:
    model = world.net()
    optimizer = world.bind(optim.SGD(model.parameters(), lr=0.5))
    seen: list[float] = []

    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda o, *_: seen.append(float(len(o.param_groups[0]["params"]))))
    world.loop(model, optimizer)
    world.extras = [torch.tensor(seen)]


@program
def groups_clipped_apart(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(two(model)))
    for _ in range(3):
        world.backward(model)
        nn.utils.clip_grad_norm_(optimizer.param_groups[1]["params"], 0.05)
        optimizer.step()
        optimizer.zero_grad()


@program
def goes_on_after_an_exception(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters()))
    world.loop(model, optimizer, 2)
    group = optimizer.param_groups[0]
    betas, group["betas"] = group["betas"], None
    world.backward(model)
    try:
        optimizer.step()
    except TypeError:
        world.extras = [torch.tensor(float(len(group["params"])))]
    group["betas"] = betas
    optimizer.zero_grad()
    world.extras.append(torch.tensor(float(sum(param.grad is not None for param in model.parameters()))))
    world.loop(model, optimizer, 2)


@program
def compiled(world: World) -> None:
    model = world.net()
    optimizer = world.bind(adamw(model.parameters(), foreach=True))
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        world.backward(model)
        step()
        optimizer.zero_grad()
