"""What the module of a sharded model cannot be, or become, is said in one sentence that names value and fix.

Each check returns what is silent, or points the wrong way, under one strategy, a sentence each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

from harness.fsdp import UnknownPlan, fully_shard_model, preconditions, sharding
from harness.fsdp.state import access
from harness.fsdp.storage.at_rest import ShardedParameters
from harness.fsdp.storage.parameter_access import Whereabouts
from tests.fsdp.checked import Mutant, holds, is_found
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.refusing import Block, Net, built, data, said, trained
from tests.support.mutants import each

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


def made_of_pairs() -> nn.Module:
    module = nn.Linear(6, 6)
    module.weight = nn.Parameter(TwoTensor(torch.ones(6, 6), torch.ones(6, 6)))
    return module


def made_complex() -> nn.Module:
    return nn.Linear(6, 6, dtype=torch.complex64)


def checkpointed_whole() -> nn.Module:
    return checkpoint_wrapper(Net())


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 6))


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse embedding": (made_sparse, r"0 \(Embedding\) has sparse=True.*sparse=False"),
    "DTensors": (made_of_dtensors, r"ranks \[0, 1\] are on the tensor-parallel axis and on the sharding one"),
    "no parameters": (lambda: nn.Sequential(nn.ReLU()), "Sequential has no parameters"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(6)), r"parameter 0.weight has no shape yet .*run one forward"),
    "tensors around others": (made_of_pairs, r"parameter weight is a TwoTensor.*before its weights are converted"),
    "other names": (checkpointed_whole, r"CheckpointWrapper.named_parameters\(\) calls .*wrap its blocks"),
    "complex": (made_complex, r"parameter weight has dtype torch.complex64.*view_as_real"),
    "a sharded child": (partly_sharded, r"second \(Block\) is sharded already.*outermost module once"),
    "a child of a sharded one": (part_of_a_sharded_one, r"the module \(Block\) is sharded already"),
    "twice": (lambda: fully_shard_model(Net()), r"is sharded already"),
    "scripted": (scripted, r"0 \(RecursiveScriptModule\) is made by torch.jit.script.*compile with torch.compile"),
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


ADDING: dict[str, Callable[[Any], Any]] = {
    "head.weight was replaced": lambda module: setattr(module.head, "weight", nn.Parameter(torch.ones(6, 6))),
    "head.weight was added": lambda module: setattr(module, "head", nn.Linear(6, 6)),
    "second.extra.weight was added": lambda module: setattr(module.second, "extra", nn.Linear(6, 6)),
    "second.gain was added": lambda module: module.second.register_parameter("gain", nn.Parameter(torch.ones(1))),
}


def replaced(rank: int, strategy: str) -> list[str]:
    """At the next forward; and what changes nothing is as before."""
    found = []
    for says, act in ADDING.items():
        model, _ = built(strategy)
        act(model.module)
        found += said(lambda m=model: m(data(rank)), RuntimeError, says, "Change the module before")
        model.close()
    model, optimizer = built(strategy)
    module: Any = model.module
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
    found = said(lambda: copy.deepcopy(model.first), TypeError, "cannot be copied", "full_weights")
    model.close()
    return found


def written_over(rank: int, strategy: str) -> list[str]:
    """What code that writes into a module's own dictionaries does, as loaders do; taking out is none."""
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
    held = module.second.linear._parameters
    held["weight_orig"] = held.pop("weight")
    says = "parameter second.linear.weight is called second.linear.weight_orig since it was sharded"
    for reads in (model.state_dict, model.sharded_state, lambda: model.load_state_dict({}, strict=False)):
        found += said(reads, RuntimeError, says)
    model.close()
    return found


REPLACING: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "an older weight_norm": nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "an older spectral_norm": nn.utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "parametrization": lambda module: parametrize.register_parametrization(
        module, "weight", nn.Identity(), unsafe=True
    ),
    "prune": lambda module: prune.random_unstructured(module, "weight", amount=2),
}
"""What puts another parameter in a weight's place, or gives it another name, or lets it stand for another value."""


def replacing(rank: int, strategy: str) -> list[str]:
    """torch's functions that make new parameters of sharded ones, or move them, raise then or at the next forward."""
    found = []
    for name, function in REPLACING.items():
        model, _ = built(strategy)
        try:
            function(model.module.second.linear)
            model(data(rank)).square().mean().backward()
            found.append(f"{name} is taken")
        except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError):
            pass
        model.close()
    return found


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    "written over": written_over,
    "modules": modules,
    "units": units,
    "replaced": replaced,
    "copies": copies,
    "replacing": replacing,
}
MUTANTS = {
    "parts": Mutant(
        "Sparse embeddings and parts of sharded models are sharded like others",
        lambda: mock.patch.object(preconditions, "_check_part"),
        "modules",
        "no_shard",
    ),
    "scripted": Mutant(
        "A module whose forward has no hooks is sharded like others",
        lambda: mock.patch.object(preconditions, "SCRIPTED", ()),
        "modules",
        "no_shard",
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
    "added": Mutant(
        "A parameter that was added is used, and never trained",
        lambda: mock.patch.object(Whereabouts, "check"),
        "replaced",
    ),
    "written over": Mutant(
        "A parameter that was written over in its module's dictionary is used, and never trained",
        lambda: mock.patch.object(ShardedParameters, "check"),
        "written over",
    ),
    "renamed": Mutant(
        "State leaves out what goes by another name than when it was sharded",
        lambda: mock.patch.object(access, "check_names"),
        "written over",
        "optim",
    ),
    "copies": Mutant(
        "A copy of the module shares hooks with the sharded one",
        lambda: mock.patch.object(sharding, "refuse_copy", object.__reduce_ex__),
        "copies",
        "no_shard",
    ),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_right_or_says_what_to_do(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


@pytest.mark.parametrize("name", each("The engine, by what it cannot do", ((n, m.breaks) for n, m in MUTANTS.items())))
def test_a_mutant_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
