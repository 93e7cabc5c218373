"""What `.grad` of a sharded parameter says: that there is none, or where it is.

[Note: Reading .grad] Gradients lie in flat buffers, reduced and scaled when they are asked for; `.grad` of a parameter
is at most a part of the way there. Code that reads or scales it (torch's clipping, logging, noise) would be wrong
without a word, so it raises, and says what to call. While a backward runs, hooks see what autograd brought, as under
DDP. Setting it to None forgets it; as gradients of a model are forgotten together, that must be done for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from harness.fsdp.runtime.program_hooks import Hook, watch_present, watched
from harness.fsdp.runtime.step import Step, StepState
from harness.fsdp.storage.parameter_access import GRADIENT, HOME


class GradientAccessError(RuntimeError):
    """The program read or set `.grad` of a sharded parameter, or asked autograd for its gradient, where the value
    would be wrong. The message says what to use instead."""


def refuse_grad_of(param: nn.Parameter) -> NoReturn:
    """Raise GradientAccessError: torch.autograd.grad() was asked for the gradient of a sharded parameter."""
    name, _ = getattr(param, HOME, ("a parameter", ""))
    raise GradientAccessError(
        f"torch.autograd.grad() was asked for the gradient of {name}, and would give what comes of this rank's data"
        " alone, past the reduction. Call loss.backward() and read model.full_gradients() or model.local_gradients(),"
        " then model.zero_grad(); torch.autograd.grad() of inputs is right as it is"
    )


class Answer:
    """Answers for `.grad` of one parameter; see [Note: Reading .grad].

    Args:
        name: of the parameter. names: of all trained parameters, one set that all answers share.
        step: whose gradients these are.
        forget: a weak method that forgets all gradients of the step.
    """

    def __init__(
        self, name: str, names: frozenset[str], step: Step, forget: weakref.WeakMethod[Callable[[], None]]
    ) -> None:
        self.name = name
        self.names = names
        self.step = step
        self.forget = forget

    def read(self, held: Tensor | None) -> Tensor | None:
        """None before the first backward of a step, and what autograd brought while one runs.

        Raises:
            GradientAccessError: a gradient has come.
        """
        if self.step.state in (StepState.IDLE, StepState.BACKWARD) or self.name in self.step.dropped:
            return held if self.step.state is StepState.BACKWARD else None
        raise GradientAccessError(
            f".grad of {self.name} is not its gradient, which lies in flat buffers: clip with model.clip_grad_norm_("
            "max_norm, norm_type), read model.grad_norm() or model.full_gradients(), forget with"
            " model.zero_grad(), or zero_grad() of an optimizer that fully_shard_optimizer(model, optimizer) has bound"
        )

    def assign(self, value: Tensor | None) -> None:
        """None forgets the gradient; once all that are not frozen are set to None, all gradients are forgotten.

        Raises:
            GradientAccessError: a tensor is given; or a backward runs.
        """
        if value is not None:
            raise GradientAccessError(
                f".grad of {self.name} was set to a tensor, which the step would not see, as gradients lie in flat"
                " buffers: scale the loss, or a tensor on the way (register_hook), instead"
            )
        if self.step.in_backward and torch._C._current_graph_task_id() != -1:
            raise GradientAccessError(
                f".grad of {self.name} was set to None inside a backward, by a hook: its gradient is on its way to"
                " other ranks already. Forget gradients after backward() has returned, all of them: model.zero_grad()"
            )
        if self.step.state in (StepState.IDLE, StepState.BACKWARD):
            return
        self.step.drop(self.name)
        dropped, frozen, forget = self.step.dropped, self.step.frozen, self.forget()
        if len(dropped) + len(frozen) >= len(self.names) and dropped | frozen >= self.names and forget is not None:
            forget()

    def watched(self, hook: Hook) -> Hook:
        """What is hung on the parameter in place of a hook of the program."""
        return watched(hook, self.name, self.step)


def answer_for(params: Sequence[tuple[str, nn.Parameter]], step: Step, forget: Callable[[], None]) -> None:
    """Let trained parameters answer for their `.grad`. forget: a bound method; it is not kept alive."""
    names = frozenset(name for name, _ in params)
    method = weakref.WeakMethod(forget)
    for name, param in params:
        setattr(param, GRADIENT, Answer(name, names, step, method))
        watch_present(param, name, step)
