"""Rules of NCCL user buffers and SHARP."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.errors import Violation
from harness.config.rules.request import Request, rule
from harness.config.schema import CtaPolicy, Numerics, Registration, SharpAxis

ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")


@rule()
def registered_buffers_are_fixed(request: Request) -> Iterator[Violation]:
    if request.config.nccl_ub.mode is Registration.none or request.config.engine.double_buffer:
        return
    if "engine.double_buffer" in request.named:
        problem = f"contradicts {request.show('nccl_ub.mode')}: buffers that come and go would be registered each time"
        fix = "leave it out (nccl_ub implies it), or nccl_ub=none"
        yield request.wrong("engine.double_buffer", problem, "true", fix)


@rule()
def thread_block_policy_finds_its_buffers(request: Request) -> Iterator[Violation]:
    """Efficiency needs non-symmetric registered buffers, NVLink SHARP, and NCCL's own algorithm; zero needs symmetric
    ones.

    NCCL falls back silently.
    """
    ub, algo = request.config.nccl_ub, request.config.sharp.algo
    policy = request.show("nccl_ub.cta_policy")
    if ub.cta_policy is CtaPolicy.default:
        return
    symmetric = ub.cta_policy is CtaPolicy.zero
    if ub.mode is Registration.none or ub.symmetric is not symmetric:
        needed = str(symmetric).lower()
        kind = "symmetric" if symmetric else "registered, but not symmetric"
        problem = f"acts on {kind} buffers; with {request.show('nccl_ub.mode', 'nccl_ub.symmetric')} NCCL ignores it"
        fix = f"nccl_ub=auto nccl_ub.symmetric={needed}, or nccl_ub.cta_policy=default"
        yield Violation(policy, problem, "default", fix)
    if ub.cta_policy is CtaPolicy.efficiency and algo is not None:
        subject = f"{policy} {request.show('sharp.algo')}"
        yield Violation(subject, "is ignored by NCCL if an algorithm is set", "sharp.algo=null", "leave sharp.algo out")
    if ub.cta_policy is CtaPolicy.efficiency and (off := _without_nvls(request)):
        subject = f"{policy} {off}"
        problem = "has no effect: few thread blocks are those of NVLink SHARP (NVLS), which is off then"
        yield Violation(subject, problem, "sharp=default, sharp=dp", "leave sharp out, or nccl_ub.cta_policy=default")


def _without_nvls(request: Request) -> str:
    sharp, cluster, numerics = request.config.sharp, request.config.cluster, request.config.numerics.mode
    if sharp.group is SharpAxis.none:
        return "sharp=none"
    if sharp.group.is_asked and not sharp.nvlink:
        return "sharp.nvlink=false"
    if cluster.ranks_per_device > 1:
        return f"cluster.ranks_per_device={cluster.ranks_per_device}"
    return "" if numerics is Numerics.fast else f"numerics={numerics.name}"


@rule()
def sharp_gives_up_order(request: Request) -> Iterator[Violation]:
    mode = request.config.numerics.mode
    if request.config.sharp.group.is_asked and mode is not Numerics.fast:
        problem = f"leaves the order of sums to the network, which numerics={mode.name} promises"
        yield request.wrong("sharp.group", problem, "none", "sharp=none, or numerics=fast")


@rule("mesh.dp_outer")
def sharp_has_its_axis(request: Request) -> Iterator[Violation]:
    config = request.config
    group, outer = config.sharp.group, config.mesh.dp_outer
    if group is SharpAxis.dp_outer and outer == 1:
        problem = "has no outer axis to act on: mesh.dp_outer=1"
        yield Violation("sharp.group=dp_outer", problem, "none, dp", "sharp=dp, or mesh=two_by_two")
    elif group.is_asked and outer > 1 and not request.can.orders_communicators:
        yield request.wrong(
            "sharp.group mesh.dp_outer",
            f"engine={config.engine.name.name} creates the communicators of its two axes in an order of its own,"
            " and the first one to ask takes InfiniBand SHARP",
            "sharp=none, mesh.dp_outer=1",
            "engine=native, or sharp=none",
        )


@rule()
def sharp_asks_for_something(request: Request) -> Iterator[Violation]:
    sharp = request.config.sharp
    if sharp.group.is_asked and not (sharp.nvlink or sharp.infiniband):
        yield request.wrong("sharp.group sharp.nvlink sharp.infiniband", "asks for neither kind", fix="sharp=none")
    known = {name.lower() for name in ALGORITHMS}
    names = (sharp.algo or "Ring").removeprefix("^").split(",")
    if any(name.lower() not in known for name in names):
        choices = ", ".join(ALGORITHMS) + "; several joined by commas; all but them behind ^"
        yield request.wrong("sharp.algo", "names an algorithm NCCL does not have", choices, "sharp.algo=Ring")
