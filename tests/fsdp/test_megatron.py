"""megatron-fsdp's names: each does what it says under every strategy, and what cannot be is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from harness.fsdp import (
    MegatronModel,
    MixedPrecisionPolicy,
    construction,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from harness.fsdp import binding as binding_module
from harness.fsdp.megatron import ELSEWHERE
from harness.fsdp.runtime import materialize
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.step import Step
from harness.fsdp.runtime.usage import Usage
from harness.fsdp.state import by_parameter
from harness.fsdp.state.row_shard import RowShard
from harness.fsdp.storage import edits
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.tensor_parallel.parameters import UnknownPlan
from harness.fsdp.update.groups import Groups
from harness.fsdp.update.loose_runs import FlatPieceError
from harness.fsdp.wrapper import ModuleWrapper
from tests.fsdp.checked import RANKS, Mutant, holds, is_found
from tests.fsdp.pairs import STRATEGIES, WIDTH, Block, Model, close, data, loss_of, plain_gradients, same
from tests.support.mutants import each

LR = 0.05
MOMENTS = ("exp_avg", "exp_avg_sq")


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


def said(call: Callable[[], Any], kind: type[Exception], *words: str) -> list[str]:
    """What is wrong with a refusal."""
    try:
        call()
    except kind as error:
        return [f"{error} does not say {word}" for word in words if word not in str(error)]
    return [f"not refused: {words}"]


# -- a step, verb by verb ----------------------------------------------------------------------------------------------


def every_verb(rank: int, strategy: str) -> list[str]:
    """A loop that calls everything itself trains as one process does."""
    model, optimizer = with_optimizer(strategy)
    for step in range(3):
        optimizer.zero_grad(zero_grad_buffer=False)
        model.zero_grad_buffer()
        model.start_param_sync()
        loss = loss_of(model, data(step, rank))
        if step == 1:
            model.synchronize_param_gather()
        loss.backward()
        model.start_grad_sync()
        model.synchronize_gradient_reduce()
        model.finish_grad_sync(force_all_reduce=False)
        model.attach_grad_to_optimizer_state()
        model.scale_gradients(0.25)
        optimizer.step(sync_grad_before_optimizer_step=False, install_optimized_model_weights=False)
        model.install_optimized_model_weights()
        model.synchronize_param_gather()
    told = differs(model, plainly(3, 0.25))
    right = plainly(3, 0.25)(data(9, 0))
    return told + ([] if torch.allclose(model(data(9, 0)), right, rtol=1e-4, atol=1e-5) else ["the forward"])


def scaling(rank: int, strategy: str) -> list[str]:
    """Gradients are multiplied once for each call; without any nothing happens."""
    model = sharded(strategy)
    model.scale_gradients(100.0)
    loss_of(model, data(0, rank)).backward()
    model.scale_gradients(0.5)
    model.scale_gradients(0.5)
    right = plain_gradients([data(0, each) for each in range(RANKS)], 0.25 / RANKS)
    return close(dict(model.full_gradients()), right)


def attaching(rank: int, strategy: str) -> list[str]:
    """Gradients are the optimizer's before it steps, and are not before they are attached."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    told = [each for weight in weights for each in said(lambda: weight.grad, FlatPieceError, "inside the step alone")]  # noqa: B023 # called here
    model.attach_grad_to_optimizer_state()
    told += ["not there"] if any(weight.grad is None for weight in weights) else []
    squares = sum((weight.grad.double().square().sum() for weight in weights), torch.zeros((), dtype=torch.float64))
    if strategy != "no_shard":
        dist.all_reduce(squares)
    told += [] if abs(float(squares.sqrt()) / model.grad_norm() - 1) < 1e-5 else ["other gradients"]
    return told + said(sharded(strategy).attach_grad_to_optimizer_state, RuntimeError, "fully_shard_optimizer(optim")


