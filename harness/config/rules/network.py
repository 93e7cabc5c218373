"""Rules of NCCL user buffers and SHARP."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.errors import Violation
from harness.config.own import capabilities_of
from harness.config.rules.request import Request, refusal, rule
from harness.config.schema import Numerics, Registration, SharpAxis


@rule()
def registered_buffers_are_fixed(request: Request) -> Iterator[Violation]:
    if request.config.nccl_ub.mode is Registration.none or request.config.engine.double_buffer:
        return
    if "engine.double_buffer" in request.named:
        problem = f"contradicts {request.show('nccl_ub.mode')}: buffers that come and go would be registered each time"
        fix = "leave it out (nccl_ub implies it), or nccl_ub=none"
        yield request.wrong("engine.double_buffer", problem, "true", fix)


sharp_gives_up_order = refusal(
    lambda c: c.sharp.group.is_asked and c.numerics.mode is not Numerics.fast,
    "sharp.group",
    "leaves the order of sums to the network, which numerics={numerics.mode.name} promises",
    "sharp=none, or numerics=fast",
)
sharp_has_its_axis = refusal(
    lambda c: c.sharp.group is SharpAxis.dp_outer and c.mesh.dp_outer == 1,
    "sharp.group",
    "has no outer axis to act on: mesh.dp_outer=1",
    "sharp=dp, or mesh=two_by_two",
    reads="mesh.dp_outer",
)
sharp_has_one_owner = refusal(
    lambda c: c.sharp.group.is_asked and c.mesh.dp_outer > 1 and not capabilities_of(c).orders_communicators,
    "sharp.group mesh.dp_outer",
    "engine={engine.name.name} creates the communicators of its two axes in an order of its own, and the first one to"
    " ask takes InfiniBand SHARP",
    "engine=native, or sharp=none",
    reads="mesh.dp_outer",
)
