"""Behaviours 12 to 19: what travels, how often, in which order and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harness.fsdp import Dtypes, MixedPrecisionPolicy, build
from harness.fsdp.runtime import units
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.step import BackwardPlan, StepShape
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.memory import BucketMemory
from tests.fsdp.behaviours.lab import FP32, Broken, Lab, Mutant, behaviour, first_line, live_bytes
from tests.fsdp.behaviours.models import Block, Branches, Net, loss_of, seeded
from tests.fsdp.behaviours.sharding_memory import ONE_UNIT
from tests.fsdp.behaviours.subject import NotOffered, Setup
from tests.fsdp.checked import patched

UNITS = 3
_post_forward = GatherPipeline.post_forward


def _root_is_dropped(self: GatherPipeline, *, backward_follows: bool, inside: bool = False) -> None:
    _post_forward(self, backward_follows=backward_follows, inside=inside)
    self.reshard_all()


_plan = StepShape.plan


def _always_last(self: StepShape, *, sync: bool, adds: bool) -> BackwardPlan:
    return replace(_plan(self, sync=sync, adds=adds), reduce_units=True, last=True)


NO_SYNC_IS_IGNORED = Mutant(
    "no_sync is not asked: every backward reduces",
    patched(StepShape, "plan", _always_last),
)


@behaviour(
    "12",
    "ZeRO-3: a microbatch gathers a unit once for its forward and once for its backward, the root once.",
    Mutant(
        "all weights are dropped between forward and backward, the root's too",
        patched(GatherPipeline, "post_forward", _root_is_dropped),
    ),
    ONE_UNIT,
)
def gathers(lab: Lab) -> str:
    told = []
    for recompute in (False, True):
        subject = lab.build(seeded(Net, units=UNITS, recompute=recompute), Setup(units=(Block,)))
        told.append(lab.traffic(subject, 2).count("all_gather"))
        # The unit a forward ends with may stay for the backward that begins with it.
        allowed = range(2 * 2 * UNITS - 1, 2 * (2 * UNITS + 1) + 1)
        lab.claim(told[-1] in allowed, f"{told[-1]} gathers for {UNITS} units and a root over 2 microbatches")
    lab.claim(told[0] == told[1], f"gathers: {told[0]}, {told[1]} with recomputation")
    return f"gathers of {UNITS} units and a root over 2 microbatches, without and with recomputation: {told}"


@behaviour(
    "13",
    "ZeRO-2 and ZeRO-3: exactly one reduce-scatter a bucket a microbatch.",
    Mutant(
        "the innermost modules with weights are the units",
        patched(build, "plan_units", lambda module, *_: _plan_units(module, (nn.Linear,))),
    ),
)
def reduces_each_microbatch(lab: Lab) -> str:
    return _reductions(lab, (("optim_grads", "reduce_scatter"), ("optim_grads_params", "reduce_scatter")), each=True)


def _reductions(lab: Lab, strategies: Sequence[tuple[str, str]], *, each: bool) -> str:
    """Claim that there is one reduction of a kind a bucket, a microbatch or a step, and none of the other kind."""
    told = []
    for strategy, kind in lab.each(strategies):
        with lab.asking():
            for k in (1, 3):
                traffic = lab.traffic(lab.build(seeded(Net, units=UNITS), Setup(strategy, (Block,))), k)
                found = {each: traffic.count(each) for each in ("all_reduce", "reduce_scatter") if traffic.count(each)}
                want = {kind: (k if each else 1) * (UNITS + 1)}
                lab.claim(found == want, f"{strategy}, k = {k}: {found}, not {want}")
                told.append(f"{strategy} k = {k}: {sum(found.values())}")
    return f"reductions of {UNITS + 1} buckets: {', '.join(told)}{lab.without}"


_plan_units: Any = units.plan_units


@behaviour(
    "14",
    "ZeRO-0: one all-reduce a bucket a step; ZeRO-1: one reduce-scatter; however many microbatches.",
    NO_SYNC_IS_IGNORED,
)
def reduces_each_step(lab: Lab) -> str:
    return _reductions(lab, (("no_shard", "all_reduce"), ("optim", "reduce_scatter")), each=False)


@behaviour(
    "15",
    "HSDP: one outer all-reduce a bucket a step. HFSDP: one outer reduce-scatter and one outer gather, no all-reduce.",
    NO_SYNC_IS_IGNORED,
    ONE_UNIT,
    ranks=4,
)
def outer_traffic(lab: Lab) -> str:
    told = []
    for outer, want in lab.each((("no_shard", (2, 1)), ("optim", (3, 0)))):
        with lab.asking():
            subject = lab.build(seeded(Net, units=UNITS), Setup(units=(Block,), outer=2, outer_strategy=outer))
            traffic = lab.traffic(subject, 2)
            found = traffic.count("reduce_scatter"), traffic.count("all_reduce")
            told.append(f"outer {outer}: {found[0]} reduce-scatters, {found[1]} all-reduces")
            lab.claim(found == tuple(each * (UNITS + 1) for each in want), f"{told[-1]}, not {want} a bucket")
    return "k = 2, 4 buckets: " + "; ".join(told) + lab.without


# -- 16: one order -----------------------------------------------------------------------------------------------------

_mark_ready = ReducePipeline.mark_ready


def _first_come(self: ReducePipeline, unit: Any) -> None:
    self.order.remove(unit)
    self.order.insert(self._issued, unit)
    _mark_ready(self, unit)


def _sent_as_it_lies(self: Gradients) -> None:
    self.copy_in_waiting()
    for index in self._unwritten:
        self._views[index].fill_(7.0)  # as memory that nobody cleared may hold
    self._unwritten = set()


@behaviour(
    "16",
    "Collectives are issued in one order on all ranks, whatever order autograd finds gradients in.",
    Mutant(
        "a unit is reduced when its gradients are ready, not when its turn comes",
        patched(ReducePipeline, "mark_ready", _first_come),
    ),
    Mutant("where no gradient came, what lies in memory is sent", patched(Gradients, "settle", _sent_as_it_lies)),
)
def one_order(lab: Lab) -> str:
    # Two units in the first case, and orders compared before anything is waited for: ranks in different orders would
    # wait for each other.
    paths = {"optim_grads": (2, ([0, 1], [1, 0])), "optim_grads_params": (3, ([0, 1, 2], [0, 2]))}
    for strategy, (count, path) in paths.items():
        make = seeded(Branches, count)
        subject = lab.build(make, Setup(strategy, (Block,)))
        subject.module.path = path[lab.rank]
        with lab.counting() as traffic:
            try:
                lab.accumulate(subject)
            except RuntimeError as failure:
                issued = f"{strategy}: rank {lab.rank} issued {', '.join(traffic.order)}"
                raise Broken(f"{issued}, and then: {first_line(failure)}") from failure
        orders = lab.everywhere(traffic.order)
        # Gathers and reductions are on communicators of their own, or told apart by tags: each kind has one order.
        for kind in ("all_gather", "reduce_scatter"):
            each = [[name.split(" ")[1] for name in order if name.startswith(kind)] for order in orders]
            shown = "; ".join(", ".join(names) for names in each)
            lab.must(each[0] == each[1], f"{strategy}: {kind} in different orders: {shown}")
        subject.finish()
        lab.within(FP32, lab.error(subject.gradients(), _branched(lab, count, path)), f"{strategy}: gradients")
    return "one order where ranks call units in different orders (ZeRO-2), and where one leaves a unit out (ZeRO-3)"


def _branched(lab: Lab, count: int, paths: tuple[list[int], list[int]]) -> dict[str, torch.Tensor]:
    module: Any = seeded(Branches, count)().double()
    for rank, path in enumerate(paths):
        module.path = path
        (loss_of(module, lab.batches(1, 0, rank)[0]) / lab.world).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}


# -- 17, 18: memory of what is fetched ahead ---------------------------------------------------------------------------


def _fetch_all(self: GatherPipeline) -> None:
    while self._next < len(self._sweep):
        self._next += 1
        self._start_unshard(self._sweep[self._next - 1])


def _two_units_at_most(lab: Lab, setup: Setup) -> str:
    """Most units' gathered weights alive at once in two forwards without gradients, as a multiple of one unit's.

    What is there before the first forward is not counted, pools that the first one makes are.
    """
    make = seeded(Net, units=6, dim=128, hidden=192)  # large enough that nothing is packed into staging buffers
    unit = sum(p.nbytes for p in Block(128, 192).parameters())
    subject = lab.build(make, setup)
    levels: list[int] = []
    resting = live_bytes()
    handles = [b.up.register_forward_hook(lambda *_: levels.append(live_bytes())) for b in subject.module.blocks]
    with torch.no_grad():
        for _ in range(2):
            subject.model(torch.ones(1, 128))
    for handle in handles:
        handle.remove()
    peak = (max(levels) - resting) / unit
    lab.claim(peak < 3, f"weights of {peak:.1f} of 6 units at once, the root's included")
    return f"weights of {peak:.1f} units at once at most, the root's (0.3) and its staging included"


@behaviour(
    "17",
    "What is fetched ahead never exceeds its limit: here one unit beyond the one in use.",
    Mutant("everything is fetched as soon as the forward begins", patched(GatherPipeline, "_prefetch", _fetch_all)),
)
def prefetch_is_capped(lab: Lab) -> str:
    if lab.subject.name == "megatron_fsdp":
        raise NotOffered("its limit is half a billion elements, which this model does not reach; none can be given")
    return _two_units_at_most(lab, Setup(units=(Block,)))


@behaviour(
    "17-double-buffer",
    "With the double buffer at most two units' weights are alive.",
    Mutant("everything is fetched as soon as the forward begins", patched(GatherPipeline, "_prefetch", _fetch_all)),
)
def double_buffer_is_two(lab: Lab) -> str:
    return _two_units_at_most(lab, Setup(units=(Block,), options={"fsdp_double_buffer": True}))


_refill = BucketMemory.refill


def _is_in_use(memory: BucketMemory, bucket: torch.Tensor) -> bool:
    turn = memory._placed.get(id(bucket))
    return bucket.untyped_storage().nbytes() > 0 if turn is None else id(bucket) in turn.filled


def _slots_overlap(self: BucketMemory, bucket: torch.Tensor) -> None:
    _refill(self, bucket)
    before = getattr(self, "_last_refilled", None)
    if before is not None and before is not bucket and _is_in_use(self, before):
        before.fill_(float("nan"))
    self._last_refilled = bucket  # type: ignore[attr-defined]


@behaviour(
    "18",
    "The double buffer gives the same bits as buckets allocated one by one.",
    Mutant("a slot is handed out while the unit in it is in use", patched(BucketMemory, "refill", _slots_overlap)),
)
def double_buffer_is_exact(lab: Lab) -> str:
    found = []
    for double in (False, True):
        options = {"fsdp_double_buffer": True} if double else {}
        subject = lab.build(seeded(Net), Setup(units=(Block,), options=options))
        losses = lab.train(subject, 3, k=2)
        found.append((losses, subject.weights()))
        lab.drop(subject)
    (plain, weights), (buffered, others) = found
    lab.claim(plain == buffered, f"losses differ by {abs(plain[-1][-1] - buffered[-1][-1]):.1e} after 3 steps")
    same = all(torch.equal(weights[name], others[name]) for name in weights)
    lab.claim(same, f"weights differ by {lab.error(others, weights):.1e} after 3 steps")
    return "losses and weights of 3 steps equal to the bit"


# -- 19: the wire ------------------------------------------------------------------------------------------------------

_resolve = MixedPrecisionPolicy.resolve


def _wire_is_main(self: MixedPrecisionPolicy, compute: torch.dtype) -> Dtypes:
    found = _resolve(self, compute)
    return replace(found, wire=found.grads)


WIDE_WIRE = Mutant(
    "gradients travel in the dtype they are kept in",
    patched(MixedPrecisionPolicy, "resolve", _wire_is_main),
)


def _wire_bytes(lab: Lab, kind: str, setup: Setup) -> list[int]:
    """Bytes sent by reductions with an fp32 and with a bf16 wire, of a model whose padding hardly counts."""
    found = []
    lab.dim = 64
    for comm in (torch.float32, torch.bfloat16):
        subject = lab.build(seeded(Net, dim=64, hidden=96), replace(setup, comm=comm))
        with lab.counting() as traffic:
            lab.accumulate(subject, 2)
            subject.finish()
        found.append(traffic.count(kind, "bytes"))
    return found


@behaviour("19", "Gradients travel in the wire's dtype.", WIDE_WIRE)
def wire(lab: Lab) -> str:
    told = []
    for strategy in lab.each(("optim", "optim_grads", "optim_grads_params")):
        with lab.asking():
            wide, narrow = _wire_bytes(lab, "reduce_scatter", Setup(strategy, (Block,)))
            told.append(f"{strategy} {narrow}/{wide}")
            lab.claim(
                0.99 * wide <= 2 * narrow <= 1.06 * wide, f"{strategy}: {narrow} bytes under bf16, {wide} under fp32"
            )
    return f"bytes of reductions under bf16 and fp32: {', '.join(told)}{lab.without}"


@behaviour("19-outer", "Gradients travel in the wire's dtype in the outer stage too.", WIDE_WIRE, ranks=4)
def outer_wire(lab: Lab) -> str:
    told = []
    for outer, most in lab.each((("no_shard", 0.75), ("optim", 0.5))):
        with lab.asking():
            setup = Setup(units=(Block,), outer=2, outer_strategy=outer)
            wide, narrow = _wire_bytes(lab, "all_reduce" if outer == "no_shard" else "reduce_scatter", setup)
            told.append(f"outer {outer} {narrow}/{wide}")
            # The second leg of our all-reduce carries sums in the main gradients' dtype.
            fits = 0 < narrow <= 1.03 * most * wide
            lab.claim(fits, f"outer {outer}: {narrow} bytes under bf16, {wide} under fp32")
    return f"bytes of reductions under bf16 and fp32: {', '.join(told)}{lab.without}"