def zeroing(rank: int, strategy: str) -> list[str]:
    """`zero_grad_buffer=False` takes gradients from the optimizer alone; the model's are forgotten by name."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    model.attach_grad_to_optimizer_state()
    optimizer.zero_grad(zero_grad_buffer=False)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    told = ["the optimizer has gradients"] if any(weight.grad is not None for weight in weights) else []
    told += [] if model.has_gradients else ["the model has none"]
    right = plain_gradients([data(0, each) for each in range(RANKS)], 1 / RANKS)
    told += close(dict(model.full_gradients()), right)
    model.zero_grad_buffer()
    return told + (["they are kept"] if model.has_gradients else [])


def postponing(rank: int, strategy: str) -> list[str]:
    """Weights that are updated and not installed are not computed with, whatever the strategy keeps."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    optimizer.step(install_optimized_model_weights=False)
    optimizer.zero_grad()
    told = said(lambda: model(data(0, rank)), RuntimeError, "model.install_optimized_model_weights()")
    told += said(lambda: model.gathered().__enter__(), RuntimeError, "model.install_optimized_model_weights()")
    model.install_optimized_model_weights()
    told += differs(model, plainly(1))
    return told + ([] if torch.allclose(model(data(9, 0)), plainly(1)(data(9, 0)), atol=1e-5) else ["the forward"])


def unsynced(rank: int, strategy: str) -> list[str]:
    """A step that is told not to finish gradients does not step with unfinished ones."""
    model, optimizer = with_optimizer(strategy)
    loss_of(model, data(0, rank)).backward()
    told = said(
        lambda: optimizer.step(sync_grad_before_optimizer_step=False), RuntimeError, "call model.finish_grad_sync()"
    )
    model.finish_grad_sync()
    optimizer.step(sync_grad_before_optimizer_step=False)
    return told + differs(model, plainly(1))


def last_microbatch(rank: int, strategy: str) -> list[str]:
    """`is_last_microbatch` and `model_auto_sync` may be set; a step that nobody ended is refused by every verb."""
    told = []
    for name in ("is_last_microbatch", "model_auto_sync"):
        model = sharded(strategy)
        for index in range(3):
            setattr(model, name, index == 2)
            told += [] if getattr(model, name) is (index == 2) else [f"{name} is another"]
            (loss_of(model, data(index, rank)) / 3).backward()
            if index == 0 and strategy in STRATEGIES[:2]:
                for verb in (model.start_grad_sync, model.synchronize_gradient_reduce, model.finish_grad_sync):
                    told += said(verb, RuntimeError, "no_sync")
        right = plain_gradients([data(k, r) for k, r in itertools.product(range(3), range(RANKS))], 1 / RANKS / 3)
        told += close(dict(model.full_gradients()), right)
    return told


def ahead(rank: int, strategy: str) -> list[str]:
    """What is gathered ahead is dropped again by name; weights at rest stay unreadable or are counted."""
    model = sharded(strategy)
    loss = loss_of(model, data(0, rank))
    model.start_param_sync()
    model.synchronize_param_gather()
    whole = [unit.name for unit in model._parts.gather.order if model._parts.gather.is_whole(unit)]
    loss.backward()
    right = plain_gradients([data(0, each) for each in range(RANKS)], 1 / RANKS)
    return [f"{name} is whole" for name in whole] + close(dict(model.full_gradients()), right)


# -- weights -----------------------------------------------------------------------------------------------------------


