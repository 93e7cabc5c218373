"""Cut parameters at their edges: compiled blocks, ranks without an element, copies that part, torch's state helpers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from harness.fsdp import MixedPrecisionPolicy, fully_shard
from tests.fsdp.checked import each_holds, each_is_found, of_slips
from tests.fsdp.tensor_parallel.test_state import differing, stepped
from tests.fsdp.tensor_parallel.training import Case, Shape, mesh_of, sharded, step_of, whole_of

WORLD = 4
NARROW = 5
"""Over four ranks torch cuts this into 2, 2, 1 and none."""


def compiled(rank: int, strategy: str) -> list[str]:
    """Blocks that torch.compile traces train to the same bits: what it makes of a DTensor that begins inside a bucket
    begins there, too. The backend is "eager": others of torch 2.13 fail in the backward of cut blocks by themselves."""
    case = Case(2, 2, strategy=strategy, shape=Shape(layers=1, sequence_parallel=True))
    found = []
    for compiles in (False, True):
        model, optimizer = sharded(case, mesh_of(case))
        for block in model.module.blocks if compiles else ():
            block.compile(backend="eager")
        for step in range(2):
            step_of(case, model, optimizer, step)
        found.append(dict(model.full_weights()))
        model.close()
    plain, traced = found
    return [name for name, value in plain.items() if not torch.equal(value, traced[name])]


class Narrow(nn.Module):
    """Matrices through `NARROW` hidden units, and a tensor that is cut along its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, NARROW), nn.Linear(NARROW, 6)
        self.deep = nn.Parameter(torch.randn(3, NARROW, 2))

    def forward(self, x: Tensor) -> Tensor:
        squares = self.deep.square().sum()
        scale = squares.full_tensor() if isinstance(squares, DTensor) else squares
        out: Tensor = self.down(torch.tanh(self.up(x))) * scale
        return out


def narrow() -> Narrow:
    torch.manual_seed(3)
    return Narrow().double()


def nothing_here(rank: int, strategy: str) -> list[str]:
    """A rank with no element of a parameter takes part: in training, in the norm, and in putting state together."""
    mesh = mesh_of(Case(1, WORLD))
    module, plain = narrow(), narrow()
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(input_layouts=Shard(-1))}
    parallelize_module(module, mesh["tp"], plan)
    module.deep = nn.Parameter(distribute_tensor(module.deep, mesh["tp"], [Shard(1)]))
    model, optimizer = fully_shard(
        module, torch.optim.SGD(module.parameters(), lr=0.1), device_mesh=mesh, dp_shard_dim="inner", tp_dim="tp",
        zero_dp_strategy=strategy, mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )  # fmt: skip
    stepped = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(4, 6, dtype=torch.float64)
    for each_one in (model, plain):
        each_one(x).square().mean().backward()
    wanted = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    told = [] if abs(float(model.clip_grad_norm_(0.5)) / wanted - 1) < 1e-12 else ["the norm"]
    optimizer.step()
    stepped.step()
    whole = {name: whole_of(value) for name, value in model.state_dict().items()}
    for name, param in plain.named_parameters():
        told += [] if torch.allclose(whole[name], param, rtol=0, atol=1e-13) else [name]
    model.close()
    return told


FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
WAYS = {
    "sharded": (StateDictOptions(), StateDictOptions()),
    "full": (FULL, FULL),
    "full, of rank 0": (ON_RANK_0, FROM_RANK_0),
}
"""Options to get and to set with."""


def once_more(case: Case, model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Weights after a further step."""
    step_of(case, model, optimizer, 5)
    return dict(model.full_weights())


def helped(rank: int, strategy: str) -> list[str]:
    """torch's own state-dict helpers: a model that gets another one's state makes the same further step."""
    case, saved, found = Case(2, 2, strategy=strategy, shape=Shape(layers=1)), {}, list[str]()
    model, optimizer = stepped(case)
    for way, (options, _) in WAYS.items():
        state = (
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        )
        saved[way] = tree_map_only(Tensor, torch.clone, state)
    wanted = once_more(case, model, optimizer)
    model.close()
    for way, (_, options) in WAYS.items():
        model, optimizer = sharded(case, mesh_of(case))
        set_model_state_dict(model, saved[way][0], options=options)
        set_optimizer_state_dict(model, optimizer, saved[way][1], options=options)
        found += [f"{way}: {name}" for name in differing(once_more(case, model, optimizer), wanted)]
        model.close()
    return found


CHECKS = {
    "compiled": compiled,
    "nothing here": nothing_here,
    "torch's helpers": helped,
}
MUTANTS = of_slips(
    """
    begins elsewhere: torch.compile takes the place where a DTensor says that it begins for a storage of another device
        fsdp.tensor_parallel.put_data: lambda *_: None
        compiled
    """
)


test_it_holds = each_holds(__name__, CHECKS)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by cut parameters")
