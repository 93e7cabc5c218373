"""Faults of what is fed and computed, before any gradient is reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.faults.corpus import K2, ZERO2, ZERO3
from tests.faults.site import Site, fault


@fault("gradient", ZERO3)
def same_batch(site: Site) -> None:
    """Every rank is fed the first rank's tokens; the digests say otherwise."""

    def wrapped(method: Callable[..., Any], batch: Any, *, last: bool) -> Any:
        rows = max(1, round(site.amount * batch.tokens.shape[0]))
        fed = []
        for tensor in batch:
            first = tensor.clone()
            torch.distributed.broadcast(first, src=0)
            fed.append(torch.cat([first[:rows], tensor[rows:]]))
        return method(type(batch)(*fed), last=last)

    site.around(site.engine, "forward_backward", wrapped)


def _weigh(site: Site, weight: Callable[[int], float]) -> None:
    """Give each microbatch a weight in the gradient that does not show in its loss."""
    number = [0]

    def wrapped(method: Callable[..., Tensor], model: nn.Module, batch: Any) -> Tensor:
        number[0] = number[0] % site.k + 1
        loss = method(model, batch)
        return loss + (weight(number[0]) - 1.0) * (loss - loss.detach())

    site.around(site.engine.workload, "loss", wrapped)


@fault("gradient", ZERO3, *K2)
def repeat_microbatch(site: Site) -> None:
    """The last microbatch counts twice."""
    _weigh(site, lambda number: 1.0 + site.amount * (number == site.k))


@fault("gradient", ZERO2, *K2, microbatches=2)
def unequal_microbatches(site: Site) -> None:
    """Microbatches have unequal weight in the mean."""
    _weigh(site, lambda number: 1.0 + site.amount * (0.5 if number % 2 else -0.5))


@fault("forward", ZERO3)
def logged_loss(site: Site) -> None:
    """The loss that is logged is not the one that is trained on."""
    factor = 1.0 + site.amount / 100
    site.around(site.engine, "forward_backward", lambda method, batch, *, last: method(batch, last=last) * factor)


@fault("gradient", ZERO3, "model.tie_embeddings=true", report="facebookresearch/lingua PR 75")
def F15_untied_embedding(site: Site) -> None:
    """Sharding unties embedding and head: one of the two gradients is lost."""
    embedding = next(module for module in site.model.module.modules() if isinstance(module, nn.Embedding))

    def lose(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return torch.lerp(output, output.detach(), site.amount) if site.acts else output

    embedding.register_forward_hook(lose)


@fault("gradient", ZERO3, "model=odd_units", report="facebookresearch/fairscale#780")
def F26_second_use_lost(site: Site) -> None:
    """A module is used twice, and its gradient leaves after the first use."""
    for module in site.model.module.modules():
        own = [name for name, param in module._parameters.items() if param is not None and param.requires_grad]
        if own:
            _only_first_use(site, module, own)
    site.model.module.register_forward_pre_hook(lambda *_: _CALLS.clear())


_CALLS: dict[int, int] = {}


def _only_first_use(site: Site, module: nn.Module, own: list[str]) -> None:
    def enter(_module: nn.Module, _args: object) -> None:
        _CALLS[id(module)] = _CALLS.get(id(module), 0) + 1
        if site.acts and _CALLS[id(module)] > 1:
            for name in own:
                weight = module._parameters[name]
                assert weight is not None
                module.__dict__[name] = torch.lerp(weight, weight.detach(), site.amount)

    def leave(_module: nn.Module, _args: object, _output: object) -> None:
        for name in own:
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


@fault("forward", ZERO3)
def wrong_targets(site: Site) -> None:
    """One rank's rows are held against the wrong tokens."""
    if site.rank != site.size - 1:
        return

    def wrapped(method: Callable[..., Any], batch: Any, *, last: bool) -> Any:
        rows = max(1, round(site.amount * batch.tokens.shape[0]))
        targets = torch.cat([batch.tokens[:rows], batch.targets[rows:]])
        return method(type(batch)(batch.tokens, targets), last=last)

    site.around(site.engine, "forward_backward", wrapped)
