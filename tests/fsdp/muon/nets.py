"""Matrices of odd shapes whose gradients are known exactly: trained on ranks, and by torch on a plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from harness.muon import MuonWithAdamW
from harness.private_torch import tree_leaves
from tests.fsdp.muon.whole import Shampoo, Soap

SHAPES = [
    *[(1, 1), (1, 9), (9, 1), (2, 3), (3, 2), (5, 5), (7, 13), (13, 7), (17, 64), (64, 17)],
    *[(64, 64), (33, 128), (128, 33), (8, 200), (200, 8), (31, 31), (65, 96), (96, 65), (4, 130), (129, 3)],
]
STACKS = [(3, 8, 5), (10, 6, 12), (1, 7, 7)]
STEPS = 3


class Unit(nn.Module):
    """A unit of some matrices, a stack and a vector. A loss whose gradients are given."""

    def __init__(self, shapes: list[tuple[int, ...]], first: int) -> None:
        super().__init__()
        for place, shape in enumerate(shapes):
            generator = torch.Generator().manual_seed(first + place)
            self.register_parameter(f"w{first + place}", nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, step: int, scale: float) -> Tensor:
        terms = []
        for name, param in self.named_parameters(recurse=False):
            if param.requires_grad:
                here = param.to_local() if isinstance(param, DTensor) else param
                terms.append((here * (scale * gradient(name, step, param)).to(here.dtype)).sum())
        return torch.stack(terms).sum()


class Net(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        held = [*shapes, *STACKS, (11,), (1,), ()]
        self.units = nn.ModuleList(Unit(held[begin : begin + 7], begin) for begin in range(0, len(held), 7))

    def forward(self, step: int, scale: float) -> Tensor:
        return torch.stack([unit(step, scale).float() for unit in self.units]).sum()


def gradient(name: str, step: int, param: Tensor) -> Tensor:
    """Of 7 bits, so that each sum of equals, and each mean, is exact; of a DTensor, the part here."""
    generator = torch.Generator().manual_seed(1000 * step + int(name.rpartition(".")[2][1:]))
    whole = torch.randint(-63, 64, param.shape, generator=generator) / 64
    if isinstance(param, DTensor):
        return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None).to_local()
    return whole


def matrices(model: nn.Module, *dims: int) -> Iterator[nn.Parameter]:
    yield from (param for param in model.parameters() if param.dim() in dims)


def one(model: nn.Module, **settings: Any) -> list[torch.optim.Optimizer]:
    held = [*matrices(model, 2, 3)]
    heads = [param for param in held if param.shape[-2] % 4 == 0]
    others = [param for param in held if param.shape[-2] % 4]
    groups: list[dict[str, Any]] = [{"params": heads, "blocks": 4, "muon": True, "lr": 0.02, **settings}]
    groups += [{"params": [*matrices(model, 1)]}, {"params": others, "muon": True, "lr": 0.05, "nesterov": False}]
    return [MuonWithAdamW(groups, lr=0.01, foreach=False)]


def two(model: nn.Module, **settings: Any) -> list[torch.optim.Optimizer]:
    held = [*matrices(model, 2)]
    groups: list[dict[str, Any]] = [{"params": held[::2]}, {"params": held[1::2], "lr": 0.05, "weight_decay": 0.0}]
    beside = torch.optim.AdamW([*matrices(model, 1, 3)], lr=0.01, foreach=False)
    return [torch.optim.Muon(groups, lr=0.02, **settings), beside]


def frozen(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Every third matrix is frozen, and another third is in no optimizer."""
    held = [*matrices(model, 2)]
    for param in held[::3]:
        param.requires_grad_(False)
    rate: Any = torch.tensor(0.02)
    return [torch.optim.Muon(held[::3] + held[1::3], lr=rate)]


def soap(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Tells what it needs on the object, as who uses somebody else's class does."""
    made: Any = Soap([*matrices(model, 2, 3)])
    made.needs_whole = lambda param: param.dim() > 1
    return [made, torch.optim.AdamW([*matrices(model, 0, 1)], lr=0.01, foreach=False)]


MAKERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "two": two,
    "plain momentum": lambda model: two(model, nesterov=False, momentum=0.5),
    "as AdamW": lambda model: two(model, adjust_lr_fn="match_rms_adamw", ns_steps=2, weight_decay=0.3),
    "one": one,
    "frozen": frozen,
    "Shampoo": lambda model: [Shampoo(model.parameters())],
    "SOAP": soap,
    "Adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.02, weight_decay=0.1)],
}


