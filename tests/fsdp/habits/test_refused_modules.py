"""What the module of a sharded model cannot be, or become, is said in one sentence that names value and fix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

from harness.fsdp import RanksDisagree, UnknownPlan, fully_shard_model
from tests.fsdp.checked import each_holds, each_is_found, of_slips, said
from tests.fsdp.habits.world import Block, Habits, Net, Run, data, mean_square, run_of

CHECKS = Habits()

# -- before anything is sharded ----------------------------------------------------------------------------------------


def with_weight(weight: Any) -> nn.Module:
    module = nn.Linear(6, 6)
    module.weight = nn.Parameter(weight)
    return module


def made_of_dtensors() -> nn.Module:
    return with_weight(DTensor.from_local(torch.ones(3, 6), init_device_mesh("cpu", (2,)), [Shard(0)]))


def around(part: str) -> Callable[[], nn.Module]:
    """Makes a part of a module that keeps, as an attribute that is no module, one of it that is sharded already."""

    def make() -> nn.Module:
        module = Net()
        keeper = module.get_submodule(part)
        vars(keeper)["kept"] = [fully_shard_model(module if part else module.second)]
        return keeper

    return make


def bounded(*, trained: bool) -> nn.Module:
    module = nn.Sequential(nn.Embedding(9, 6, max_norm=1.0), nn.Linear(6, 6))
    module[0].weight.requires_grad_(trained)
    return module


def sharing(share: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Net()
        share(module)
        return module

    return make


MAX_NORM = r"0 \(Embedding\) has max_norm=1.0.*max_norm=None.*renorm\(weight, 2, 0, 1\)"
MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bounded embedding": (partial(bounded, trained=True), MAX_NORM),
    "bounded and frozen": (partial(bounded, trained=False), MAX_NORM),
    "DTensors": (made_of_dtensors, r"ranks \[0, 1\] are on the tensor-parallel axis and on the sharding one"),
    "no parameters": (lambda: nn.Sequential(nn.ReLU()), "Sequential has no parameters"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(6)), r"uninitialized parameter.*Call `forward`"),
    "tensors around others": (
        lambda: with_weight(TwoTensor(torch.ones(6, 6), torch.ones(6, 6))),
        r"parameter weight is a TwoTensor.*before its weights are converted",
    ),
    "other names": (
        lambda: checkpoint_wrapper(Net()),
        r"CheckpointWrapper.named_parameters\(\) calls .*wrap its blocks",
    ),
    "complex": (
        lambda: nn.Linear(6, 6, dtype=torch.complex64),
        r"parameter weight has dtype torch.complex64.*view_as_real",
    ),
    "a sharded child": (around(""), r"second \(Block\) is sharded already.*outermost module once"),
    "a child of a sharded one": (around("second"), r"the module \(Block\) is sharded already"),
    "twice": (lambda: fully_shard_model(Net()), r"is sharded already"),
    "scripted": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 6)),
        r"0 \(RecursiveScriptModule\) is made by torch.jit.script.*compile with torch.compile",
    ),
    "DDP": (lambda: DistributedDataParallel(Net()), r"the module \(DistributedDataParallel\) is wrapped by another"),
    "a part of a parameter": (
        sharing(lambda m: setattr(m, "part", nn.Parameter(m.head.weight.detach()[:2]))),
        "(part|head.weight) shares memory with parameter (part|head.weight)",
    ),
    "a buffer that is a parameter": (
        sharing(lambda m: m.first.register_buffer("seen", m.head.weight.detach())),
        r"first.seen shares memory with parameter head.weight.*clone\(\)",
    ),
    "a view that is kept": (
        sharing(lambda m: setattr(m.second, "turned", [m.head.weight.t()])),
        r"second.turned shares memory with parameter head.weight.*clone\(\)",
    ),
}
UNITS: dict[str, tuple[Any, str]] = {
    "a path": ("torch.nn.Linear", r"fsdp_unit_modules\): 't' is no nn.Module class"),
    "a list of modules": ([nn.Linear(1, 1)], r"Linear\(.*\) is no nn.Module class; give classes"),
    "no match": ([nn.Conv2d], r"\['Conv2d'\] matches no module of Net.*it has Block, Linear, Net"),
}


@CHECKS.check
def modules(_: int, strategy: str) -> list[str]:
    found = []
    for make, says in MODULES.values():
        module = make()
        kinds = [type(param) for param in module.parameters()]
        kind = UnknownPlan if make is made_of_dtensors else ValueError
        found += said(partial(fully_shard_model, module, zero_dp_strategy=strategy), kind, says)
        found += [] if [type(p) for p in module.parameters()] == kinds else [f"{says}: it was changed"]
    normed = sharing(lambda m: nn.utils.spectral_norm(m.head))()  # it makes views anew before each forward
    fully_shard_model(normed, zero_dp_strategy=strategy).close()
    return found


@CHECKS.check
def units(_: int, strategy: str) -> list[str]:
    module, found = Net(), []
    for given, says in UNITS.values():
        shard = partial(fully_shard_model, module, zero_dp_strategy=strategy, fsdp_unit_modules=given)
        found += said(shard, ValueError, says)
    found += [] if all(type(p) is nn.Parameter for p in module.parameters()) else ["the module was changed"]
    fully_shard_model(module, zero_dp_strategy=strategy, fsdp_unit_modules=[nn.Conv2d, Block]).close()
    fully_shard_model(Block(), zero_dp_strategy=strategy, fsdp_unit_modules={Block}).close()  # type: ignore[arg-type] # wrong on purpose
    return found


@CHECKS.check
def parted(rank: int, strategy: str) -> list[str]:
    """Ranks that begin with other flags, or other shapes, are told on every rank."""
    frozen, other = Net(), nn.Linear(6, 6 + rank)
    (frozen.second if rank else frozen.first).requires_grad_(False)
    told = said(
        lambda: fully_shard_model(frozen, zero_dp_strategy=strategy),
        RanksDisagree,
        r"parameter first.linear.weight is float32 \[.*\] frozen on rank 0, float32 \[.*\] trained on rank 1",
    )
    words = "float32 [6, 6] trained on rank 0, float32 [7, 6] trained on rank 1"
    return told + said(lambda: fully_shard_model(other, zero_dp_strategy=strategy), RanksDisagree, words)


# -- afterwards --------------------------------------------------------------------------------------------------------


ADDING: dict[str, Callable[[Any], Any]] = {
    "head.weight was added or replaced": lambda module: setattr(module.head, "weight", nn.Parameter(torch.ones(6, 6))),
    "head.weight was added": lambda module: setattr(module, "head", nn.Linear(6, 6)),
    "second.extra.weight was added": lambda module: setattr(module.second, "extra", nn.Linear(6, 6)),
    "second.gain was added": lambda module: module.second.register_parameter("gain", nn.Parameter(torch.ones(1))),
}


@CHECKS.check
def replaced(rank: int, strategy: str) -> list[str]:
    """At the next forward; a closed model may be changed."""
    found = []
    for says, act in ADDING.items():
        run = run_of(Net, rank, strategy)
        act(run.module)
        found += said(lambda run=run: run.train(1), RuntimeError, says, "Change the module before")
        run.model.close()
    run.module.head = nn.Linear(6, 6)
    return found


@CHECKS.check
def unfrozen(rank: int, strategy: str) -> list[str]:
    """A backward that would train what was frozen says so; the step after, with it frozen again, is as ever."""
    module, found = Net(), []
    units = module.first.requires_grad_(False), module.second.requires_grad_(False)
    model = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    loss = partial(mean_square, model, data((rank,), 0))
    for part in units:
        part.requires_grad_(True)
        says = "was frozen when it was sharded", "freeze afterwards"
        found += said(lambda: loss().backward(), RuntimeError, *says)
        part.requires_grad_(False)
        model.zero_grad()
        loss().backward()
        model.zero_grad()
    model.close()
    return found


@CHECKS.right()
def put_back(run: Run) -> None:
    """What changes nothing is as before."""
    run.module.head, run.module.second.act = run.module.head, nn.ReLU()
    run.train(2)


@CHECKS.check
def copies(rank: int, strategy: str) -> list[str]:
    model: Any = run_of(Net, rank, strategy).model
    return said(lambda: copy.deepcopy(model.first), TypeError, "cannot be copied", "full_weights")


@CHECKS.check
def written_over(rank: int, strategy: str) -> list[str]:
    """What code that writes into a module's own dictionaries does, as loaders do; taking out is none."""
    run = run_of(Net, rank, strategy)
    module = run.module
    module.first.linear.bias = None
    del module.second.linear.bias
    module.second.linear.register_parameter("bias", None)
    run.train(1)
    held, kept = module.head._parameters, module.head.weight
    held["weight"] = nn.Parameter(torch.ones(6, 6))
    found = said(lambda: run.train(1), RuntimeError, "head.weight was added or replaced after sharding")
    held["weight"] = kept
    run.model.zero_grad()
    run.train(1)
    held = module.second.linear._parameters
    held["weight_orig"] = held.pop("weight")
    says = "parameter second.linear.weight is called second.linear.weight_orig since it was sharded"
    for reads in (run.model.state_dict, run.model.sharded_state, partial(run.model.load_state_dict, {}, strict=False)):
        found += said(reads, RuntimeError, says)
    run.model.close()
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
    "double": nn.Module.double,
    "swap_tensors": lambda module: torch.utils.swap_tensors(module.bias, nn.Parameter(torch.ones(6))),
}
"""What puts another parameter in a weight's place, or gives it another name, or lets it stand for another value."""


