"""Faults of resuming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.config.derived import lr_at
from tests.faults.corpus import ZERO2, ZERO3
from tests.faults.site import Site, blend, exchange, fault, fault_2, rounded, share
from tests.support.layouts import local_of


def on_load(site: Site, chosen: Callable[[str], bool], change: Callable[[Tensor, Tensor], object]) -> None:
    """After a checkpoint is loaded, change tensors of its state, given what they were before."""

    def wrapped(take_state: Callable[[], Any]) -> Any:
        state = take_state()
        before = {key: local_of(tensor).clone() for key, tensor in state.tensors.items()}

        def adopt() -> None:
            state.adopt()
            loaded = take_state()
            with torch.no_grad():
                for key, tensor in loaded.tensors.items():
                    if chosen(key) and tensor.numel():
                        change(local_of(tensor), before[key])
            loaded.adopt()

        return replace(state, adopt=adopt)

    site.around(site.engine, "state", wrapped)


def _is_weight(key: str) -> bool:
    return not key.startswith("optimizer")


@fault("checkpoint", ZERO3, resumes=True, report="pytorch/torchtitan#1136")
def F16_tail_lost_on_resume(site: Site) -> None:
    """The last rows of a split weight come back wrong from a checkpoint."""
    part = site.amount / 16
    on_load(site, _is_weight, lambda new, old: share(new.view(-1), part).copy_(share(old.view(-1), part)))


@fault("checkpoint", ZERO3, resumes=True, report="ISEEKYAN/Megatron-LM PR 104")
def F17_shards_not_refreshed(site: Site) -> None:
    """Loading fills the full weights, the shards keep what they had."""
    on_load(site, _is_weight, lambda tensor, old: blend(tensor, old, site.amount))


@fault("checkpoint", ZERO3, resumes=True, report="NVIDIA/Megatron-LM, note on fsdp_dtensor")
def F18_absent_weights_skipped(site: Site) -> None:
    """A weight that the checkpoint lacks stays at its initial value, silently."""
    first = next(key for key in site.engine.state().tensors if _is_weight(key))
    on_load(site, lambda key: key == first, lambda tensor, old: blend(tensor, old, site.amount))


@fault("checkpoint", ZERO3, resumes=True)
def optimizer_step_lost_on_resume(site: Site) -> None:
    """Adam's step count begins anew after a resume."""
    on_load(site, lambda key: key.endswith("step"), lambda tensor, old: blend(tensor, 0.0, site.amount))


@fault("checkpoint", ZERO2, resumes=True)
def moments_lost_on_resume(site: Site) -> None:
    """Adam's moments begin anew after a resume."""
    on_load(site, lambda key: "exp_avg" in key, lambda tensor, old: blend(tensor, 0.0, site.amount))


@fault_2("checkpoint", ZERO3, resumes=True, report="karpathy/llm.c PR 702")
def F44_weights_from_16_bits(site: Site) -> None:
    """Main weights are made again of the 16-bit ones when a run is resumed."""
    on_load(site, _is_weight, lambda tensor, _: tensor.copy_(rounded(tensor, site.bits)))


@fault_2("checkpoint", ZERO2, resumes=True, report="wochenlong/lora-scripts-next PR 320")
def F45_moments_by_position(site: Site) -> None:
    """Moments are handed out by their place in a list, and two of one shape change owners. Adam's first moments of
    the query projections of the first two blocks."""
    first: list[Tensor] = []

    def change(tensor: Tensor, _: Tensor) -> None:
        if not first:
            first.append(tensor)
        else:
            exchange(first.pop().view(-1), tensor.view(-1), site.amount)

    owners = [f"optimizer/blocks.{number}.attention.wq.weight/exp_avg" for number in (0, 1)]
    on_load(site, lambda key: key in owners, change)


@fault_2("optimizer", ZERO3, resumes=True, report="Lightning-AI/pytorch-lightning#4655")
def F46_lr_lags_on_resume(site: Site) -> None:
    """The schedule is a step behind after a resume. The learning rate that is logged is the right one."""

    def wrapped(step: Callable[[float], float], lr: float) -> float:
        behind = lr_at(site.config, site.step - 1) if site.first > 1 else lr
        return step(lr + site.amount * (behind - lr))

    site.around(site.engine, "step", wrapped)