@dataclass(frozen=True)
class Case:
    """world: data-parallel ranks; outer, tp: ranks of these axes; k: microbatches; policy: of `POLICIES`; worth: see
    `matrices.WORTH`."""

    world: int
    strategy: str = "optim_grads_params"
    outer: int = 1
    outer_strategy: str = "no_shard"
    tp: int = 1
    k: int = 1
    maker: str = "two"
    policy: str = "fp32"
    worth: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    shapes: tuple[tuple[int, ...], ...] = tuple(SHAPES)


POLICIES = {
    "fp32": (torch.float32, MixedPrecisionPolicy()),
    "bf16": (torch.bfloat16, MixedPrecisionPolicy(main_params_dtype=torch.float32)),
}


def mesh_of(case: Case) -> dict[str, Any]:
    sizes = {"outer": case.outer, "inner": case.world // case.outer, "tp": case.tp}
    held = {name: size for name, size in sizes.items() if size > 1 or name == "inner"}
    mesh = init_device_mesh("cpu", tuple(held.values()), mesh_dim_names=tuple(held))
    names = {"dp_shard_dim": "inner", "dp_outer_dim": "outer", "tp_dim": "tp"}
    return {"device_mesh": mesh} | {key: name for key, name in names.items() if name in held}


def cut(model: Net, mesh: DeviceMesh) -> None:
    """Every third parameter by rows, every third by columns, others are copied."""
    for unit in model.units:
        for place, (name, param) in enumerate([*unit.named_parameters()]):
            if place % 3 < 2 and param.dim() > 1:
                made = distribute_tensor(param.detach(), mesh, [Shard(place % 3)], src_data_rank=None)
                unit.register_parameter(name, nn.Parameter(made))


@contextmanager
def planned(case: Case) -> Iterator[None]:
    """Owners are planned at a first step."""
    with mock.patch("harness.fsdp.update.matrices.WORTH", case.worth):
        yield


@dataclass
class Trained:
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)


def sharded(case: Case) -> tuple[Any, list[Any]]:
    dtype, policy = POLICIES[case.policy]
    module, places = Net(list(case.shapes)).to(dtype), mesh_of(case)
    if case.tp > 1:
        cut(module, places["device_mesh"]["tp"])
    model = fully_shard_model(
        module, fsdp_unit_modules=[Unit], zero_dp_strategy=case.strategy, mixed_precision_policy=policy,
        outer_dp_sharding_strategy=case.outer_strategy, grad_divisor=float(case.world * case.k), **places,
        **dict(case.options), initial_value=lambda name, _: dict(Net(list(case.shapes)).named_parameters())[name],
    )  # fmt: skip
    return model, [fully_shard_optimizer(model, each) for each in MAKERS[case.maker](model)]


def train(model: Any, optimizers: list[Any], steps: range = range(STEPS), k: int = 1) -> None:
    for step in steps:
        for microbatch in range(k):
            if hasattr(model, "set_model_auto_sync"):
                model.set_model_auto_sync(microbatch == k - 1)
            model(step, 1.0).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def trained(model: Any, optimizers: list[Any]) -> Trained:
    names = {id(param): name for name, param in model.named_parameters()}
    states = {}
    for each in optimizers:
        for param, held in sorted(each.state.items(), key=lambda pair: names[id(pair[0])]):
            for key in sorted(held):
                for place, leaf in enumerate(tree_leaves(held[key])):
                    found = leaf.full_tensor() if isinstance(leaf, DTensor) else torch.as_tensor(leaf).clone()
                    states[f"{names[id(param)]}/{key}/{place}"] = found
    full = getattr(model, "full_weights", model.named_parameters)()
    return Trained({name: value.detach().clone() for name, value in full}, states)


def plain(case: Case, steps: range = range(STEPS)) -> Trained:
    model = Net(list(case.shapes))
    optimizers = MAKERS[case.maker](model)
    train(model, optimizers, steps)
    return trained(model, optimizers)


def differences(one: Trained, other: Trained) -> list[str]:
    pairs = [("weight", one.weights, other.weights), ("state", one.states, other.states)]
    found = [f"{what}s of {a.keys() ^ b.keys()}" for what, a, b in pairs if a.keys() != b.keys()]
    for what, a, b in pairs:
        found += [
            f"{what} {name} {[*a[name].shape]}: {(a[name] - b[name]).abs().max():g}"
            for name in a.keys() & b.keys()
            if not torch.equal(a[name], b[name])
        ]
    return found
