"""Torch's own tools on parameters that are cut unevenly: clipping, optimizers, averages, state, checkpoints, losses."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.fsdp.ragged import RaggedTensor, distribute_rows
from tests.fsdp.ragged import layouts
from tests.fsdp.ragged.layouts import cut, mesh_of
from tests.support.covering import once
from tests.support.spawn import run_ranks

SHAPES = [(8, 3), (16,), (8, 2, 2), (24, 1), ()]
"""A scalar, too; every first dimension is a multiple of eight rows, which `layouts` cut."""
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Net(nn.Module):
    """Parameters without a forward."""

    def __init__(self, seed: int = 0, scalar: bool = True) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        for place, shape in enumerate(SHAPES if scalar else SHAPES[:-1]):
            self.register_parameter(f"w{place}", nn.Parameter(torch.randn(shape, generator=source)))


class Pair:
    """The same parameters in one process (`plain`) and cut (`cut`)."""

    def __init__(self, layout: str, *, scalar: bool | None = None) -> None:
        self.layout = layouts.ALL[layout]
        self.mesh = mesh_of(self.layout)
        scalar = self.layout.others not in (("0",), ("1",)) if scalar is None else scalar
        self.plain, self.cut = Net(scalar=scalar), Net(scalar=scalar)
        if self.layout.others == ("1",):  # only matrices have a second dimension to cut
            for net in (self.plain, self.cut):
                net.w1, net.w3 = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(8, 2))
        for name, param in [*self.cut.named_parameters()]:
            setattr(self.cut, name, nn.Parameter(cut(param.detach(), self.layout, self.mesh, name)))

    def put_gradients(self, seed: int) -> None:
        """New gradients, the same for both."""
        source = torch.Generator().manual_seed(seed)
        for (name, plain), param in zip(self.plain.named_parameters(), self.cut.parameters(), strict=True):
            plain.grad = torch.randn(plain.shape, generator=source)
            param.grad = cut(plain.grad, self.layout, self.mesh, name)

    def differences(self, tolerance: float = 1e-6) -> list[str]:
        """Parameters of which a rank has other rows than one process."""
        told = []
        for (name, plain), param in zip(self.plain.named_parameters(), self.cut.parameters(), strict=True):
            if not torch.allclose(param.full_tensor(), plain, atol=tolerance, rtol=tolerance):
                told.append(f"{name} {param.full_tensor()} instead of {plain}")
        return told


def norms(layout: str) -> list[str]:
    """torch's clipping, every norm and every way of computing it."""
    pair, told = Pair(layout), []
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        for foreach in (None, True, False):
            pair.put_gradients(3)
            plain = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5, norm_type, foreach=foreach)
            found = nn.utils.clip_grad_norm_(pair.cut.parameters(), 0.5, norm_type, foreach=foreach)
            case = f"clipping by {norm_type} {foreach}"
            told += [] if found.item() == pytest.approx(plain.item(), rel=1e-5) else [f"{case}: {found} for {plain}"]
            for one, other in zip(pair.plain.parameters(), pair.cut.parameters(), strict=True):
                same = torch.allclose(other.grad.full_tensor(), one.grad, atol=1e-6)
                told += [] if same else [f"{case}: gradients"]
    return told


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW amsgrad, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def updates(layout: str) -> list[str]:
    """Three updates by each of torch's optimizers, by closure where it needs one; deep copies of them."""
    told = []
    for name, make in OPTIMIZERS.items():
        pair = Pair(layout, scalar=False if name == "Rprop" else None)  # it indexes by a mask, which no scalar has
        plain, found = make(pair.plain.parameters()), make(pair.cut.parameters())
        try:
            for step in range(3):
                pair.put_gradients(step)
                plain.step(lambda: torch.tensor(0.0))  # type: ignore[call-overload]
                found.step(lambda: torch.tensor(0.0))  # type: ignore[call-overload]
            told += [f"{name}: {each}" for each in pair.differences(1e-5)]
        except Exception as error:
            told.append(f"{name}: {type(error).__name__}: {error}")
    return told


