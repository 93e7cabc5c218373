"""Ordinary torch programs over sharded parameters, each written once: on one process with all data, and on ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from harness.fsdp import ShardedModel, fully_shard_model, fully_shard_optimizer

WORLD, STEPS = 2, 3
Params = list[nn.Parameter]


class Block(nn.Module):
    """Rows that two ranks cut unevenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width + 1),
            nn.Linear(3 * width + 1, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Two units, a scalar, a parameter of one row, one that nothing uses, and a root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.entry = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(2))
        self.scale, self.row = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1, 3))
        self.unused = nn.Parameter(torch.ones(4, 2))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) * self.scale + self.row
        return out


@dataclass
class World:
    """A model on one process (`rank` None) or on a rank; `step` is counted by `backward`."""

    rank: int | None
    module: Net
    model: nn.Module
    step: int = 0

    @property
    def params(self) -> Params:
        return list(self.module.parameters())

    def loss(self, number: int, **more: Any) -> Tensor:
        """The mean over all ranks' data, of which a rank sees its own."""
        ranks = range(WORLD) if self.rank is None else [self.rank]
        found = [self.model(data(rank, number)).square().mean() for rank in ranks]
        return torch.stack(found).mean()

    def backward(self, sync: bool = True) -> None:
        self.step += 1
        model = self.model
        with model.no_sync() if isinstance(model, ShardedModel) and not sync else nullcontext():
            self.loss(self.step).backward()


def data(rank: int, number: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def whole(value: Any) -> Any:
    """A plain tensor; collective where it is sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def adamw(world: World) -> torch.optim.Optimizer:
    return torch.optim.AdamW(world.params, lr=0.02)


def bound(world: World, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return fully_shard_optimizer(world.model, optimizer) if isinstance(world.model, ShardedModel) else optimizer


Seen = list[Any]
Program = Callable[[World], Seen]


def plain_loop(world: World) -> Seen:
    optimizer = adamw(world)
    for _ in range(STEPS):
        world.backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def bound_loop(world: World) -> Seen:
    optimizer = bound(world, adamw(world))
    for _ in range(STEPS):
        world.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [optimizer.state[world.module.head.weight]["exp_avg"], len(optimizer.state_dict()["state"])]


def clipped(world: World) -> Seen:
    optimizer, norms = bound(world, adamw(world)), []
    for norm_type in (2.0, 1.0, 3.0):
        world.backward()
        norms.append(whole(clip_grad_norm_(world.params, 0.3, norm_type)).detach())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def gradients_read_and_edited(world: World) -> Seen:
    optimizer, seen = bound(world, adamw(world)), []
    for _ in range(STEPS):
        world.backward()
        seen += [whole(p.grad.norm()) for p in world.params if p.grad is not None]
        seen.append(world.module.unused.grad is None)
        world.module.head.weight.grad.mul_(0.5)  # type: ignore[union-attr] # it has one
        world.module.entry.weight.grad = world.module.entry.weight.grad * 2 + 0.01  # type: ignore[operator] # as above
        world.module.entry.bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return seen


def gradients_kept(world: World) -> Seen:
    """Of one loss while those of another one come, and after the step; forgotten in every way there is."""
    optimizer, seen = bound(world, adamw(world)), []
    ways = (optimizer.zero_grad, world.model.zero_grad, lambda: [setattr(p, "grad", None) for p in world.params])
    for place, (forget, views) in enumerate(itertools.product(ways, (False, True))):
        world.backward()
        kept = [p.grad.detach() if views else p.grad for p in world.params if p.grad is not None]
        forget()
        seen += [whole(each.norm()) for each in kept]
        world.backward()
        for other, one in zip((p.grad for p in world.params if p.grad is not None), kept, strict=True):
            other.add_(one, alpha=0.5)
        if place == 0:
            world.module.head.weight.grad = world.module.head.weight.grad * 2  # type: ignore[operator] # it has one
        optimizer.step()
        forget()
        seen += [whole(each).detach().clone() for each in kept]
    return seen


def further_backward(world: World) -> Seen:
    optimizer = bound(world, adamw(world))
    for _ in range(STEPS):
        world.backward()
        world.backward()  # adds to what .grad holds
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return []


def accumulated(world: World) -> Seen:
    optimizer = adamw(world)
    for _ in range(STEPS):
        world.backward(sync=False)
        world.backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def raised_and_went_on(world: World) -> Seen:
    optimizer = bound(world, adamw(world))
    for step in range(STEPS):
        if step == 1:
            broken = world.loss(99)
            broken.register_hook(_fail)
            try:
                broken.backward()
            except ArithmeticError:
                optimizer.zero_grad()
        world.backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def _fail(_: Tensor) -> None:
    raise ArithmeticError


def averaged(world: World) -> Seen:
    """An average swapped in, looked at, and swapped out."""
    optimizer, seen = bound(world, adamw(world)), []
    ema = [p.detach().clone() for p in world.params]
    for _ in range(STEPS):
        world.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, param in zip(ema, world.params, strict=True):
                mean.lerp_(param, 0.1)
            kept = [p.detach().clone() for p in world.params]
            for param, mean in zip(world.params, ema, strict=True):
                param.copy_(mean)
            seen.append(world.model(data(7, 7)))
            for param, value in zip(world.params, kept, strict=True):
                param.data = value
    return [*seen, *ema]


def clamped(world: World) -> Seen:
    optimizer = adamw(world)
    for _ in range(STEPS):
        world.backward()
        optimizer.step()
        optimizer.zero_grad()
        for param in world.params:
            param.data.clamp_(-0.2, 0.2)
    return [whole(p.norm()) for p in world.params] + [whole(world.module.head.weight.mean())]


def sharpness_aware(world: World) -> Seen:
    optimizer = bound(world, torch.optim.SGD(world.params, lr=0.05, momentum=0.9))
    for _ in range(STEPS):
        world.backward()
        old = [p.detach().clone() for p in world.params]
        with torch.no_grad():
            for param in world.params:
                if param.grad is not None:
                    param.add_(param.grad, alpha=0.1)
        optimizer.zero_grad()
        world.step -= 1
        world.backward()
        for param, value in zip(world.params, old, strict=True):
            param.data = value
        optimizer.step()
        optimizer.zero_grad()
    return []


def with_closure(world: World) -> Seen:
    optimizer = bound(world, adamw(world))

    def closure() -> float:
        optimizer.zero_grad()
        world.backward()
        return 1.0

    return [optimizer.step(closure) for _ in range(STEPS)]


def saved_and_loaded(world: World) -> Seen:
    optimizer = bound(world, adamw(world))
    for _ in range(2):
        world.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(value).clone() for name, value in world.module.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    world.backward()
    optimizer.step()
    optimizer.zero_grad()
    world.module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    world.step = 2
    world.backward()
    optimizer.step()
    return []


def hooked(world: World) -> Seen:
    """Hooks hung on parameters that are sharded see a rank's own gradient, and change what is summed."""
    seen: Seen = []
    world.module.head.weight.register_hook(lambda grad: (seen.append(grad.shape), grad * 3)[1])
    world.module.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    return [*plain_loop(world), *seen[:2]]


def frozen_for_a_while(world: World) -> Seen:
    optimizer = bound(world, adamw(world))
    for step in range(STEPS):
        world.module.blocks[0].requires_grad_(step != 1)
        world.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [world.module.blocks[0].up.weight.requires_grad]  # type: ignore[union-attr] # a module


def several_groups(world: World) -> Seen:
    decayed = [p for p in world.params if p.dim() > 1]
    others = [p for p in world.params if p.dim() <= 1]
    optimizer = bound(
        world, torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.1}])
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(STEPS):
        world.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return schedule.get_last_lr()


