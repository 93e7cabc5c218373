"""Programs with several groups, optimizers and models; their state; scalers, hooks, exceptions and compilers."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

from tests.fsdp.local_step.programs import PROGRAMS, Make, adamw, grouped, program, stepped
from tests.fsdp.local_step.world import Program, World, full

# -- groups and optimizers ---------------------------------------------------------------------------------------------


@grouped
def moved_to_another_group(world: World, model: Any, optimizer: Any) -> None:
    world.loop(model, optimizer, 2)
    moved = optimizer.param_groups[0]["params"].pop(1)
    optimizer.param_groups[1]["params"].append(moved)
    world.loop(model, optimizer, 2)


def halves(world: World) -> tuple[Any, Any, Any]:
    """A model and two optimizers of every other parameter."""
    model = world.net()
    params = [*model.parameters()]
    sgd = optim.SGD(params[1::2], lr=0.05, momentum=0.9)
    return model, world.bind(adamw(params[::2])), world.bind(sgd)


@program
def two_in_one_bucket(world: World) -> None:
    model, one, other = halves(world)
    for _ in range(4):
        world.step(model, one, other)


@program
def forgotten_inside_no_sync(world: World) -> None:
    """A backward inside no_sync that one forgets; what the other had before it stays."""
    model, one, other = halves(world)
    for _ in range(3):
        world.backward(model)
        one.step()
        if world.rank is None:
            world.batch += 1
        else:
            world.backward(model, sync=False)
        one.zero_grad()
        world.step(model, one, other)


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
    optimizer = world.bind(adamw(groups, fused=True), model, other)
    for _ in range(4):
        world.backward(model)
        world.backward(other)
        loose.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    world.extras = [loose.detach()]


@program
def built_before_sharding(world: World) -> None:
    from harness.fsdp import fully_shard
    from tests.fsdp.local_step.world import WIDE, Block, Net

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


@stepped
def state_there_and_back(world: World, model: Any, optimizer: Any) -> None:
    blank = optimizer.state_dict()["state"]  # torch has none
    assert not any(float(held["step"]) or held["exp_avg"].norm() for held in blank.values())
    world.loop(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    world.loop(model, optimizer, 2)
    optimizer.load_state_dict(saved)
    world.loop(model, optimizer, 2)
    other = world.bind(adamw(model.parameters(), lr=0.9))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    world.loop(model, other, 2)


@stepped
def state_of_one_process(world: World, model: Any, optimizer: Any) -> None:
    world.loop(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {
        i: {k: full(v).clone() if isinstance(v, Tensor) else v for k, v in s.items()} for i, s in saved["state"].items()
    }
    other = world.bind(adamw(model.parameters(), lr=0.9))
    other.load_state_dict(saved)
    world.loop(model, other, 2)


@program
def state_of_groups_in_another_order(world: World) -> None:
    """A frozen parameter is among them, and counts; what is saved says nothing of kernels, and shares no memory."""

    def built(seed: int) -> tuple[Any, Any]:
        model = world.net(seed)
        named = dict(model.named_parameters())
        named["blocks.1.up.weight"].requires_grad_(False)
        last = [param for name, param in named.items() if name.startswith("blocks.2")]
        rest = [param for name, param in reversed(named.items()) if not name.startswith("blocks.2")]
        return model, world.bind(adamw([{"params": last, "lr": 0.01}, {"params": rest}]), model)

    model, optimizer = built(0)
    world.loop(model, optimizer, 2)
    other, loaded = built(1)
    other.load_state_dict(model.state_dict())
    saved = optimizer.state_dict()
    loaded.load_state_dict(copy.deepcopy(saved) if world.rank is None else saved)  # torch's two share memory
    for each, its in ((model, optimizer), (other, loaded)):
        world.loop(each, its, 2)


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


@stepped
def state_edited(world: World, model: Any, optimizer: Any) -> None:
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


@stepped
def counter_edited(world: World, model: Any, optimizer: Any) -> None:
    world.loop(model, optimizer, 2)
    optimizer.state[optimizer.param_groups[0]["params"][5]]["step"].zero_()
    world.loop(model, optimizer, 2)


@stepped
def counters_replaced(world: World, model: Any, optimizer: Any) -> None:
    """A new counter may take the place, in memory, of the one that it replaces."""
    world.loop(model, optimizer, 2)
    for held in optimizer.state.values():
        held.pop("step")
        held["step"] = torch.tensor(20.0)
    for held in optimizer.state.values():  # keys in torch's order again
        for key in ("exp_avg", "exp_avg_sq"):
            held[key] = held.pop(key)
    world.loop(model, optimizer, 2)


@stepped
def deep_copy(world: World, model: Any, optimizer: Any) -> None:
    world.loop(model, optimizer, 2)
    world.backward(model)
    copied = copy.deepcopy(optimizer)
    pairs = zip(optimizer.param_groups[0]["params"], copied.param_groups[0]["params"], strict=True)
    for param, baseline in pairs:
        baseline.grad = param.grad.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    copied.step()
    world.extras = [param.detach() for param in copied.param_groups[0]["params"]]
    world.loop(model, optimizer, 1)


@stepped
def pickled(world: World, model: Any, optimizer: Any) -> None:
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


@stepped
def goes_on_after_an_exception(world: World, model: Any, optimizer: Any) -> None:
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