def broadcasting(rank: int, strategy: str) -> list[str]:
    """What the first rank typed into its weights is every rank's; shards that nobody else has stay."""
    told = []
    for dtype, policy in ((torch.float32, None), (torch.bfloat16, MixedPrecisionPolicy())):
        model = sharded(strategy, Model().to(dtype), mixed_precision_policy=policy)
        right = {name: value.clone() for name, value in model.full_weights()}
        if strategy != "optim_grads_params":
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1 + rank)
            right = {name: (value.to(dtype) + 1).to(torch.float32) for name, value in right.items()}
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
            told += [] if model.policy == policy else ["the policy"]
            told += [f"{name} inside, {wire}" for name in same(train(model, optimizer, 0), train(other, its, 0))]
        told += [] if model.policy == usual.policy else ["the policy is kept"]
        told += [f"{name}, {wire}" for name in same(dict(model.full_weights()), dict(other.full_weights()))]
        usual.load_state_dict(model.state_dict())
        usuals.load_state_dict(optimizer.state_dict())
        told += [f"{name} outside, {wire}" for name in same(train(model, optimizer, 1), train(usual, usuals, 1))]
        told += [f"{n} after, {wire}" for n in same(dict(model.full_weights()), dict(usual.full_weights()))]
    return told


def rewired_wrongly(rank: int, strategy: str) -> list[str]:
    """In the middle of a step, for other dtypes, with fixed buffers: refused; an error inside leaves nothing behind."""
    model, optimizer = with_optimizer(strategy)
    half = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    loss_of(model, data(0, rank)).backward()
    told = said(lambda: model.reset_mixed_precision_policy(half), RuntimeError, "after zero_grad()")
    model.zero_grad()
    wrong = MixedPrecisionPolicy(main_grads_dtype=torch.float64)
    told += said(lambda: model.reset_mixed_precision_policy(wrong), NotImplementedError, "main_grads_dtype=")
    fixed = sharded(strategy, fsdp_double_buffer=True)
    told += said(lambda: fixed.reset_mixed_precision_policy(half), NotImplementedError, "double_buffer")
    before = model.policy

    def broken() -> None:
        with model.mixed_precision_context(half):
            loss_of(model, data(0, rank)).backward()
            raise KeyError("the loop's own")

    told += said(broken, KeyError, "the loop's own") + ([] if model.policy == before else ["the policy is kept"])
    told += said(optimizer.step, RuntimeError, "zero_grad()")
    optimizer.zero_grad()
    loss_of(model, data(0, rank)).backward()
    optimizer.step()
    return told + differs(model, plainly(1))


# -- the optimizer's state ---------------------------------------------------------------------------------------------


