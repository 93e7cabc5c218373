"""Optimizers that need parameters whole, as their users write them: nothing of shards or ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Shampoo(torch.optim.Optimizer):
    """Gupta et al. (2018), with grafted size; everything but matrices by sign. State: a tensor of shape [] counts."""

    entries = ("step", "left", "right")

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def needs_whole(self, param: Tensor) -> bool:
        return param.dim() == 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # as torch's own
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                grad, state = param.grad, self.state[param]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                if param.dim() != 2:
                    param.sub_(grad.sign(), alpha=group["lr"])
                    continue
                if not state:
                    state["step"] = torch.zeros(())
                    state["left"], state["right"] = (torch.eye(size).mul_(1e-3) for size in param.shape)
                state["step"].add_(1)
                state["left"].add_(grad @ grad.T)
                state["right"].add_(grad.T @ grad)
                found = _power(state["left"]) @ grad @ _power(state["right"])
                scale = grad.norm() / found.norm().clamp(min=1e-12) / (1 + param.norm())
                param.sub_(found, alpha=float(group["lr"] * scale / state["step"].sqrt()))


def _power(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values.clamp(min=1e-6) ** -0.25).diag() @ vectors.T


class Soap(torch.optim.Optimizer):
    """Vyas et al. (2024): Adam in the eigenbases of Shampoo's. State as theirs: lists, and a number that counts."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # as torch's own
        for group in self.param_groups:
            group["steps"] += 1
            for param in (each for each in group["params"] if each.grad is not None):
                grad, state = param.grad.view(len(param), -1), self.state[param]
                if "step" not in state:
                    state |= {"step": 0, "first": torch.zeros_like(grad), "second": torch.zeros_like(grad), "bases": []}
                    state["sums"] = [grad.new_zeros(size, size) for size in grad.shape]
                state["step"] += 1
                for total, product in zip(state["sums"], (grad @ grad.T, grad.T @ grad), strict=True):
                    total.lerp_(product, 0.05)
                if state["step"] % 2 == 1:
                    state["bases"] = [torch.linalg.eigh(total)[1] for total in state["sums"]]
                left, right = state["bases"]
                state["first"].lerp_(grad, 0.1)
                turned = left.T @ grad @ right
                state["second"].lerp_(turned.square(), 0.05)
                found = left @ ((left.T @ state["first"] @ right) / (state["second"].sqrt() + 1e-8)) @ right.T
                rate = group["lr"] * (1 - 0.95 ** state["step"]) ** 0.5 / (1 - 0.9 ** group["steps"])
                param.sub_(found.view(param.shape), alpha=rate)
