"""How megatron-fsdp's entries are called, and its names for weights and dtypes; what cannot be is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from harness.fsdp import (
    MegatronModel,
    MixedPrecisionPolicy,
    StepError,
    UnknownPlan,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.fsdp.checked import RANKS, each_holds, each_is_found, of_slips, said
from tests.fsdp.habits.world import Habits
from tests.fsdp.pairs import WIDTH, Block, Model, data, loss_of, same

LR = 0.05


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """It shows the scale of a gradient, which Adam hides."""
    return torch.optim.SGD(module.parameters(), lr=LR)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LR, eps=1e-4)


def sharded(strategy: str, module: nn.Module | None = None, **more: Any) -> MegatronModel:
    module = Model() if module is None else module
    return fully_shard_model(module, zero_dp_strategy=strategy, **{"fsdp_unit_modules": [Block]} | more)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def with_optimizer(
    strategy: str, make: Make = sgd, module: nn.Module | None = None, **more: Any
) -> tuple[MegatronModel, torch.optim.Optimizer]:
    """Built as upstream's users do: over the sharded model's parameters, and given alone."""
    model = sharded(strategy, module, **more)
    return model, fully_shard_optimizer(make(model))


def plainly(steps: int, factor: float = 1.0, make: Make = sgd) -> nn.Module:
    """The same steps in one process, gradients multiplied by a factor."""
    module = Model()
    optimizer = make(module)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (loss_of(module, data(step, rank)) * factor / RANKS).backward()
        optimizer.step()
    return module


def differs(model: MegatronModel, plain: nn.Module) -> list[str]:
    """Names of weights that are not those of a plain module, up to rounding."""
    right = {name: param.detach() for name, param in plain.named_parameters()}
    found = dict(model.full_weights())
    return [name for name, value in right.items() if not torch.allclose(found[name], value, rtol=1e-5, atol=1e-6)]


CHECKS = Habits()


@CHECKS.check
def meshes(rank: int, strategy: str) -> list[str]:
    """Flattened dimensions and a tensor axis of one rank are accepted; others are refused by name."""
    mesh = init_device_mesh("cpu", (1, 2, 1, 1), mesh_dim_names=("outer", "shard", "cp", "tp"))
    mesh[("shard", "cp")]._flatten("shard_cp")
    mesh[("outer", "shard", "cp")]._flatten("all")
    names = {"device_mesh": mesh, "dp_shard_dim": "shard_cp", "tp_dim": "tp"}
    told = []
    for more in ({}, {"dp_outer_dim": "outer", "hybrid_fsdp_group": mesh["all"].get_group()}):
        model, optimizer = with_optimizer(strategy, **names, **more)
        loss_of(model, data(0, rank)).backward()
        optimizer.step()
        told += differs(model, plainly(1))
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tp_dim": "shard"}, UnknownPlan, "are on the tensor-parallel axis and on the sharding one"),
        ({"tp_dim": "tensor"}, KeyError, "'tensor' does not exist"),
        ({"dp_shard_dim": "cp_shard"}, KeyError, "'outer', 'shard', 'cp', 'tp'"),
        ({"dp_shard_dim": None}, RuntimeError, "`mesh_dim` needs to be specified"),
        ({"device_mesh": None, "dp_shard_dim": None}, ValueError, "device_mesh is None"),
    ]
    for change, kind, word in wrong:
        told += said(lambda change=change: sharded(strategy, **names | change), kind, word)
    return told


@CHECKS.check
def calling(rank: int, strategy: str) -> list[str]:
    """`fully_shard_optimizer` takes the optimizer alone, by position or name, or after the model."""
    told = []
    for call in (
        lambda model: fully_shard_optimizer(sgd(model)),
        lambda model: fully_shard_optimizer(optimizer=sgd(model), preproc_state_dict_for_dcp_ckpt=True),
        lambda model: fully_shard_optimizer(sgd(model), True),
        lambda model: fully_shard_optimizer(model, sgd(model)),
        lambda model: fully_shard_optimizer(model=model, optimizer=sgd(model.module)),
    ):
        model = sharded(strategy)
        optimizer = call(model)
        loss_of(model, data(0, rank)).backward()
        optimizer.step()
        told += differs(model, plainly(1))
    model = sharded(strategy)
    told += said(lambda: fully_shard_optimizer(sgd(model), False), NotImplementedError, "preproc_state_dict_for_dcp")
    told += said(lambda: fully_shard_optimizer(model), TypeError, "optimizer")
    return told + said(lambda: fully_shard_optimizer(list(model.parameters())), TypeError, "takes an optimizer")


@CHECKS.check
def compiling(rank: int, strategy: str) -> list[str]:
    """A whole model, the module inside it and units are compiled, without the engine's hooks on them."""
    model, optimizer = with_optimizer(strategy)
    compiled: Any = torch.compile(model, backend="eager")
    compiled.set_model_auto_sync(True)
    model.module.blocks[0].compile(backend="eager")
    compiled(data(0, rank)).square().mean().backward()
    optimizer.step()
    told = differs(model, plainly(1))
    model.module.compile(backend="eager")
    optimizer.zero_grad()
    compiled(data(1, rank)).square().mean().backward()
    optimizer.step()
    return told + differs(model, plainly(2))