def grouped(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups, in another order than the model's, a frozen parameter among them."""
    named = dict(module.named_parameters())
    named["blocks.1.up.weight"].requires_grad_(False)
    last = [param for name, param in named.items() if name.startswith("blocks.2")]
    rest = [param for name, param in reversed(named.items()) if not name.startswith("blocks.2")]
    return torch.optim.AdamW([{"params": last, "lr": 0.01}, {"params": rest}], lr=LR, eps=1e-4)


def frozen() -> nn.Module:
    module = Model()
    module.blocks[1].up.weight.requires_grad_(False)
    return module


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As one process has it. *Collective.*"""
    found = optimizer.state_dict()
    state = {
        number: {entry: v.full_tensor() if isinstance(v, RowShard) else v for entry, v in entries.items()}
        for number, entries in found["state"].items()
    }
    return {"state": state, "param_groups": found["param_groups"]}


def saving(rank: int, strategy: str) -> list[str]:
    """Numbers, entries and settings are those of torch in one process, and go on in either from the other's."""
    model, optimizer = with_optimizer(strategy, grouped, frozen())
    plain = frozen()
    theirs = grouped(plain)

    def step(number: int) -> None:
        theirs.zero_grad()
        for index in range(RANKS):
            (loss_of(plain, data(number, index)) / RANKS).backward()
        theirs.step()
        optimizer.zero_grad()
        loss_of(model, data(number, rank)).backward()
        optimizer.step()

    blank = whole_state(optimizer)["state"].values()
    told = ["not blank at first"] if any(value.any() for entries in blank for value in entries.values()) else []
    step(0)
    right, found = theirs.state_dict(), whole_state(optimizer)
    if found["state"].keys() != right["state"].keys():
        return [f"numbers {list(found['state'])}"]
    for number, entries in right["state"].items():
        got = found["state"][number]
        if got.keys() != entries.keys() or got["step"] != 1:
            told.append(f"entries {list(got)}")
        told += [f"{number} {e}" for e in MOMENTS if not torch.allclose(got[e], entries[e], atol=1e-7)]
    for got, group in zip(found["param_groups"], right["param_groups"], strict=True):
        told += [key for key, value in group.items() if key not in by_parameter.KERNELS and got[key] != value]
    model, optimizer = with_optimizer(strategy, grouped, frozen())
    model.load_state_dict({name: value.detach().clone() for name, value in plain.state_dict().items()})
    changed = deepcopy(right)
    changed["param_groups"][0]["lr"] = theirs.param_groups[0]["lr"] = 0.03
    optimizer.load_state_dict(changed)
    step(1)
    return told + [f"{name} afterwards" for name in differs(model, plain)]


def moving(rank: int, strategy: str) -> list[str]:
    """State goes from another strategy to this one, and the next update is the same."""
    source = STRATEGIES[STRATEGIES.index(strategy) - 1]
    first, its = with_optimizer(source, adamw)
    loss_of(first, data(0, rank)).backward()
    its.step()
    its.zero_grad()
    second, others = with_optimizer(strategy, adamw, Model(seed=8))
    second.load_state_dict(first.state_dict())
    others.load_state_dict(its.state_dict())
    for model, optimizer in ((first, its), (second, others)):
        loss_of(model, data(1, rank)).backward()
        optimizer.step()
    pairs = zip(first.full_weights(), second.full_weights(), strict=True)
    return [name for (name, one), (_, other) in pairs if not torch.allclose(one, other, atol=1e-7)]


def misfits(rank: int, strategy: str) -> list[str]:
    """What does not fit is refused before anything is loaded."""
    model, optimizer = with_optimizer(strategy, adamw)
    loss_of(model, data(0, rank)).backward()
    optimizer.step()
    before = whole_state(optimizer)
    few, other = deepcopy(before), deepcopy(before)
    few["param_groups"][0]["params"].pop()
    other["state"][0]["exp_avg"] = torch.zeros(3, 3)
    told = said(lambda: optimizer.load_state_dict(few), ValueError, "groups of")
    told += said(lambda: optimizer.load_state_dict(other), ValueError, "exp_avg", "nothing was loaded")
    other = deepcopy(before)
    other["state"][0]["more"] = torch.zeros(3)
    told += said(lambda: optimizer.load_state_dict(other), ValueError, "unexpected", "more")
    after = whole_state(optimizer)
    for number, entries in before["state"].items():
        told += [f"{number} {e}" for e in MOMENTS if not torch.equal(entries[e], after["state"][number][e])]
    return told


# -- how it is called --------------------------------------------------------------------------------------------------


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
        ({"tp_dim": "tensor"}, ValueError, "tp_dim='tensor' is not a dimension"),
        ({"dp_shard_dim": "cp_shard"}, ValueError, "it has outer, shard, cp, tp"),
        ({"dp_shard_dim": None}, ValueError, "dp_shard_dim=None"),
        ({"dp_outer_dim": "outer"}, ValueError, "hybrid_fsdp_group"),
        ({"device_mesh": None, "dp_shard_dim": None}, ValueError, "device_mesh is None"),
    ]
    for change, kind, word in wrong:
        told += said(lambda change=change: sharded(strategy, **names | change), kind, word)
    return told


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
    told += said(lambda: fully_shard_optimizer(sgd(Model())), ValueError, "no parameter of SGD", "fully_shard_model")
    told += said(lambda: fully_shard_optimizer(sgd(model), False), NotImplementedError, "preproc_state_dict_for_dcp")
    told += said(lambda: fully_shard_optimizer(model), TypeError, "optimizer")
    told += said(lambda: fully_shard_optimizer(list(model.parameters())), TypeError, "takes an optimizer")
    other = sharded(strategy)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=LR)
    return told + said(lambda: fully_shard_optimizer(both), ValueError, "2 sharded models")