def averages(layout: str) -> list[str]:
    """EMA by hand, foreach and `AveragedModel`; a deep copy shares nothing, and trains apart."""
    pair = Pair(layout)
    averaged = [torch.optim.swa_utils.AveragedModel(each) for each in (pair.plain, pair.cut)]
    by_hand = [[p.detach().clone() for p in each.parameters()] for each in (pair.plain, pair.cut)]
    copied, before = copy.deepcopy(pair.cut), [p.detach().clone() for p in pair.plain.parameters()]
    plain, found = torch.optim.SGD(pair.plain.parameters(), lr=0.1), torch.optim.SGD(pair.cut.parameters(), lr=0.1)
    for step in range(2):
        pair.put_gradients(step)
        plain.step()
        found.step()
        with torch.no_grad():
            for average, model, ema in zip(averaged, (pair.plain, pair.cut), by_hand, strict=True):
                average.update_parameters(model)
                torch._foreach_lerp_(ema, [*model.parameters()], 0.5)
                for one, other in zip(ema, model.parameters(), strict=True):
                    one.lerp_(other, 0.1)
    told = [f"deep copy: {each}" for each in same(copied.parameters(), before)]
    told += [] if all(type(each) is RaggedTensor for each in copied.parameters()) else ["the copy has another type"]
    told += [f"AveragedModel: {each}" for each in same(averaged[1].parameters(), averaged[0].parameters())]
    return told + [f"EMA: {each}" for each in same(by_hand[1], by_hand[0])]


def same(found: Any, right: Any) -> list[str]:
    """Differences between tensors, gathered, and plain ones."""
    pairs = zip(found, right, strict=True)
    gathered = [(one.full_tensor() if isinstance(one, DTensor) else one, other) for one, other in pairs]
    return [f"{one} instead of {other}" for one, other in gathered if not torch.allclose(one, other, atol=1e-6)]


def states(layout: str) -> list[str]:
    """torch's helpers for state of models and optimizers, full and sharded, there and back."""
    pair = Pair(layout)
    plain, found = torch.optim.AdamW(pair.plain.parameters()), torch.optim.AdamW(pair.cut.parameters())
    pair.put_gradients(1)
    plain.step()
    found.step()
    told, rank = [], dist.get_rank()
    whole = get_model_state_dict(pair.cut, options=FULL)
    moments = get_optimizer_state_dict(pair.cut, found, options=FULL)
    if rank == 0:
        told += same(whole.values(), pair.plain.state_dict().values())
        for name, param in pair.plain.named_parameters():
            told += same([moments["state"][name]["exp_avg"]], [plain.state[param]["exp_avg"]])
    sharded = get_model_state_dict(pair.cut), get_optimizer_state_dict(pair.cut, found)
    told += [] if all(isinstance(each, RaggedTensor) for each in sharded[0].values()) else ["not sharded"]
    kept = copy.deepcopy(sharded)
    for options in (StateDictOptions(full_state_dict=True), FROM_RANK_0):
        given = {name: value * 2 for name, value in pair.plain.state_dict().items()}
        set_model_state_dict(pair.cut, dict(given) if options is not FROM_RANK_0 or rank == 0 else {}, options=options)
        told += [f"set {options}: {each}" for each in same(pair.cut.parameters(), given.values())]
        pair.cut.load_state_dict(kept[0])
        told += [f"load_state_dict: {each}" for each in pair.differences()]
    set_optimizer_state_dict(pair.cut, found, kept[1])
    pair.cut.load_state_dict(pair.plain.state_dict())  # plain: every rank has all of it
    told += pair.differences()
    even = {
        name: distribute_tensor(v, pair.mesh, pair.cut.w0.placements)
        for name, v in pair.plain.state_dict().items()
        if v.dim()
    }
    pair.cut.load_state_dict(even, strict=False)  # torch's own cut of the same tensors
    return told + pair.differences()


def files(layout: str) -> list[str]:
    """DCP in place, into plain tensors and asynchronously; `torch.save` and `torch.load`'s default."""
    pair = Pair(layout)
    told: list[str] = []
    box: list[str] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    before = {name: value.clone() for name, value in pair.plain.state_dict().items()}
    dcp.save({"model": pair.cut.state_dict()}, checkpoint_id=f"{box[0]}/a")
    dcp.async_save({"model": pair.cut.state_dict()}, checkpoint_id=f"{box[0]}/b").result()
    file = io.BytesIO()
    torch.save(pair.cut.state_dict(), file)
    for folder in ("a", "b"):
        with torch.no_grad():
            for param in pair.cut.parameters():
                param.zero_()
        dcp.load({"model": pair.cut.state_dict()}, checkpoint_id=f"{box[0]}/{folder}")
        told += [f"in place from {folder}: {each}" for each in pair.differences()]
        plain = {"model": {name: torch.zeros_like(value) for name, value in before.items()}}
        dcp.load(plain, checkpoint_id=f"{box[0]}/{folder}")
        told += [f"plain from {folder}: {each}" for each in same(plain["model"].values(), before.values())]
    file.seek(0)
    read = torch.load(file)
    told += [f"torch.load: {each}" for each in same(read.values(), before.values())]
    return told


