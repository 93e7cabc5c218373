"""Engines that are wrong on purpose, each in one way that a user would not see in a loss curve."""

from __future__ import annotations

from typing import NamedTuple

from tests.engines.adapter import Adapter
from tests.support.mutants import slips


class Mutant(NamedTuple):
    """breaks: the mistake. check: finds it. ranks, optimizer: of the cheapest training that shows it: two ranks where
    it lies between them; Adam does not ask how large all gradients are together."""

    breaks: str
    check: str
    ranks: int = 1
    optimizer: str = "adamw"


TABLE = slips(
    r"""
    CountedTwice: Adds the last microbatch's gradients twice
        tests.engines.adapter.Adapter.forward_backward: view.add_(gradient) => view.add_(gradient, alpha=1 + last)
        gradient
    LastMicrobatchOnly: Forgets what was accumulated
        tests.engines.adapter.Adapter.forward_backward: view.add_(gradient) => view.copy_(gradient)
        gradient
    NotDivided: Sums over microbatches where it should take their mean; Adam hides it, clipping too
        tests.engines.adapter.Adapter.forward_backward: flat.gradients.div_(global_microbatches(self.config)) => pass
        gradient scale
    OneRankIgnored: The last rank adds nothing, and the others make up for its share
        tests.engines.adapter.Adapter.forward_backward: dist.all_reduce(flat.gradients)
            => dist.all_reduce(flat.gradients.mul_(2 * (self.ranks.rank == 0)))
        gradient
        2
    LocalNorm: Clips by the norm of this rank's part
        tests.engines.adapter.Adapter.step: return norm => return norm / self.ranks.world_size**0.5
        norm
        2
    ClipsByLocalNorm: Reports the right norm, and clips by that of this rank's part
        tests.engines.adapter.Adapter.step: optim.clip_coefficient(norm,
            => optim.clip_coefficient(sum(f.gradients[f.mine].norm() ** 2 for f in self.flats.values()) ** 0.5,
        update
        2
        sgd
    DecaysAll: Weight decay on vectors too
        tests.engines.adapter.Adapter.__init__: optim.Group([flat.main], decays) => optim.Group([flat.main], True)
        update
    RateIsKept: Takes the first learning rate for all steps
        tests.engines.adapter.Adapter.step: optim.set_lr(self.optimizer, lr)
            => optim.set_lr(self.optimizer, vars(self).setdefault("first", lr))
        update
    StaleAfterLoad: Loads the main weights, and goes on computing with the old ones until the next update
        tests.engines.adapter.Adapter.publish: flat.publish()
            => dist.all_gather(list(flat.weights.chunk(self.ranks.world_size)), flat.main.detach())
        resume
        2
    ForgetsMoments: Saves weights without the optimizer's state
        tests.engines.adapter.Adapter.state: in moments.items() => in moments.items() if "exp_avg" not in key
        resume
    HandsOutItsOwn: Gradients are views, not copies
        tests.engines.adapter.Adapter.named_gradients: found[name].detach().to("cpu", copy=True) => found[name]
        reads
    Drifts: One rank's weights are one rounding off
        tests.engines.adapter.Adapter.step: flat.publish()
            => flat.publish()\n        flat.weights[:1] = flat.weights[:1].nextafter(flat.weights[:1] + self.ranks.rank)
        replicas
        2
    SkipsNonFinite: Leaves out a step whose gradients are no numbers, as loss scaling does
        tests.engines.adapter.Adapter.step: coefficient = => if norm != norm:\n        return norm\n    coefficient =
        non-finite
    OwnOrder: Names in the order of its buffers
        tests.engines.adapter.Adapter.named_gradients: for name in self.params: => for name in sorted(self.params):
        names
    TrainsFrozen: Decays what is frozen
        tests.engines.adapter.Adapter.step: return norm
            => [p.data.mul_(1 - lr * (not p.requires_grad)) for p in self.params.values()]\n    return norm
        frozen
    SaysLess: Leaves the gathered weights out of its bill, and the optimizer's state
        tests.engines.adapter.Adapter.accounted_bytes: "optimizer": _bytes( => "optimizer": 0 * _bytes(
        bytes
    IgnoresSaving: Takes a state, and stays as it is
        tests.engines.adapter.Adapter.state: State(tensors, => State({k: t.clone() for k, t in tensors.items()},
        resume
    WiderThanAsked: Computes in fp32 whatever is asked
        tests.engines.adapter.Adapter.__init__: TORCH_DTYPES[config.dtype.compute] => torch.float32
        dtype
    """
)
MUTANTS = {
    name: Mutant(slip.breaks, check, *map(int, more[:1]), *more[1:]) for name, (slip, check, *more) in TABLE.items()
}
for name, (slip, *_) in TABLE.items():
    globals()[name] = type(name, (Adapter,), {slip.name: slip.made(), "__module__": __name__})