def compiling(rank: int, strategy: str) -> list[str]:
    """A whole model that was given to torch.compile runs as it is."""
    model, optimizer = with_optimizer(strategy)
    compiled: Any = torch.compile(model, backend="eager")
    compiled.set_model_auto_sync(True)
    compiled(data(0, rank)).square().mean().backward()
    optimizer.step()
    return differs(model, plainly(1))


def refusing(rank: int, strategy: str) -> list[str]:
    """What has no meaning here says what to use; code that asks whether it is there is told that it is not."""
    model, optimizer = with_optimizer(strategy)
    told = said(lambda: model.finish_grad_sync(True), NotImplementedError, "force_all_reduce=True", "full_gradients()")
    told += said(lambda: model.start_param_sync(force_sync=True), NotImplementedError, "force_sync=True", "gathered()")
    told += said(lambda: optimizer.step(clip=1), NotImplementedError, "step(clip)", "sync_grad_before_optimizer_step")
    told += _helpers(model, optimizer)
    for name in ELSEWHERE:
        told += said(lambda name=name: getattr(model, name), AttributeError, name, "megatron-fsdp's own")
        told += [f"{name} is there"] if hasattr(model, name) else []
    return told + said(lambda: model.nothing, AttributeError, "no attribute 'nothing'")


def _helpers(model: MegatronModel, optimizer: torch.optim.Optimizer) -> list[str]:
    """torch's helpers for an optimizer's state, before a first step and after it."""
    told = []
    given = {"state": {"0.weight": {}}, "param_groups": []}
    for stepped in (False, True):
        if stepped:
            optimizer.state_dict()  # makes state
        for ask in (
            lambda: get_optimizer_state_dict(model, optimizer),
            lambda: set_optimizer_state_dict(model, optimizer, given),
        ):
            told += said(ask, NotImplementedError, "call optimizer.state_dict() and load_state_dict()")
    return told