def scaled(layout: str) -> list[str]:
    """GradScaler: right, and where one rank alone has an infinity, all skip and halve."""
    told = []
    for broken in (False, True):
        pair = Pair(layout)
        optimizer = torch.optim.SGD(pair.cut.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        pair.put_gradients(2)
        before = [p.full_tensor().clone() for p in pair.cut.parameters()]
        gradients = [p.grad.clone() for p in pair.plain.parameters()]
        local = pair.cut.w0.grad.to_local()
        last = pair.mesh.size(pair.mesh.ndim - 1) - 1
        if broken and pair.mesh.get_local_rank(pair.mesh.ndim - 1) == last:  # all of its replicas
            local.fill_(float("inf"))
        has_inf = pair.cut.w0.grad.isinf().any().item()
        scaler.step(optimizer)
        scaler.update()
        right = before if has_inf else [p - g / 4 for p, g in zip(before, gradients, strict=True)]
        told += [f"infinity {has_inf}: {each}" for each in same(pair.cut.parameters(), right)]
        told += [] if scaler.get_scale() == (2.0 if has_inf else 4.0) else [f"scale {scaler.get_scale()}"]
    return told


LOSSES: dict[str, Callable[[Net], Any]] = {
    "sum of squares": lambda net: sum(p.pow(2).sum() for p in net.parameters()),
    "norms": lambda net: sum(p.norm() for p in net.parameters()),
    "mean of absolute values": lambda net: sum(p.abs().mean() for p in net.parameters()),
    "rows": lambda net: net.w0.norm(dim=1).sum() + net.w0.amax(),
    "product": lambda net: (net.w0.t() @ net.w0).sum(),
    "full_tensor": lambda net: (whole(net.w0) ** 2).sum(),
}


def whole(param: Tensor) -> Tensor:
    """The parameter with all rows."""
    return param.full_tensor() if isinstance(param, DTensor) else param


def gradients(layout: str) -> list[str]:
    """Losses of parameters at rest, as a penalty of weights is: `.grad` is one process's."""
    told = []
    for name, loss in LOSSES.items():
        pair = Pair(layout)
        plain, found = loss(pair.plain), loss(pair.cut)
        found_loss = found.full_tensor() if isinstance(found, DTensor) else found
        told += [] if torch.allclose(found_loss, plain) else [f"{name}: {found_loss} instead of {plain}"]
        plain.backward()
        found.backward()
        pairs = zip(pair.cut.parameters(), pair.plain.parameters(), strict=True)
        graded = [(one.grad, other.grad) for one, other in pairs if other.grad is not None]
        told += [f"{name}: {each}" for each in same(*zip(*graded, strict=True))]
    return told


PROGRAMS = {each.__name__: each for each in (norms, updates, averages, states, files, scaled, gradients)}


def run_programs(rank: int, layout: str) -> dict[str, list[str]]:
    """On one rank: what is wrong with each program."""
    told = {}
    for name, program in PROGRAMS.items():
        try:
            told[name] = program(layout)
        except Exception:
            told[name] = [traceback.format_exc()]
    return told


@once
def outcomes(layout: str) -> dict[str, list[str]]:
    told = run_ranks(run_programs, torch.Size(layouts.ALL[layout].mesh).numel(), layout)
    return {name: [each for rank in told for each in rank[name]] for name in PROGRAMS}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("layout", ["uneven", "first", "three", "hsdp", "tp_rows", "tp_columns"])
def test_programs_of_torch_are_right(layout: str, program: str) -> None:
    assert not outcomes(layout)[program]


def made(rank: int) -> list[str]:
    """Placements equal themselves alone, and torch makes no DTensor that its own rules would misread."""
    mesh, told = mesh_of(layouts.HALVES), []
    parameter = cut(torch.arange(24.0).view(8, 3), layouts.HALVES, mesh)
    ragged = parameter.placements[0]
    other = cut(torch.arange(24.0).view(8, 3), layouts.UNEVEN, mesh).placements[0]
    told += ["is not itself"] if ragged != copy.deepcopy(ragged) else []
    told += ["equals another cut"] if other == ragged else []
    told += ["equals Shard(0)"] if ragged == Shard(0) or Shard(0) == ragged else []
    shape, stride = parameter.shape, parameter.stride()
    for make in (
        lambda: DTensor.from_local(parameter.to_local(), mesh, [ragged], shape=shape, stride=stride),
        lambda: distribute_tensor(torch.ones(8, 3), mesh).redistribute(mesh, [ragged]),
    ):
        with contextlib.suppress(AssertionError, RuntimeError):
            told.append(f"torch made {make()}")
    again = distribute_rows(torch.arange(24.0).view(8, 3), like=parameter)
    return told + ([] if torch.equal(again, parameter) else ["distribute_rows"])


def test_placements_are_never_mistaken() -> None:
    assert run_ranks(made, 2) == [[], []]
