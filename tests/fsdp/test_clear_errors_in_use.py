"""What goes through a sharded model, forth and back, is right or refused in one sentence; never done half.

Each check returns what is silent, or points the wrong way, under one strategy, a sentence each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from harness.fsdp import StepError, fully_shard, fully_shard_model
from harness.fsdp.runtime import backward_hooks, forward_hooks, readiness
from harness.fsdp.runtime.graph import Passed
from harness.fsdp.runtime.step import Step
from tests.fsdp.checked import Mutant, holds, is_found
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.refusing import Net, built, data, said, trained
from tests.support.mutants import each


def earlier_graphs(rank: int, strategy: str) -> list[str]:
    model, optimizer = built(strategy)
    old = model(data(rank)).sum()
    trained(model, optimizer, rank, 1)
    found = said(old.backward, StepError, "run the forward again")
    model.zero_grad()
    trained(model, optimizer, rank, 1)
    model.close()
    return found


def inputs_alone(rank: int, strategy: str) -> list[str]:
    """autograd.grad(loss, x) is no backward of the step: before the step's own, and where nothing is trained."""
    model, optimizer = built(strategy)
    x, plain = data(rank).requires_grad_(), Net()
    found = []
    for _ in range(2):
        loss = model(x).square().mean()
        (ours,) = torch.autograd.grad(loss, x, retain_graph=True)
        (right,) = torch.autograd.grad(plain(x).square().mean(), x)
        found += [] if torch.allclose(ours, right, atol=1e-6) else ["a gradient of an input is wrong"]
    found += ["it counts as a backward of the step"] if model.has_gradients else []
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    other = built(strategy)
    right_weights, weights = trained(*other, rank, 3), trained(model, optimizer, rank, 2)
    found += [name for name in weights if not torch.equal(weights[name], right_weights[name])]
    model.close()
    other[0].close()
    return found


def gradients_asked_for(rank: int, strategy: str) -> list[str]:
    """autograd.grad(loss, parameters) would give what no rank has reduced; the step that follows is right."""
    model, optimizer = built(strategy)
    loss = model(data(rank)).square().mean()
    found = said(
        lambda: torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]),
        RuntimeError,
        r"torch\.autograd\.grad\(\) was asked for the gradient of head\.weight",
        r"Call loss\.backward\(\) and read parameter\.grad",
    )
    model.zero_grad()
    weights, right = trained(model, optimizer, rank, 1), trained(*built(strategy), rank, 1)
    model.close()
    return found + [name for name in weights if not torch.equal(weights[name], right[name])]


def strange_tensors(rank: int, strategy: str) -> list[str]:
    model, optimizer = built(strategy, Net(10))
    mesh = init_device_mesh("cpu", (2,))
    given = DTensor.from_local(data(rank), mesh, [Replicate()])
    found = said(lambda: model(given), TypeError, "input of the sharded model is a DTensor", "to_local")
    found += said(
        lambda: model(torch.tensor([1, 2 + rank])).sum().backward(),
        RuntimeError,
        "gradient of table is torch.sparse_coo",
        "sparse=False",
    )
    model.zero_grad()
    trained(model, optimizer, rank, 1)
    model.close()
    return found


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.out = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.attention(x, x, x)[0])
        return out


