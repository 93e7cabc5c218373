"""Behaviours 28 to 36: is it the update of the whole batch, and of nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.gradient_sync import GradientSync
from harness.fsdp.storage.at_rest import ShardedParameters
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.parameter_access import put_grad
from harness.fsdp.update import norms
from harness.fsdp.update.flat_step import DECOUPLED, FlatStep
from tests.fsdp.behaviours.lab import ALL, FP32, Lab, Mutant, behaviour, relative
from tests.fsdp.behaviours.models import Block, Chain, FusedBlock, Net, holding, seeded
from tests.fsdp.behaviours.numerics import ADDS_TO_LOCAL, NET, SCALED_TWICE
from tests.fsdp.behaviours.subject import NotOffered, Setup, sgd
from tests.fsdp.checked import patched

# -- 28, 29: the optimizer ---------------------------------------------------------------------------------------------

_init = FlatStep.__init__


def _steps_before(self: FlatStep, optimizer: Optimizer) -> None:
    _init(self, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    type(optimizer).step(optimizer, None)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def _one_setting(self: FlatStep, optimizer: Optimizer) -> None:
    _init(self, optimizer)
    for group in optimizer.param_groups:
        group.update({name: optimizer.param_groups[0][name] for name in ("lr", "weight_decay")})


@behaviour(
    "28",
    "The first three updates of Adam and AdamW are those of one process.",
    Mutant(
        "state is made by a step on zero gradients, whose step count stays",
        patched(FlatStep, "__init__", _steps_before),
    ),
)
def first_updates(lab: Lab) -> str:
    least = 1.0
    start = {name: p.detach().double() for name, p in NET().named_parameters()}
    for family in (torch.optim.Adam, torch.optim.AdamW):
        optimize = _adam(family)
        subject = lab.build(NET, Setup(units=(Block,)), optimize)
        for step in range(3):
            lab.accumulate(subject, 1, step)
            subject.step()
            want = lab.trained(NET, optimize, step + 1)
            moved = {n: w.double() - start[n] for n, w in subject.weights().items()}
            least = min(least, *((moved[n].norm() / (want[n] - start[n]).norm()).item() for n in want))
            error = max(relative(moved[n], want[n] - start[n]) for n in want)
            lab.within(1e-3, error, f"update {step + 1}, whose smallest is {least:.3f} of what it should be,")
    return lab.off("updates 1 to 3")


def _adam(family: type[torch.optim.Adam]) -> Any:
    return lambda module: family(list(module.parameters()), lr=1e-2, eps=1e-6)


def _two_groups(module: Any) -> torch.optim.Optimizer:
    params = list(module.parameters())
    return torch.optim.SGD(
        [
            {"params": [p for p in params if p.dim() > 1], "lr": 0.1, "weight_decay": 0.2},
            {"params": [p for p in params if p.dim() <= 1], "lr": 0.02, "weight_decay": 0.0},
        ],
        lr=0.05,
    )


@behaviour(
    "29",
    "Learning rate and weight decay of each parameter group survive wrapping.",
    Mutant("the first group's settings are taken for all", patched(FlatStep, "__init__", _one_setting)),
)
def groups_survive(lab: Lab) -> str:
    subject = lab.weights(NET, Setup(units=(Block,)), _two_groups)
    settings = [(group["lr"], group["weight_decay"]) for group in subject.optimizer.param_groups]
    lab.claim(settings == [(0.1, 0.2), (0.02, 0.0)], f"(lr, weight decay) of each group after wrapping: {settings}")
    return lab.off("two groups keep theirs; weights after 3 steps")


# -- 30 to 34: gradients of a step -------------------------------------------------------------------------------------

_install_grads, _install = ShardedParameters.install_grads, GradientSync._install


def _last_is_left_out(self: ShardedParameters, *args: Any, **named: Any) -> None:
    _install_grads(self, *args, **named)
    put_grad(self.params[-1], None)


@behaviour(
    "30",
    "What the optimizer steps has no gradient before the reduction and one of the right dtype after it.",
    Mutant(
        "the last parameter of each bucket gets no gradient",
        patched(ShardedParameters, "install_grads", _last_is_left_out),
    ),
)
def attached_when_reduced(lab: Lab) -> str:
    subject = lab.build(NET, Setup("optim_grads_params", (Block,), compute=torch.bfloat16))

    def nothing(when: str) -> None:
        left = [grad for _, grad in subject.optimizer_gradients() if grad is not None]
        lab.claim(not left, f"{len(left)} gradients {when}")

    nothing("before the first backward")
    lab.accumulate(subject, 2)
    seen: list[tuple[Tensor, Tensor | None]] = []
    # A hook of torch's: called when the step itself begins, after what the engine does before it.
    handle = subject.optimizer.register_step_pre_hook(lambda *_: seen.extend(subject.optimizer_gradients()))
    subject.step()
    handle.remove()
    missing = [tuple(p.shape) for p, grad in seen if grad is None and _numel_here(p)]
    dtypes = {grad.dtype for _, grad in seen if grad is not None}
    lab.claim(not missing, f"no gradient for {len(missing)} of {len(seen)} tensors that this rank holds")
    lab.claim(dtypes == {torch.float32}, f"gradients of {dtypes}")
    nothing("are left after zero_grad")
    return f"{len(seen)} tensors stepped, none with a gradient before, all with fp32 ones after"


def _numel_here(tensor: Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).numel())


def _forgets_earlier(self: GradientSync) -> None:
    self._kept = []
    _install(self)


@behaviour(
    "31",
    "no_sync on all microbatches but the last equals one big batch; without it, the sum is right or refused.",
    Mutant(
        "a second synchronised backward takes the place of the first",
        patched(GradientSync, "_install", _forgets_earlier),
    ),
)
def accumulation(lab: Lab) -> str:
    told = []
    for strategy in lab.each(ALL):
        with lab.asking():
            subject = lab.gradients(NET, Setup(strategy, (Block,), rhythm="contexts"), 3)
            subject.step()
            lab.accumulate(subject, 3, 1)
            subject.step()
            after = lab.error(subject.weights(), lab.trained(NET, sgd(), 2, 3))
            lab.within(FP32, after, f"{strategy}: weights after two steps with no_sync")
            told.append(f"{strategy} {_without_contexts(lab, strategy)}")
    return f"right with no_sync; three backwards that all synchronise: {', '.join(told)}{lab.without}"


def _without_contexts(lab: Lab, strategy: str) -> str:
    subject = lab.build(NET, Setup(strategy, (Block,), rhythm="auto"))
    try:
        lab.accumulate(subject, 3)
        error = lab.error(subject.gradients(), lab.plain(NET, 3))
    except RuntimeError as refusal:
        if "no_sync" not in str(refusal):
            raise
        subject.optimizer.zero_grad()
        return "refused"
    lab.within(FP32, error, f"{strategy}: gradients of three synchronised backwards")
    return "right"


@behaviour(
    "32",
    "zero_grad clears the main gradients, with set_to_none or without; the next step starts from zero.",
    Mutant("main gradients stay as they are", patched(Gradients, "forget")),
)
def starts_from_zero(lab: Lab) -> str:
    for strategy in lab.each(ALL):
        with lab.asking():
            for set_to_none in (True, False):
                subject = lab.build(NET, Setup(strategy, (Block,)))
                lab.accumulate(subject, 2)
                subject.update()
                subject.optimizer.zero_grad(set_to_none=set_to_none)
                # The second step's gradient, of the weights as they are now.
                now = holding(NET, {name: weight.clone() for name, weight in subject.weights().items()})
                lab.accumulate(subject, 2, 1)
                error = lab.error(subject.gradients(), lab.plain(now, 2, 1))
                lab.within(FP32, error, f"{strategy}, set_to_none={set_to_none}: the next gradients are")
    return lab.off("gradients of the second step, either way,")


class DecoupledSGD(torch.optim.SGD):
    """Reads `decoupled_grad`, as precision-aware optimizers do."""

    seen: ClassVar[list[Tensor | None]]
    """What the last step read of tensors with elements."""

    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if _numel_here(param)]
        DecoupledSGD.seen = [getattr(param, "decoupled_grad", None) for param in params]
        for param, grad in zip(params, DecoupledSGD.seen, strict=True):
            if grad is not None:
                param.data.add_(grad.to(param.dtype), alpha=-self.param_groups[0]["lr"])


def _leaves_last_out(self: FlatStep, gradient_of: Any) -> None:
    _decouple(self, gradient_of)
    setattr(self.optimizer.param_groups[-1]["params"][-1], DECOUPLED, None)


_decouple = FlatStep._decouple


@behaviour(
    "33",
    "use_decoupled_grad gives the optimizer's step gradients in their own dtype.",
    Mutant("the last parameter gets no gradient", patched(FlatStep, "_decouple", _leaves_last_out)),
)
def decoupled(lab: Lab) -> str:
    options = {"use_decoupled_grad": True}
    setup = Setup(units=(Block,), compute=torch.bfloat16, main_params=None, options=options)
    subject = lab.build(NET, setup, lambda module: DecoupledSGD(module.parameters(), lr=0.1))
    lab.accumulate(subject)
    subject.step()
    seen = DecoupledSGD.seen
    missing = sum(grad is None for grad in seen)
    dtypes = {grad.dtype for grad in seen if grad is not None}
    lab.claim(missing == 0, f"{missing} of {len(seen)} have no decoupled_grad")
    lab.claim(dtypes == {torch.float32}, f"decoupled gradients of {dtypes}")
    return f"{len(seen)} bf16 shards with fp32 decoupled gradients"


@behaviour(
    "34",
    "A kernel that adds its weight gradient to get_main_grad() gives the same gradients as autograd.",
    ADDS_TO_LOCAL,
    SCALED_TWICE,
)
def fused_weight_gradient(lab: Lab) -> str:
    fused, plain = (seeded(lambda on=on: Chain(FusedBlock(on), FusedBlock(on))) for on in (True, False))
    for strategy in lab.each(ALL):
        with lab.asking():
            if lab.subject.name == "fsdp2":
                raise NotOffered("it has nothing like get_main_grad")
            for k in (1, 3):
                lab.gradients(fused, Setup(strategy, (FusedBlock,)), k, like=plain)
    return lab.off("k = 1 and 3: gradients")


# -- 35, 36: recomputation, clipping -----------------------------------------------------------------------------------


def _keeps_at_end(self: GatherPipeline) -> None:
    self._take_turns(len(self._sweep))


@behaviour(
    "35",
    "Activation recomputation gives the same gradients and leaves no gathered weights behind.",
    Mutant(
        "what is gathered at the end of the backward stays", patched(GatherPipeline, "post_backward", _keeps_at_end)
    ),
)
def recomputation(lab: Lab) -> str:
    found: list[dict[str, Tensor]] = []
    left: list[str] = []
    for recompute in (False, True):
        subject = lab.build(seeded(Net, recompute=recompute), Setup(units=(Block,)))
        lab.accumulate(subject, 2)
        with suppress(NotOffered):
            left = subject.gathered()
        found.append(subject.gradients())
    error = lab.error(found[1], found[0])
    lab.claim(error == 0.0, f"gradients differ by {error:.1e}")
    lab.claim(not left, f"after the backward {len(left)} parameters have their weights still: {left[:1]}")
    return "gradients equal to the bit, no weights left gathered"


_sum_scalars = Communicator.sum_scalars


def _sums_no_norm(self: Communicator, values: Tensor, purpose: str) -> Tensor:
    return values if purpose == "norm" else _sum_scalars(self, values, purpose)


@behaviour(
    "36",
    "Clipping returns the norm of the whole model's gradient, and scales by it.",
    Mutant("each rank clips by the norm of its own shard", patched(Communicator, "sum_scalars", _sums_no_norm)),
    Mutant("the norm is right and nothing is clipped", patched(norms, "clip_gradients")),
)
def clipping(lab: Lab) -> str:
    want = lab.plain(NET)
    total = torch.cat([value.flatten() for value in want.values()]).norm().item()
    clipped = {name: value * (0.01 / (total + 1e-6)) for name, value in want.items()}
    for strategy in lab.each(ALL):
        with lab.asking():
            subject = lab.build(NET, Setup(strategy, (Block,)))
            lab.accumulate(subject)
            norm = subject.clip(0.01) / total
            lab.claim(abs(norm - 1) < 1e-6, f"{strategy}: the norm is {norm:.4f} of the whole gradient's")
            lab.within(FP32, lab.error(subject.gradients(), clipped), f"{strategy}: clipped gradients")
    return lab.off("the norm is right, clipped gradients are")
