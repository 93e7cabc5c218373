"""How megatron-fsdp's entries are called: by mesh, optimizer and compiler; what cannot be is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from harness.fsdp import MegatronModel, UnknownPlan, build, fully_shard_optimizer, megatron
from harness.fsdp.megatron import ELSEWHERE
from harness.fsdp.runtime import weak_hooks
from harness.fsdp.runtime.weak_hooks import WeakHook
from tests.fsdp.checked import Mutant, holds, is_found
from tests.fsdp.megatron.models import LR, differs, plainly, said, sgd, sharded, with_optimizer
from tests.fsdp.pairs import STRATEGIES, Model, data, loss_of
from tests.support.mutants import each


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


def refusing(rank: int, strategy: str) -> list[str]:
    """What has no meaning here says what to use; code that asks whether it is there is told that it is not."""
    model, optimizer = with_optimizer(strategy)
    told = said(lambda: model.finish_grad_sync(True), NotImplementedError, "force_all_reduce=True", "full_gradients()")
    told += said(lambda: model.start_param_sync(force_sync=True), NotImplementedError, "force_sync=True", "unsharded()")
    told += said(lambda: optimizer.step(clip=1), NotImplementedError, "step(clip)", "sync_grad_before_optimizer_step")
    for name in ELSEWHERE:
        told += said(lambda name=name: getattr(model, name), AttributeError, name, "megatron-fsdp's own")
        told += [f"{name} is there"] if hasattr(model, name) else []
    return told + said(lambda: model.nothing, AttributeError, "no attribute 'nothing'")


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    check.__name__: check for check in (meshes, calling, compiling, refusing)
}


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
    assert megatron.fully_shard.__annotations__["return"] == "tuple[MegatronModel, Opt]"


# -- mutants -----------------------------------------------------------------------------------------------------------


_code = WeakHook.__call__.__code__.replace(co_name="another")
"""Code of which the compiler was told nothing."""

MUTANTS = {
    "one axis is two": Mutant(
        "Ranks may be on the tensor-parallel axis and on the sharding one at once",
        lambda: mock.patch.object(build, "check_plan"),
        "meshes",
    ),
    "the compiler sees hooks": Mutant(
        "torch.compile traces the engine's hooks",
        lambda: mock.patch.object(WeakHook, "__call__", FunctionType(_code, vars(weak_hooks))),
        "compiling",
    ),
}


@pytest.mark.parametrize("name", each("megatron-fsdp's names: calls", ((n, m.breaks) for n, m in MUTANTS.items())))
def test_a_wrong_name_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
