"""copy.deepcopy of a sharded model: sharded alike, with equal weights, trains apart and shares nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness.fsdp import MixedPrecisionPolicy, ShardedModel, fully_shard_model, fully_shard_optimizer
from tests.fsdp.checked import each_holds, each_is_found, of_slips
from tests.fsdp.pairs import Block, Model as Tied, adamw, close, data, loss_of, take_step

RANKS = 2


class Marked(nn.Parameter):
    """A class of the program's own."""


def _count(module: nn.Module, *_: Any) -> None:
    module.get_buffer("calls").add_(1)


class Net(Tied):
    """Tied, with a frozen bias, a counted buffer, a parameter of a class of its own, and a hook of the program's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.blocks[0].up.bias.requires_grad_(False)
        self.gain = Marked(torch.ones(3))
        self.gain.note = "kept"
        self.register_forward_hook(_count)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out * self.gain.mean()


def _sharded(strategy: str, **more: Any) -> tuple[ShardedModel, torch.optim.Optimizer]:
    model = fully_shard_model(Net(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy, **more)
    return model, fully_shard_optimizer(adamw(model))


def _whole(model: ShardedModel) -> dict[str, Tensor]:
    return dict(model.full_weights())


def _differs(model: ShardedModel, plain: nn.Module, what: str) -> list[str]:
    right = {name: param.detach().double() for name, param in plain.named_parameters()}
    return [f"{what}: {name}" for name in close(_whole(model), right)]


def apart(rank: int, strategy: str) -> list[str]:
    """Original and copy train on, each on data of its own, as two models of one process do."""
    (model, optimizer), plain = _sharded(strategy), Net()
    plain_optimizer, everyone = adamw(plain), range(RANKS)
    take_step(model, optimizer, 0, [rank])
    take_step(plain, plain_optimizer, 0, everyone)
    other, plain_other = copy.deepcopy(model), copy.deepcopy(plain)
    told = [f"copied {name}" for name, value in _whole(model).items() if not torch.equal(value, _whole(other)[name])]
    own, theirs = _memory(model), _memory(other)
    told += ["memory is shared"] if own & theirs else []
    gain = other.module.get_parameter("gain")
    told += [] if getattr(gain, "note", "") == "kept" else ["an attribute is lost"]
    told += [] if not other.get_parameter("blocks.0.up.bias").requires_grad else ["what was frozen is trained"]
    told += [] if other.exit.weight is other.entry.weight and type(other) is type(model) else ["what it is"]
    for place, (trained, stepped) in enumerate(((other, plain_other), (model, plain))):
        updates, plain_updates = fully_shard_optimizer(adamw(trained)), adamw(stepped)
        for number in (1, 2):
            take_step(trained, updates, 10 * place + number, [rank])
            take_step(stepped, plain_updates, 10 * place + number, everyone)
    told += _differs(model, plain, "the original") + _differs(other, plain_other, "the copy")
    hooks = [
        sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in each.module.modules())
        for each in (model, other)
    ]
    told += [] if hooks[0] == hooks[1] else [f"{hooks} hooks"]
    calls = [int(each.module.get_buffer("calls")) for each in (model, other)]
    told += [] if calls == [3, 3] else [f"{calls} calls"]
    again = copy.deepcopy(other)
    return told + [n for n, v in _whole(other).items() if not torch.equal(v, _whole(again)[n])]


def _memory(model: ShardedModel) -> set[int]:
    held = [
        t
        for bucket in model.engine.buckets
        for t in (*bucket.main_shards, bucket.compute)
        if t.untyped_storage().size()
    ]
    return {t.untyped_storage().data_ptr() for t in (*held, *model.buffers())}


def narrow(rank: int, strategy: str) -> list[str]:
    """Main weights that bf16 cannot hold are copied with all their bits; what was frozen since stays so."""
    module = Net().to(torch.bfloat16)
    model = fully_shard_model(
        module,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
    )
    model.get_parameter("blocks.1.up.bias").requires_grad_(False)
    optimizer = fully_shard_optimizer(adamw(model))
    loss_of(model, data(0, rank).bfloat16()).backward()
    optimizer.step()
    other, told = copy.deepcopy(model), []
    for name, value in _whole(model).items():
        told += [] if torch.equal(value, _whole(other)[name]) else [name]
    told += ["what was frozen is trained"] if other.get_parameter("blocks.1.up.bias").requires_grad else []
    x = data(1, rank).bfloat16()
    return told + ([] if torch.equal(model(x), other(x)) else ["another output"])


def averaged(rank: int, strategy: str) -> list[str]:
    """torch's AveragedModel, of which a copy is the average."""
    (model, optimizer), plain = _sharded(strategy), Net()
    plain_optimizer = adamw(plain)
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (model, plain)]
    for number in range(3):
        take_step(model, optimizer, number, [rank])
        take_step(plain, plain_optimizer, number, range(RANKS))
        for average, of in zip(averages, (model, plain), strict=True):
            average.update_parameters(of)
    found = _differs(averages[0].module, averages[1].module, "average")
    x = data(9, 0)
    return found + ([] if torch.allclose(averages[0](x), averages[1](x), atol=1e-5) else ["what it computes"])


CHECKS: dict[str, Callable[[int, str], list[str]]] = {each.__name__: each for each in (apart, narrow, averaged)}


MUTANTS = of_slips(
    """
    weights of nobody: A copy has no weights
        fsdp.sharding.adopt_weights: lambda *_, **__: None
        apart
    hooks of the other: Hooks of the original are on the copy, too
        fsdp.sharding.OrderedDict: ()
        apart
    """
)


test_a_copy_is_as_in_one_process = each_holds(__name__, CHECKS)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "Copies of sharded models")