@CHECKS.check
def refusing(rank: int, strategy: str) -> list[str]:
    """What has no meaning here says what to use."""
    model, optimizer = with_optimizer(strategy)
    told = said(lambda: model.finish_grad_sync(True), NotImplementedError, "force_all_reduce=True", "full_gradients()")
    told += said(lambda: model.start_param_sync(force_sync=True), NotImplementedError, "force_sync=True", "unsharded()")
    told += said(lambda: optimizer.step(clip=1), TypeError, "step()", "'clip'")
    return told + said(lambda: model.nothing, AttributeError, "no attribute 'nothing'")


# -- weights -----------------------------------------------------------------------------------------------------------


@CHECKS.check
def broadcasting(rank: int, strategy: str) -> list[str]:
    """What the first rank typed into weights that all ranks keep is every rank's; shards that nobody else has stay."""
    told = []
    for dtype, policy in ((torch.float32, None), (torch.bfloat16, MixedPrecisionPolicy())):
        model = sharded(strategy, Model().to(dtype), mixed_precision_policy=policy)
        right = {name: value.clone() for name, value in model.full_weights()}
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1 + rank if strategy == "no_shard" else 1)
        right = {name: value + 1 for name, value in right.items()}
        model.broadcast_params()
        found = {name: value.float() for name, value in model.full_weights()}
        told += [f"{name} in {dtype}" for name in same(found, right)]
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, model(data(0, 0).to(dtype)))
        told += [] if torch.equal(everyone[0], everyone[1]) else [f"the forward in {dtype}"]
    return told


class Attention(nn.Module):
    """torch's own, whose `_reset_parameters` sets a parameter of the module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.attention(*[self.first(x)] * 3)[0])
        return y


@CHECKS.check
def resetting(rank: int, strategy: str) -> list[str]:
    """A model on the meta device gets the numbers that an ordinary construction gives."""
    torch.manual_seed(5)
    right = dict(Attention().named_parameters())
    with torch.device("meta"):
        module = Attention()
    torch.manual_seed(5 + rank)
    where = {"init_model_with_meta_device": True, "device": torch.device("cpu")}
    model = sharded(strategy, module, fsdp_unit_modules=[nn.Linear, nn.MultiheadAttention], **where)
    return same(dict(model.full_weights()), {name: value.detach() for name, value in right.items()})


# -- dtypes ------------------------------------------------------------------------------------------------------------


class Partly(Model):
    """With a part that no forward uses, which decay must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


