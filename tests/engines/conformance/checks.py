"""A case's evidence against one process in fp64.

Bounds come from dtypes, not from engines: `single` in the case's dtype makes every rounding a correct engine makes but
the order of its sums, so a correct engine is about as far from fp64 as `single` is. It may be `SLACK` times as far,
with a floor of a few roundings where `single` happens to hit the fp64 value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from harness.config.derived import optimizer_states
from harness.config.schema import Config
from tests.engines.conformance.cases import CLIP
from tests.engines.conformance.trial import STEPS, Evidence, Failure

SLACK = 4.0
FLOOR_ROUNDINGS = 8.0
UNIT = {"fp64": 2.0**-50, "fp32": 2.0**-24, "bf16": 2.0**-9, "bf16_comm": 2.0**-9}
"""One rounding of the narrowest dtype of a policy; for fp64, where `single` is no measure of itself, a few of them."""
MAIN_UNIT = {"fp64": 2.0**-53, "fp32": 2.0**-24}
ROLES = ("compute_weights", "main_weights", "main_grads", "optimizer", "padding", "buffers")
APART = "gradient_sums"
"""A role there may be beside these."""


@dataclass(frozen=True)
class Judgement:
    """Everything that is known of one case."""

    case: Any
    """A `Case`, or what else has its dtype, strategy and clipping."""
    config: Config
    ranks: list[Evidence]
    exact: Evidence
    """`single` in fp64."""
    peer: Evidence
    """`single` in the case's dtype."""

    def failures(self) -> list[Failure]:
        """Every promise that was not kept; those that several ranks saw, once."""
        found = [failure for evidence in self.ranks for failure in evidence.failures]
        if not found or all(failure.check not in ("names", "form") for failure in found):
            for check in (self.replicas, self.losses, self.gradients, self.norms, self.updates, self.frozen):
                found.extend(check())
        for check in (self.memory, self.traffic):
            found.extend(check())
        return list(dict.fromkeys(found))

    @property
    def first(self) -> Evidence:
        return self.ranks[0]

    @property
    def unit(self) -> float:
        return UNIT[self.case.dtype]

    @cached_property
    def trained(self) -> list[str]:
        return list(self.exact.gradients)

    def bound(self, theirs: float, *floors: float) -> float:
        """What is allowed where `single` in the same dtype is this far off."""
        return SLACK * max(theirs, FLOOR_ROUNDINGS * self.unit, *floors)

    def replicas(self) -> Iterator[Failure]:
        """Weights, gradients and norms are the same bits on all ranks."""
        for what, digest in self.first.digests.items():
            for rank, evidence in enumerate(self.ranks):
                if evidence.digests[what] != digest:
                    yield Failure("replicas", f"{what} differ between rank 0 and rank {rank}")
                    return

    def losses(self) -> Iterator[Failure]:
        """Every microbatch's loss: the right data on every rank, and weights that were updated."""
        for step, (exact, peer) in enumerate(zip(self.exact.losses, self.peer.losses, strict=True)):
            ours = [loss for evidence in self.ranks for loss in evidence.losses[step]]
            bound = self.bound(max(abs(a / b - 1) for a, b in zip(peer, exact, strict=True)))
            for index, (loss, right) in enumerate(zip(ours, exact, strict=True)):
                if not abs(loss / right - 1) <= bound:
                    text = f"microbatch {index} of step {step + 1}: {loss}, in fp64 {right}, allowed {bound:.1e}"
                    yield Failure("loss", text)

    def gradients(self) -> Iterator[Failure]:
        """Each tensor's distance and its size along the right one: rounding is no excuse for a scale."""
        for name, right in self.exact.gradients.items():
            ours, theirs = self.first.gradients[name].double(), self.peer.gradients[name].double()
            if not right.any():
                if ours.any():
                    yield Failure("gradient", f"{name}: not zero, and nothing depends on it")
                continue
            far, bound = _distance(ours, right), self.bound(_distance(theirs, right))
            if not far <= bound:
                yield Failure("gradient", f"{name}: {far:.1e} from fp64, allowed {bound:.1e}")
        far = _distance(*_joined(self.first.gradients, self.exact.gradients))
        usual = _distance(*_joined(self.peer.gradients, self.exact.gradients))
        if not far >= usual / 8:
            yield Failure(
                "dtype", f"gradients are {far:.1e} from fp64, in dtype={self.case.dtype} {usual:.1e} is usual"
            )
        scale, others = (_scale(side.gradients, self.exact.gradients) for side in (self.first, self.peer))
        if not abs(scale - 1) <= self.bound(abs(others - 1)) / 4:
            yield Failure("gradient scale", f"{scale:.6f} of what it should be")

    def norms(self) -> Iterator[Failure]:
        """The norm before clipping, at every step."""
        if self.case.clip and min(self.exact.norms) <= CLIP:
            yield Failure("case", f"clipping never acts: norms {self.exact.norms}")
        for step, (norm, right, peer) in enumerate(
            zip(self.first.norms, self.exact.norms, self.peer.norms, strict=True), 1
        ):
            bound = self.bound(abs(peer / right - 1), step * self.unit)
            if not abs(norm / right - 1) <= bound:
                yield Failure("gradient norm", f"step {step}: {norm}, in fp64 {right}, allowed {bound:.1e}")

    def updates(self) -> Iterator[Failure]:
        """How far every tensor has come: gradients, clipping, decay, rate and moments, each at its size."""
        for step in sorted(self.exact.weights.keys() - {0}):
            check = "weights" if step == STEPS else "update"
            for name in self.trained:
                start = self.exact.weights[0][name]
                right, ours, theirs = (
                    side.weights[step][name].double() - start for side in (self.exact, self.first, self.peer)
                )
                if not right.any():
                    if ours.any():
                        yield Failure(check, f"{name} moved in {step} steps, and nothing moves it")
                    continue
                # The weights themselves are rounded to the main dtype at every step.
                main = MAIN_UNIT[self.config.dtype.main_params.name]
                rounding = step * main * (self.exact.weights[step][name].norm() / right.norm()).item()
                far, bound = _distance(ours, right), self.bound(_distance(theirs, right), rounding)
                if not far <= bound:
                    size = (ours.norm() / right.norm()).item()
                    text = f"{name} after {step}: {far:.1e} from fp64, allowed {bound:.1e}; {size:.4f} of its length"
                    yield Failure(check, text)

    def frozen(self) -> Iterator[Failure]:
        """What is not trained stays."""
        for name, start in self.first.weights[0].items():
            if name not in self.trained and any((kept[name] != start).any() for kept in self.first.weights.values()):
                yield Failure("frozen", f"{name} changed")

    def memory(self) -> Iterator[Failure]:
        """Bytes by role: each weight and each moment lies somewhere, and no rank holds more than all of everything."""
        elements = sum(weight.numel() for weight in self.exact.weights[0].values())
        trained = sum(gradient.numel() for gradient in self.exact.gradients.values())
        main, compute = (d.bytes for d in (self.config.dtype.main_params, self.config.dtype.compute))
        moments = optimizer_states(self.config) * trained * main
        for rank, evidence in enumerate(self.ranks):
            if tuple(sorted(evidence.bytes.keys() - {APART})) != tuple(sorted(ROLES)):
                yield Failure("bytes", f"rank {rank}: roles {sorted(evidence.bytes)}, expected {sorted(ROLES)}")
                return
            counts = len(self.trained) * 8  # steps an optimizer has taken, one a tensor
            most = {
                "compute_weights": elements * max(compute, main),
                "main_weights": 2 * elements * main,  # an engine may keep the whole beside its part
                "main_grads": trained * self.config.dtype.main_grads.bytes,
                "optimizer": moments + counts,
            }
            for role, limit in most.items():
                if not 0 <= evidence.bytes[role] <= limit:
                    yield Failure("bytes", f"rank {rank}: {role} {evidence.bytes[role]}, unsharded at most {limit}")
        total = {role: sum(evidence.bytes[role] for evidence in self.ranks) for role in ROLES}
        least = trained * main + (elements - trained) * min(main, compute)  # frozen ones are only computed with
        if total["main_weights"] + total["compute_weights"] < least:
            yield Failure("bytes", f"all ranks keep {total}: fewer than the weights' {least}")
        if total["optimizer"] < moments:
            yield Failure("bytes", f"all ranks keep optimizer={total['optimizer']}: fewer than {moments}")
        yield from self.shares(total["optimizer"], moments)

    def shares(self, total: int, moments: int) -> Iterator[Failure]:
        """Optimizer state is split where the strategy says so: all ranks together keep it once a replica."""
        if self.case.strategy == "no_shard":
            return
        replicas = 2 if self.case.outer == "no_shard" else 1
        limit = replicas * moments + len(self.ranks) * len(self.trained) * 8
        if total > 1.25 * limit:
            yield Failure("bytes", f"all ranks keep optimizer={total}, and {self.case.strategy} needs {limit}")

    def traffic(self) -> Iterator[Failure]:
        """What is reduced was sent, by what the meter sees, in the dtype asked for."""
        others = len(self.ranks) - 1
        trained = sum(gradient.numel() for gradient in self.exact.gradients.values())
        least = others * trained * self.config.dtype.grad_comm.bytes
        sent = sum(sum(evidence.sent.values()) for evidence in self.ranks)
        if sent < least:
            yield Failure("traffic", f"all ranks sent {sent} bytes in a step; reducing the gradients takes {least}")
        if others and self.first.sent_wide is not None:
            wide = sum(sum((evidence.sent_wide or {}).values()) for evidence in self.ranks)
            saved = others * trained * (self.config.dtype.main_grads.bytes - self.config.dtype.grad_comm.bytes)
            if wide - sent < saved:
                text = f"{sent} bytes a step, {wide} with a wide wire: the narrow one saves less than {saved}"
                yield Failure("wire", text)


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of `a` to the fp64 value `b`."""
    return ((a - b).norm() / b.norm()).item()


def _joined(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    mine = torch.cat([ours[name].double().flatten() for name in exact])
    return mine, torch.cat([each.flatten() for each in exact.values()])


def _scale(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Length of `ours` along `exact`, over the length of `exact`."""
    dot = sum((ours[name].double() * right).sum().item() for name, right in exact.items())
    return dot / math.fsum(right.square().sum().item() for right in exact.values())