@CHECKS.check
def replacing(rank: int, strategy: str) -> list[str]:
    """torch's functions that make new parameters of sharded ones, or move them, raise then or at the next forward."""
    found = []
    for name, function in REPLACING.items():
        run = run_of(Net, rank, strategy)
        try:
            function(run.module.second.linear)
            run.train(1)
            found.append(f"{name} is taken")
        except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError) as error:
            says = "no longer the engine's|Cannot swap" if name in ("double", "swap_tensors") else ""
            found += said(lambda error=error: _raise(error), Exception, says)
        run.model.close()
    return found


def _raise(error: Exception) -> None:
    raise error


test_it_is_right_or_says_what_to_do = each_holds(__name__, CHECKS)


MUTANTS = of_slips(
    """
    [The engine, by what it cannot do]
    parts: Bounded embeddings and parts of sharded models are sharded like others
        fsdp.preconditions.PARTS: {}
        modules / no_shard
    parameters: Tensors around others are sharded like others
        fsdp.preconditions.PARAMS: {}
        modules
    units: A list of units that matches nothing makes one unit of everything
        fsdp.preconditions._check_units: lambda *_, **__: None
        units
    [The engine, by habits of programs]
    shared memory: Parameters that overlap are sharded apart
        fsdp.preconditions._check_apart: lambda *_, **__: None
        modules
    views of parameters: What a module keeps of a parameter stays behind when that is sharded
        fsdp.preconditions._kept: lambda _: ()
        modules
    [The engine, by what it cannot do]
    added: A parameter that was added is used, and never trained
        fsdp.storage.parameter_access.Whereabouts.check: lambda *_, **__: None
        replaced
    written over: A parameter that was written over in its module's dictionary is used, and never trained
        fsdp.storage.parameter_access._contents: held, list(map( => [], list(map(
        written_over
    renamed: State leaves out what goes by another name than when it was sharded
        fsdp.build.check_names: lambda *_, **__: None
        written_over / optim
    copies: A copy of the module shares hooks with the sharded one
        fsdp.sharding.refuse_copy: object.__reduce_ex__
        copies / no_shard
    [The engine, by what programs freeze]
    unfreezing is not seen: What was frozen when it was sharded brings a gradient that nobody takes
        fsdp.runtime.backward_hooks.unfrozen_too_late: lambda _: None
        unfrozen
    """
)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS)