ALL = (
    every_verb, scaling, attaching, zeroing, postponing, unsynced, last_microbatch, ahead, broadcasting, resetting,
    rewiring, rewired_wrongly, saving, moving, misfits, meshes, calling, compiling, refusing,
)  # fmt: skip
CHECKS: dict[str, Callable[[int, str], list[str]]] = {check.__name__: check for check in ALL}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_name_of_megatron_fsdp_does_what_it_says(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


def test_the_entries_return_the_model_with_its_names() -> None:
    names = (
        "install_optimized_model_weights zero_grad_buffer scale_gradients start_param_sync start_grad_sync"
        " synchronize_param_gather synchronize_gradient_reduce attach_grad_to_optimizer_state broadcast_params"
        " mixed_precision_context reset_mixed_precision_policy finish_grad_sync no_sync sync set_model_auto_sync"
    )
    assert not [name for name in names.split() if not callable(getattr(MegatronModel, name, None))]
    assert fully_shard.__annotations__["return"] == "tuple[MegatronModel, Opt]"


# -- mutants -----------------------------------------------------------------------------------------------------------


def parents_first(part: nn.Module, seen: set[int]) -> Any:
    """Each module in definition order, by itself."""
    return ([each] for each in part.modules())


def keeps_settings(optimizer: torch.optim.Optimizer, *given: Any) -> None:
    before = [dict(group) for group in optimizer.param_groups]
    _load(optimizer, *given)
    for group, kept in zip(optimizer.param_groups, before, strict=True):
        group.update(kept)


def forgets_all(model: Any, sharded: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    sharded.detach()
    model.zero_grad()


_load, _send_as, _names_by_group = by_parameter.load_state_dict, Bucket.send_as, Groups.names_by_group
MUTANTS = {
    "stale weights are computed with": Mutant(
        "A forward runs although the update was never installed",
        lambda: mock.patch.object(Step, "check_installed"),
        "postponing",
        "optim",
    ),
    "steps with what is there": Mutant(
        "A step that is told not to finish gradients steps all the same",
        lambda: mock.patch.object(binding_module, "_refuse_unfinished"),
        "unsynced",
    ),
    "gradients are scaled in vain": Mutant(
        "scale_gradients changes nothing",
        lambda: mock.patch("harness.fsdp.megatron.clipping.scale_gradients"),
        "scaling",
    ),
    "the buffer is zeroed, too": Mutant(
        "zero_grad(zero_grad_buffer=False) forgets the model's gradients",
        lambda: mock.patch.object(binding_module, "_zero_grad", forgets_all),
        "zeroing",
    ),
    "gathers are left under way": Mutant(
        "synchronize_param_gather drops nothing of what was fetched ahead",
        lambda: mock.patch.object(GatherPipeline, "settle"),
        "ahead",
    ),
    "main weights do not hear of it": Mutant(
        "broadcast_params changes compute weights, and main weights overwrite them",
        lambda: mock.patch.object(edits, "adopt_whole"),
        "broadcasting",
        "optim_grads",
    ),
    "parents are reset first": Mutant(
        "A module that resets what is inside it is reset before that",
        lambda: mock.patch.object(materialize, "_turns", parents_first),
        "resetting",
    ),
    "the old wire": Mutant(
        "Buckets go on sending in the dtype from before the context",
        lambda: mock.patch.object(Gradients, "send_as"),
        "rewiring",
    ),
    "the old policy stays": Mutant(
        "A context that ends leaves its wire behind",
        lambda: mock.patch.object(MegatronModel, "_set_policy", sets_once),
        "rewiring",
        "optim",
    ),
    "nobody counts": Mutant(
        "With another wire, ranks no longer know which parameters nobody used",
        lambda: mock.patch.object(Usage, "take_in"),
        "rewiring",
        "optim_grads",
    ),
    "one axis is two": Mutant(
        "Ranks may be on the tensor-parallel axis and on the sharding one at once",
        lambda: mock.patch.object(construction, "check_plan"),
        "meshes",
    ),
    "the compiler sees hooks": Mutant(
        "torch.compile traces the engine's hooks",
        lambda: mock.patch.object(ModuleWrapper, "forward", ModuleWrapper.forward.__wrapped__),
        "compiling",
    ),
    "helpers are not known": Mutant(
        "torch's get_optimizer_state_dict fails on a name of its own",
        lambda: mock.patch.object(binding_module, "TORCH_HELPERS", ""),
        "refusing",
    ),
    "numbers of trained parameters": Mutant(
        "Frozen parameters are not counted, so that numbers are not torch's",
        lambda: mock.patch.object(Groups, "names_by_group", trained_only),
        "saving",
    ),
    "settings are kept": Mutant(
        "What is loaded brings no learning rate",
        lambda: mock.patch.object(by_parameter, "load_state_dict", keeps_settings),
        "saving",
        "optim",
    ),
    "moments are not filled": Mutant(
        "What is loaded brings no moments",
        lambda: mock.patch.object(by_parameter, "_fill"),
        "moving",
        "no_shard",
    ),
}

_set_policy = MegatronModel._set_policy


def sets_once(self: MegatronModel, policy: MixedPrecisionPolicy) -> None:
    if self.policy.grad_comm_dtype is None:
        _set_policy(self, policy)


def trained_only(self: Groups, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    trained = {name for bucket in self.buckets if bucket.trainable for name, _ in bucket.params}
    return [[name for name in names if name in trained] for names in _names_by_group(self, optimizer)]


@pytest.mark.parametrize("name", each("megatron-fsdp's names", ((n, m.breaks) for n, m in MUTANTS.items())))
def test_a_wrong_name_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
