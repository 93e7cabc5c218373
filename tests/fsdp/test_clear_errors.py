"""What a sharded model cannot be, or do, is said in one sentence that names value and fix; never done half.

Each check returns what is silent, or points the wrong way, under one strategy, a sentence each.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from harness.fsdp import ReleasedWeightError, ShardedModel, fully_shard, fully_shard_model, preconditions, wrapper
from harness.fsdp.runtime import backward_hooks, forward_hooks
from harness.fsdp.runtime.graph import Passed
from harness.fsdp.runtime.step import Step, StepError
from harness.fsdp.state import access
from harness.fsdp.storage.whereabouts import Whereabouts
from harness.fsdp.tensor_parallel.parameters import UnknownPlan
from tests.fsdp.checked import Mutant, holds, is_found
from tests.fsdp.pairs import STRATEGIES
from tests.support.mutants import each


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x))
        return out


class Net(nn.Module):
    def __init__(self, vocabulary: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(max(1, vocabulary), 6), requires_grad=bool(vocabulary))
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = F.embedding(x, self.table, sparse=True)
        out: Tensor = self.head(self.second(self.first(x)))
        return out


def data(rank: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))


def built(strategy: str, module: nn.Module | None = None) -> tuple[ShardedModel, torch.optim.Optimizer]:
    module = module or Net()
    optimizer = torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=0.1)
    return fully_shard(module, optimizer, zero_dp_strategy=strategy, fsdp_unit_modules=[Block])


def trained(model: ShardedModel, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> dict[str, Tensor]:
    for _ in range(steps):
        model(data(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.full_weights())


def said(action: Callable[[], Any], kind: type[Exception], *parts: str) -> list[str]:
    """What is wrong with the error of an action: its kind, or a part it does not say."""
    try:
        action()
    except Exception as error:
        if type(error) is not kind:
            return [f"{type(error).__name__} instead of {kind.__name__}: {error}"]
        return [f"{part!r} is not in: {error}" for part in parts if not re.search(part, str(error))]
    return [f"nothing was said of {parts}"]


# -- before anything is sharded ----------------------------------------------------------------------------------------


def made_sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 6))


def made_of_dtensors() -> nn.Module:
    module = nn.Linear(6, 6)
    local = DTensor.from_local(torch.ones(3, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
    module.weight = nn.Parameter(local)
    return module


def partly_sharded() -> nn.Module:
    module = Net()
    vars(module)["kept"] = [fully_shard_model(module.second)]  # as an attribute that is no module
    return module


def part_of_a_sharded_one() -> nn.Module:
    module = Net()
    kept = fully_shard_model(module)
    vars(module.second)["kept"] = [kept]
    return module.second


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse embedding": (made_sparse, r"0 \(Embedding\) has sparse=True.*sparse=False"),
    "DTensors": (made_of_dtensors, r"ranks \[0, 1\] are on the tensor-parallel axis and on the sharding one"),
    "no parameters": (lambda: nn.Sequential(nn.ReLU()), "Sequential has no parameters"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(6)), r"parameter 0.weight has no shape yet .*run one forward"),
    "a sharded child": (partly_sharded, r"second \(Block\) is sharded already.*outermost module once"),
    "a child of a sharded one": (part_of_a_sharded_one, r"the module \(Block\) is sharded already"),
    "twice": (lambda: fully_shard_model(Net()), r"is sharded already"),
    "DDP": (lambda: DistributedDataParallel(Net()), r"the module \(DistributedDataParallel\) is wrapped by another"),
}
UNITS: dict[str, tuple[Any, str]] = {
    "a class": (nn.Linear, r"fsdp_unit_modules=Linear is no list"),
    "a path": ("torch.nn.Linear", r"fsdp_unit_modules='torch.nn.Linear' is no list"),
    "a module": (nn.Linear(1, 1), r"a module of class Linear is no list"),
    "a list of modules": ([nn.Linear(1, 1)], r"a module of class Linear is no nn.Module class; give classes"),
    "no match": ([nn.Conv2d], r"\['Conv2d'\] matches no module of Net.*it has Block, Linear, Net"),
}


def modules(_: int, strategy: str) -> list[str]:
    found = []
    for make, says in MODULES.values():
        module = make()
        kinds = [type(param) for param in module.parameters()]
        kind = UnknownPlan if make is made_of_dtensors else ValueError
        found += said(lambda m=module: fully_shard_model(m, zero_dp_strategy=strategy), kind, says)
        found += [] if [type(p) for p in module.parameters()] == kinds else [f"{says}: it was changed"]
    return found


def units(_: int, strategy: str) -> list[str]:
    module, found = Net(), []
    for given, says in UNITS.values():
        shard = lambda g=given: fully_shard_model(module, zero_dp_strategy=strategy, fsdp_unit_modules=g)  # noqa: E731
        found += said(shard, ValueError, says)
    found += [] if all(type(p) is nn.Parameter for p in module.parameters()) else ["the module was changed"]
    fully_shard_model(module, zero_dp_strategy=strategy, fsdp_unit_modules=[nn.Conv2d, Block]).close()
    fully_shard_model(Block(), zero_dp_strategy=strategy, fsdp_unit_modules={Block}).close()  # type: ignore[arg-type] # wrong on purpose
    return found


# -- afterwards --------------------------------------------------------------------------------------------------------


def replaced(rank: int, strategy: str) -> list[str]:
    """Where it happens; and what changes nothing is as before."""
    model, optimizer = built(strategy)
    module: Any = model.module
    acts: dict[str, Callable[[], Any]] = {
        "head.weight was replaced": lambda: setattr(module.head, "weight", nn.Parameter(torch.ones(6, 6))),
        "head was replaced": lambda: setattr(module, "head", nn.Linear(6, 6)),
        "first was replaced": lambda: setattr(model, "first", Block()),
        "second.extra was added": lambda: setattr(module.second, "extra", nn.Linear(6, 6)),
        "second.gain was added": lambda: module.second.register_parameter("gain", nn.Parameter(torch.ones(1))),
    }
    found = [each for says, act in acts.items() for each in said(act, RuntimeError, says, "Change the module before")]
    module.head = module.head
    module.second.act = nn.ReLU()
    plain = Net()
    right = torch.optim.AdamW((p for p in plain.parameters() if p.requires_grad), lr=0.1)
    for _ in range(2):
        right.zero_grad()
        for each_rank in range(2):
            (plain(data(each_rank)).square().mean() / 2).backward()
        right.step()
    weights = trained(model, optimizer, rank, 2)
    found += [name for name, p in plain.named_parameters() if not torch.allclose(weights[name], p, atol=1e-5)]
    model.close()
    module.head = nn.Linear(6, 6)
    return found


def copies(_: int, strategy: str) -> list[str]:
    model, _ = built(strategy)
    found = [e for what in (model, model.module, model.module.first) for e in said(
        lambda w=what: copy.deepcopy(w), TypeError, "cannot be copied", "full_weights"
    )]  # fmt: skip
    model.close()
    return found


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
        name = "parameter attention.out_proj.weight of unit attention.out_proj"
        found = said(lambda: loss(model, rank), ReleasedWeightError, name, "let the one that uses it be the unit")
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


def written_over(rank: int, strategy: str) -> list[str]:
    """What code that writes into a module's own dictionaries does, as loaders and pruning do; taking out is none."""
    model, optimizer = built(strategy)
    module: Any = model.module
    module.first.linear.bias = None
    del module.second.linear.bias
    module.second.linear.register_parameter("bias", None)
    trained(model, optimizer, rank, 1)
    held, kept = module.head._parameters, module.head.weight
    held["weight"] = nn.Parameter(torch.ones(6, 6))
    found = said(lambda: trained(model, optimizer, rank, 1), RuntimeError, "head.weight was replaced after sharding")
    held["weight"] = kept
    model.zero_grad()
    trained(model, optimizer, rank, 1)
    with suppress(ReleasedWeightError):  # where weights are whole, it looks at them
        prune.random_unstructured(module.second.linear, "weight", amount=2)
        says = "parameter second.linear.weight is called second.linear.weight_orig since it was sharded"
        for reads in (model.state_dict, model.sharded_state, lambda: model.load_state_dict({}, strict=False)):
            found += said(reads, RuntimeError, says)
        found += said(lambda: trained(model, optimizer, rank, 1), RuntimeError, says)
    model.close()
    return found