@CHECKS.check
def rewiring(rank: int, strategy: str) -> list[str]:
    """Inside the context gradients are what another policy gives from the start, bit for bit; outside, as before."""

    def train(model: MegatronModel, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Tensor]:
        loss_of(model, data(step, rank)).backward()
        found = {name: value.clone() for name, value in model.full_gradients()}
        optimizer.step()
        optimizer.zero_grad()
        return found

    told = []
    for wire in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(grad_comm_dtype=wire)
        model, optimizer = with_optimizer(strategy, adamw, Partly())
        other, its = with_optimizer(strategy, adamw, Partly(), mixed_precision_policy=policy)
        usual, usuals = with_optimizer(strategy, adamw, Partly())
        with model.mixed_precision_context(policy):
            told += [] if model.engine.policy == policy else ["the policy"]
            told += [f"{name} inside, {wire}" for name in same(train(model, optimizer, 0), train(other, its, 0))]
        told += [] if model.engine.policy == usual.engine.policy else ["the policy is kept"]
        told += [f"{name}, {wire}" for name in same(dict(model.full_weights()), dict(other.full_weights()))]
        usual.load_state_dict(model.state_dict())
        usuals.load_state_dict(optimizer.state_dict())
        told += [f"{name} outside, {wire}" for name in same(train(model, optimizer, 1), train(usual, usuals, 1))]
        told += [f"{n} after, {wire}" for n in same(dict(model.full_weights()), dict(usual.full_weights()))]
    return told


@CHECKS.check
def rewired_wrongly(rank: int, strategy: str) -> list[str]:
    """In the middle of a step, for other dtypes, with fixed buffers: refused; an error inside leaves nothing behind."""

    def enter(model: MegatronModel, policy: MixedPrecisionPolicy) -> Any:
        return model.mixed_precision_context(policy).__enter__()

    model, optimizer = with_optimizer(strategy)
    half = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    with model.no_sync():
        loss_of(model, data(0, rank)).backward()
    told = said(lambda: enter(model, half), StepError, "after zero_grad()")
    model.zero_grad()
    wrong = MixedPrecisionPolicy(main_grads_dtype=torch.float64)
    told += said(lambda: enter(model, wrong), NotImplementedError, "main_grads_dtype=")
    fixed = sharded(strategy, fsdp_double_buffer=True)
    told += said(lambda: enter(fixed, half), NotImplementedError, "double_buffer")
    before = model.engine.policy

    def broken() -> None:
        with model.mixed_precision_context(half):
            loss_of(model, data(0, rank)).backward()
            raise KeyError("the loop's own")

    told += said(broken, KeyError, "the loop's own") + ([] if model.engine.policy == before else ["the policy is kept"])
    told += said(optimizer.step, StepError, "zero_grad()")
    optimizer.zero_grad()
    loss_of(model, data(0, rank)).backward()
    optimizer.step()
    return told + differs(model, plainly(1))


test_a_name_of_megatron_fsdp_does_what_it_says = each_holds(__name__, CHECKS)


# -- mutants -----------------------------------------------------------------------------------------------------------


MUTANTS = of_slips(
    r"""
    [megatron-fsdp's names: calls]
    one axis is two: Ranks may be on the tensor-parallel axis and on the sharding one at once
        fsdp.build.check_plan: lambda *_, **__: None
        meshes
    the compiler sees hooks: torch.compile traces the engine's hooks
        fsdp.runtime.units.WeakHook.__call__: vars(WeakHook.__call__)["__wrapped__"]
        compiling
    [megatron-fsdp's names: weights]
    each its own: broadcast_params lets each rank keep what it has
        fsdp.megatron.held_by_several: lambda *_, **__: []
        broadcasting / no_shard
    parents are reset first: A module that resets what is inside it is reset before that
        fsdp.runtime.weights._turns: lambda part, seen: ([each] for each in part.modules())
        resetting / optim
    the old wire: Buckets go on sending in the dtype from before the context
        fsdp.storage.param_group.ParamGroup.send_as: integers, mesh =
            => if hasattr(self, "inner"):\n        return\n    integers, mesh =
        rewiring
    the old policy stays: A context that ends leaves its wire behind
        fsdp.megatron.MegatronModel.mixed_precision_context: engine.set_policy(before) => pass
        rewiring / optim
    """
)


test_a_wrong_name_is_found = each_is_found(__name__, MUTANTS)
