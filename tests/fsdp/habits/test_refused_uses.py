"""What goes through a sharded model, and what programs do to its weights meanwhile, is right or refused; never half."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from harness.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests.fsdp.checked import each_holds, each_is_found, of_slips, said
from tests.fsdp.habits.world import Habits, Net, Run, alike, data, mean_square, plain_sgd, run_of, sharded, training

CHECKS = Habits()

# -- backwards that are none of the step's -----------------------------------------------------------------------------


@CHECKS.right()
def inputs_alone(run: Run) -> tuple[bool, bool]:
    """autograd.grad(loss, x) is no backward of the step, before it and after it."""
    x, close, counted = run.data(0).requires_grad_(), True, False
    for place in range(3):
        loss = mean_square(run.model, x)
        (ours,) = torch.autograd.grad(loss, x, retain_graph=True)
        (right,) = torch.autograd.grad(mean_square(Net(), x), x)
        close &= torch.allclose(ours, right, atol=1e-6)
        if place == 1:
            counted = not run.is_plain and run.model.engine.step.has_gradients
            loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.train(2)
    return close, counted


@CHECKS.right()
def gradients_asked_for(run: Run) -> list[str]:
    """autograd.grad(loss, parameters) would give what no rank has reduced; the step that follows is right."""
    found = []
    if not run.is_plain:
        loss = mean_square(run.model, run.data(0))
        found = said(
            lambda: torch.autograd.grad(loss, list(run.model.parameters())),
            RuntimeError,
            r"torch\.autograd\.grad\(\) was asked for the gradient of head\.weight",
            r"Call loss\.backward\(\) and read parameter\.grad",
        )
        run.model.zero_grad()
    run.train(1)
    return found


# -- tensors and transforms --------------------------------------------------------------------------------------------


def of_words(net: Any, x: Tensor) -> Tensor:
    out: Tensor = net.second(net.first(x if x.is_floating_point() else F.embedding(x, net.table, sparse=True)))
    return out


@CHECKS.check
def strange_tensors(rank: int, strategy: str) -> list[str]:
    run = run_of(lambda: Net(hidden=of_words, table=lambda: nn.Parameter(torch.randn(10, 6))), rank, strategy)
    words = run.model(torch.tensor([1, 2 + rank])).sum()
    found = said(words.backward, RuntimeError, "gradient of table is torch.sparse_coo", "sparse=False")
    run.model.zero_grad()
    run.train(1)
    return found


@CHECKS.check
def transforms(rank: int, strategy: str) -> list[str]:
    run = run_of(Net, rank, strategy)
    x, model = run.data(0), run.model
    through = torch.func.grad(lambda x: mean_square(model, x))
    found = said(lambda: through(x), RuntimeError)
    if strategy != "no_shard":
        found += said(lambda: torch.jit.trace(model, x), RuntimeError)
    with torch.no_grad():
        found += [] if torch.allclose(torch.func.vmap(model)(x), model(x), atol=1e-6) else ["vmap"]
    with forward_ad.dual_level():
        twofold = forward_ad.make_dual(x, torch.ones_like(x))
        found += said(lambda: model(twofold), NotImplementedError, "forward mode AD")  # torch's
    run.train(1)
    return found


class Editing(nn.Module):
    """A unit that edits what it gets, or a copy of that."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.gain, self.linear, self.copies = nn.Parameter(torch.full((6,), 1.2)), nn.Linear(6, 6), copies

    def forward(self, x: Tensor) -> Tensor:
        own = x.clone() if self.copies else x
        out: Tensor = self.linear(F.leaky_relu_(own.mul_(self.gain), 0.3))
        return out