def transforms(rank: int, strategy: str) -> list[str]:
    model, optimizer = built(strategy)
    through = torch.func.grad(lambda x: model(x).square().mean())
    found = said(lambda: through(data(rank)), RuntimeError, r"torch\.func transforms", r"torch\.autograd\.grad\(loss")
    found += said(lambda: torch.jit.trace(model, data(rank)), RuntimeError, r"torch\.jit\.trace .* cannot record")
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
    "written over": written_over,
    "transforms": transforms,
    "modules": modules,
    "units": units,
    "replaced": replaced,
    "copies": copies,
    "earlier graphs": earlier_graphs,
    "inputs alone": inputs_alone,
    "strange tensors": strange_tensors,
    "attention": attention,
}
MUTANTS = {
    "parts": Mutant(
        "Sparse embeddings and parts of sharded models are sharded like others",
        lambda: mock.patch.object(preconditions, "_check_part"),
        "modules",
    ),
    "parameters": Mutant(
        "Parameters without a shape are sharded like others",
        lambda: mock.patch.object(preconditions, "_check_param"),
        "modules",
    ),
    "units": Mutant(
        "A list of units that matches nothing makes one unit of everything",
        lambda: mock.patch.object(preconditions, "_check_units"),
        "units",
    ),
    "replaced": Mutant(
        "A parameter that took another one's place is used, and never trained",
        lambda: mock.patch.object(wrapper, "part_of", return_value=None),
        "replaced",
    ),
    "written over": Mutant(
        "A parameter that was written over in its module's dictionary is used, and never trained",
        lambda: mock.patch.object(Whereabouts, "check"),
        "written over",
    ),
    "renamed": Mutant(
        "State leaves out what goes by another name than when it was sharded",
        lambda: mock.patch.object(access, "check_names"),
        "written over",
        "optim",
    ),
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
    "copies": Mutant(
        "A copy of the module shares hooks with the sharded one",
        lambda: mock.patch.object(wrapper, "refuse_copy", object.__reduce_ex__),
        "copies",
        "no_shard",
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


@pytest.mark.parametrize("name", each("The engine, by what it cannot do", ((n, m.breaks) for n, m in MUTANTS.items())))
def test_a_mutant_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
