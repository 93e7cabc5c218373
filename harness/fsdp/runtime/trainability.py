"""Which parameters are trained: `requires_grad`, which a program may change between forwards.

What was trained when it was sharded keeps its storage. While it is frozen, autograd brings it nothing: it is absent
from the sums, and what is absent on all ranks the optimizer leaves alone (see `gradient_sync.Usage`). Its bucket is
reduced all the same, so that no collective depends on the flags.

What was frozen when it was sharded has storage for weights alone. When the program lets a part of such a bucket be
trained, the bucket gets the rest (main weights, gradients, stretches of its optimizer) before the next forward with
gradients. Weights move to other storage, so graphs of earlier forwards are refused then.

Where flags are others than in the last forward with gradients, ranks compare them, one number a rank; where they are
not, nothing is sent. A rank that changed flags and one that did not wait for each other: the label of the comparison
says what was changed, for whoever tells of the hang.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.fsdp.guards.replicas import check_agreed
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.runtime.gradient_sync import GradientSync
from harness.fsdp.runtime.hooks import Hooks
from harness.fsdp.runtime.units import buckets_of
from harness.fsdp.runtime.weak_hooks import WeakHook
from harness.fsdp.runtime.weights import Weights
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import by_engine

WORDS = {True: "trained", False: "frozen"}


class Trainability:
    """Follows `requires_grad` of all parameters.

    laid_out_once: why no bucket can get further storage; "" where it can.
    """

    def __init__(
        self, policy: MixedPrecisionPolicy, hooks: Hooks, weights: Weights, gradients: GradientSync, laid_out_once: str
    ) -> None:
        self.policy, self.laid_out_once = policy, laid_out_once
        self.hooks, self.weights, self.gradients = hooks, weights, gradients
        self._buckets = list(buckets_of(hooks.units))
        self._agreed = self._flags()
        hooks.before_gradients = WeakHook(self.follow)

    def follow(self) -> None:
        """Take up what was frozen or unfrozen since the last forward. *Collective* where anything was. RanksDisagree:
        on all ranks: they have frozen different parameters. RuntimeError: a parameter that was frozen when sharded
        cannot get gradient storage."""
        now = self._flags()
        if now == self._agreed or not any(map(any, now)):
            return
        self._agree(now)
        late = [b for b, flags in zip(self._buckets, now, strict=True) if any(flags) and not b.trainable]
        if late:
            self._train(late)
        self._agreed = now

    @by_engine
    def _flags(self) -> list[list[bool]]:
        return [bucket.views.flags() for bucket in self._buckets]

    def _agree(self, now: list[list[bool]]) -> None:
        frozen, changed = [], []
        for bucket, flags, before in zip(self._buckets, now, self._agreed, strict=True):
            if not bucket.key.expert:
                frozen += [(f"parameter {name}", WORDS[f]) for (name, _), f in zip(bucket.params, flags, strict=True)]
                params = zip(bucket.params, flags, before, strict=True)
                changed += [f"{name} is {WORDS[flag]} now" for (name, _), flag, old in params if flag != old]
        if not changed:
            return
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        check_agreed(
            frozen,
            self.weights.meshes.dense.everyone,
            f"requires_grad, which the program changed ({changed[0]}{more})",
            "requires_grad differs between ranks",
            "All ranks must freeze and unfreeze the same parameters before the same forward",
        )

    def _train(self, late: Sequence[ParamGroup]) -> None:
        """Give buckets gradient storage. *Collective.*"""
        for bucket in late:
            self._refuse(bucket)
        hooks = self.hooks
        self.weights.before_edit()
        hooks.gather.reshard_all()
        for bucket in late:
            bucket.train(self.policy.resolve(bucket.key.dtype))
        for unit in hooks.units:
            unit.take_in()
        hooks.step.weights_installed()
        hooks.reduce.take_in(hooks.units)
        self.gradients.take_in(late)
        hooks.take_in(late)

    def _refuse(self, bucket: ParamGroup) -> None:
        why = self.laid_out_once
        if bucket.key.expert:
            why = "and experts (allreduce=False) are others on every rank, so that ranks cannot agree on it"
        elif self.hooks.gather.holds:
            why = "inside unsharded(), which holds its weights: run the first forward that trains it outside"
        if why:
            name = next(name for (name, _), flag in zip(bucket.params, bucket.views.flags(), strict=True) if flag)
            raise RuntimeError(
                f"parameter {name} was frozen when it was sharded and is to be trained now, {why}. What is trained at"
                " any time may be frozen after sharding instead: shard with requires_grad=True, then call"
                " requires_grad_(False)"
            )