class Edited(nn.Module):
    """Its caller, who goes on with what the unit got."""

    units = (Editing,)

    def __init__(self, copies: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.editing = nn.Linear(6, 6), Editing(copies)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.editing(h) + h
        return out


@CHECKS.check
def edited_inputs(rank: int, strategy: str) -> list[str]:
    """What a unit edits in place is told by its name, as FSDP2 would; a copy of it may be edited."""
    model, _ = sharded(Edited(copies=False), strategy)
    found = said(lambda: model(data([rank], 0)), RuntimeError, "unit editing edited an input in place.*x = x.clone()")
    return found + alike(partial(Edited, copies=True), training(2))(rank, strategy)


# -- weights that hooks and forwards edit ------------------------------------------------------------------------------


def by_data(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.data.add_(param.grad, alpha=-0.2)
    param.grad = None


@torch.no_grad()
def in_place(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.sub_(0.2 * param.grad)


def by_optimizer(param: nn.Parameter) -> None:
    """torch's own recipe has an optimizer for each parameter, built beforehand."""
    torch.optim.SGD([param], lr=0.2).step()


@CHECKS.check
def stepping_in_hooks(rank: int, strategy: str) -> list[str]:
    """ "Optimizer in backward", by hand and by optimizers, hung on the module or on the sharded model's parameters."""

    def hung(hook: Callable[[nn.Parameter], None], part: str, *, before: bool) -> Callable[[], None]:
        module = Net()
        for param in module.get_submodule(part).parameters() if before else ():
            param.register_post_accumulate_grad_hook(hook)
        model = fully_shard_model(module, zero_dp_strategy=strategy, fsdp_unit_modules=module.units)
        for param in module.get_submodule(part).parameters() if not before else ():
            param.register_post_accumulate_grad_hook(hook)
        return lambda: mean_square(model, data([rank], 0)).backward()

    told = "changed values of parameter {}.* inside the backward.*optimizer.step\\(\\) after backward"
    return [
        f"{hook.__name__} on {part}, before={before}: {each}"
        for hook in (by_data, in_place, by_optimizer)
        for part in ("head", "first")
        for before in (True, False)
        for each in said(hung(hook, part, before=before), Exception, told.format(part))
    ]


class Constrained(nn.Linear):
    """Keeps rows of its weight short, as EEGNet does: it assigns to `data` in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


@CHECKS.check
def assigning_in_a_forward(rank: int, strategy: str) -> list[str]:
    train = partial(alike(partial(Net, head=lambda: Constrained(6, 6))), rank, strategy)
    return said(train, Exception, "head.weight was changed after sharding")


@CHECKS.check
def a_module_alone_beside_main_weights(rank: int, strategy: str) -> list[str]:
    """Its main weights' gradient would be each rank's own; with penalties and without gradients they may be used."""
    told = []
    for bias in (True, False):
        module = Net()
        module.head = nn.Linear(6, 6, bias=bias)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = fully_shard(module, unit_modules=module.units, strategy=strategy, mp_policy=policy)
        x = torch.randn(6, 6)  # as many rows as the weight has
        told += said(lambda head=model.head, x=x: head(x), RuntimeError, "meets (the main weight|a sharded one)")
        if strategy == "no_shard":
            with torch.no_grad():
                told += [] if model.head(x).isfinite().all() else ["not without gradients"]
        if strategy == "no_shard":
            weight = model.head.weight
            for made in (weight.t(), weight.T.contiguous(), weight.double().mT, weight.view(2, 3, 6)[0].t()):
                told += said(
                    lambda made=made, x=x: x.to(made) @ made, RuntimeError, "meets the main weight head.weight"
                )
            told += said(
                lambda w=weight, x=x: torch.einsum("bi,oi->bo", x, w.float() * 1.5), RuntimeError, "head.weight"
            )
            apart = ((weight @ weight.T - torch.eye(6)) ** 2).sum() + weight.t().float().square().mean()
            told += [] if torch.autograd.grad(apart, [weight])[0].isfinite().all() else ["no penalty of products"]
        anchors = [param.detach().clone() for param in model.parameters()]
        penalty = sum(((param - at) ** 2).sum() for param, at in zip(model.parameters(), anchors, strict=True))
        told += [] if penalty == 0 else ["an anchor is not the weight"]
    return told


@CHECKS.check
def initialising_unseeded(rank: int, strategy: str) -> list[str]:
    """Each rank draws its own numbers: named where replicas are compared."""
    module = Net()
    pair = fully_shard(module, plain_sgd(module), zero_dp_strategy=strategy, check_replicas_every=1)
    torch.manual_seed(rank)
    nn.init.normal_(module.head.weight)
    run = Run(module, *pair, (rank,))
    if strategy == "no_shard":
        return said(lambda: run.train(2), Exception, "replicas differ after update 1: head.weight")
    run.train(2)  # each rank updates a part, and all take that
    return []


test_it_is_right_or_says_what_to_do = each_holds(__name__, CHECKS)


MUTANTS = of_slips(
    """
    [The engine, by what it cannot take]
    edited inputs: What a unit edited in place is used by its caller without a gradient through the edit
        fsdp.runtime.hooks.Hooks._post_forward: given.grad_fn is not node => False
        edited_inputs
    inputs alone: A gradient of an input ends the step
        fsdp.runtime.backward_hooks.could_reach: lambda *_: False
        inputs_alone / optim
    gradients asked for: autograd.grad of parameters gives one rank's gradients
        fsdp.runtime.units._will_come: lambda *_: False
        gradients_asked_for
    sparse gradients: A sparse gradient is found by whatever meets it first
        fsdp.runtime.backward_hooks.BackwardHooks._gradient_arrived: gradient.layout is not torch.strided => False
        strange_tensors
    [The engine, by habits of programs]
    alone in another dtype: Under no_shard a module that is called alone leaves each rank with a gradient of its own
        fsdp.storage.at_rest._refuse_data: lambda *_, **__: None
        a_module_alone_beside_main_weights / no_shard
    casts alone: A view or a cast of a main weight is a plain tensor, of which nobody knows what it meets
        fsdp.storage.at_rest.tree_map_only: lambda kind, function, made: made
        a_module_alone_beside_main_weights / no_shard
    edits through data: What a forward assigns to `weight.data` is dropped with the gathered weights
        fsdp.storage.at_rest.ShardedParameters.check_untouched: lambda *_, **__: None
        assigning_in_a_forward
    [The engine, by habits around a step]
    steps in hooks: A hook may change weights by the gradient of one rank
        fsdp.runtime.gradient_sync.ProgramHook.__call__: lambda self, param: self.hook(param)
        stepping_in_hooks / optim_grads
    edits through data in a hook: A hook's parameter counts no edits through `data`
        fsdp.runtime.gradient_sync.counting: lambda own: own
        stepping_in_hooks / optim_grads
    hooks hung before: What was hung on a parameter before it was sharded is not watched
        fsdp.runtime.gradient_sync.watch: lambda *_, **__: None
        stepping_in_hooks / optim_grads
    replicas are not compared: Ranks part by the numbers they have drawn, whatever check_replicas_every says
        fsdp.runtime.weights.Weights.install: if compares else => if False else
        initialising_unseeded / no_shard
    """
)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS)