def edited_whole(world: World) -> Seen:
    """Whole weights in a context, between steps."""
    optimizer = adamw(world)
    for _ in range(STEPS):
        world.backward()
        optimizer.step()
        optimizer.zero_grad()
        model = world.model
        with model.unsharded() if isinstance(model, ShardedModel) else nullcontext(), torch.no_grad():
            for block in world.module.blocks:
                weight: Any = block.up.weight  # type: ignore[union-attr] # a module
                weight.div_(weight.norm())
    return []


def penalties(world: World) -> Seen:
    """Of all weights, added to a rank's loss, multiplied with it, and mixed with it otherwise."""
    optimizer, seen = bound(world, adamw(world)), []
    forms: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda loss, total: loss + 0.01 * total,
        lambda loss, total: loss * (1 + 0.01 * total),
        lambda loss, total: torch.lerp(loss, total.sqrt(), 0.1),
        lambda loss, total: torch.stack([loss, 0.01 * total]).sum(),
        lambda loss, total: (0.01 * total).add_(loss),
    ]
    for number, form in enumerate(forms):
        total: Any = sum(p.square().sum() for p in world.params)
        total = total + torch.stack([p.norm() for p in world.params]).sum()
        loss = form(world.loss(number), total)
        loss.backward()
        seen += [whole(total).detach()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def head_in_the_loss(world: World) -> Seen:
    optimizer = bound(world, adamw(world))
    for _ in range(STEPS):
        world.step += 1
        loss = world.loss(world.step)
        (loss + 0.1 * world.module.head.weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


PROGRAMS: dict[str, Program] = {
    each.__name__.replace("_", " "): each
    for each in (
        plain_loop, bound_loop, clipped, gradients_read_and_edited, gradients_kept, further_backward, accumulated,
        raised_and_went_on, averaged, clamped, sharpness_aware, with_closure, saved_and_loaded, hooked,
        frozen_for_a_while, several_groups, edited_whole, penalties, head_in_the_loss,
    )
}  # fmt: skip


def run_plain(name: str) -> tuple[Seen, list[Tensor]]:
    module = Net()
    seen = PROGRAMS[name](World(None, module, module))
    return seen, [p.detach().clone() for p in module.parameters()]


def run_sharded(rank: int, name: str, strategy: str) -> tuple[Seen, list[Tensor]]:
    """What a program has seen and left; whole. at_rest.ENABLED is the caller's."""
    module = Net()
    model = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    seen = PROGRAMS[name](World(rank, module, model))
    found = [whole(each) for each in seen], [whole(p).detach().clone() for p in module.parameters()]
    model.close()
    return found