def attention(rank: int, strategy: str) -> list[str]:
    """out_proj is a Linear, and its weight is read without a call of it: right while weights are whole, or refused."""

    def loss(model: nn.Module, of: int) -> Tensor:
        out: Tensor = model(data(of)[None]).square().mean()
        return out

    module = Attentive()
    model, optimizer = fully_shard(
        module, torch.optim.SGD(module.parameters(), lr=0.1), zero_dp_strategy=strategy, fsdp_unit_modules=[nn.Linear]
    )
    if strategy == "optim_grads_params":
        found = said(lambda: loss(model, rank), RuntimeError, "sharded one, .*", "`fully_shard` both together")
        model.close()
        return found
    plain = Attentive()
    right = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        right.zero_grad()
        for of in range(2):
            (loss(plain, of) / 2).backward()
        right.step()
        loss(model, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(model.full_weights())
    model.close()
    return [name for name, p in plain.named_parameters() if not torch.allclose(weights[name], p, atol=1e-6)]


def transforms(rank: int, strategy: str) -> list[str]:
    model, optimizer = built(strategy)
    through = torch.func.grad(lambda x: model(x).square().mean())
    found = said(lambda: through(data(rank)), RuntimeError, r"torch\.func transforms", r"torch\.autograd\.grad\(loss")
    found += said(lambda: torch.jit.trace(model, data(rank)), RuntimeError, r"torch\.jit\.trace .* cannot record")
    with forward_ad.dual_level():
        twofold = forward_ad.make_dual(data(rank), torch.ones_like(data(rank)))
        found += said(lambda: model(twofold), RuntimeError, "forward-mode", r"copy of the module made of full_weights")
    trained(model, optimizer, rank, 1)
    model.close()
    return found


class Editing(nn.Module):
    """A unit that edits what it gets, and computes on."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.linear = nn.Parameter(torch.full((6,), 1.2)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(F.leaky_relu_(x.mul_(self.gain), 0.3))
        return out


class Edited(nn.Module):
    """Its caller, who goes on with what was edited, and with a view of it from before.

    Args:
        gives: what the unit gets of h.
    """

    def __init__(self, gives: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.editing, self.gives = nn.Linear(6, 6), Editing(), gives

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        part = h[:1]
        out: Tensor = h * 0.5 + self.editing(self.gives(h)) + part
        return out


def edited_inputs(rank: int, strategy: str) -> list[str]:
    """What a unit edits in place its caller has edited too, gradients included; or is told the unit."""
    options: dict[str, Any] = {"zero_dp_strategy": strategy, "fsdp_unit_modules": [Editing]}
    odd = fully_shard_model(Edited(lambda h: h.view(-1, 6)), **options)
    found = said(lambda: odd(data(rank)), RuntimeError, "unit editing edited an input in place.*x = x.clone()")
    odd.close()
    module, plain = Edited(), Edited()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fully_shard(module, optimizer, **options)
    right = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        right.zero_grad()
        for of in range(2):
            (plain(data(of)).square().mean() / 2).backward()
        right.step()
    weights = trained(model, optimizer, rank, 2)
    model.close()
    return found + [name for name, p in plain.named_parameters() if not torch.allclose(weights[name], p, atol=1e-6)]


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    "edited inputs": edited_inputs,
    "transforms": transforms,
    "earlier graphs": earlier_graphs,
    "inputs alone": inputs_alone,
    "gradients asked for": gradients_asked_for,
    "strange tensors": strange_tensors,
    "attention": attention,
}
MUTANTS = {
    "transforms": Mutant(
        "torch's own words tell of a transform that cannot go through a unit",
        lambda: mock.patch.object(forward_hooks, "refuse_transforms"),
        "transforms",
        "no_shard",
    ),
    "edited inputs": Mutant(
        "What a unit edited in place is used by its caller without a gradient through the edit",
        lambda: mock.patch.object(Passed, "take_edits", return_value=[]),
        "edited inputs",
    ),
    "earlier graphs": Mutant(
        "A backward mixes old activations with new weights",
        lambda: mock.patch.object(Step, "check_forward"),
        "earlier graphs",
    ),
    "inputs alone": Mutant(
        "A gradient of an input ends the step",
        lambda: mock.patch.object(backward_hooks, "could_reach", return_value=False),
        "inputs alone",
        "optim",
    ),
    "gradients asked for": Mutant(
        "autograd.grad of parameters gives one rank's gradients",
        lambda: mock.patch.object(readiness, "_will_come", return_value=False),
        "gradients asked for",
    ),
    "DTensor inputs": Mutant(
        "A DTensor input is found by whatever meets it first",
        lambda: mock.patch.object(forward_hooks, "refuse_dtensors"),
        "strange tensors",
    ),
    "sparse gradients": Mutant(
        "A sparse gradient is found by whatever meets it first",
        lambda: mock.patch.object(backward_hooks, "refuse_layout"),
        "strange tensors",
    ),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_right_or_says_what_to_do(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


@pytest.mark.parametrize(
    "name", each("The engine, by what it cannot take", ((n, m.breaks) for n, m in MUTANTS.items()))
)
def test_a_mutant_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
