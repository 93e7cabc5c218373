"""What a step launches beside torch's own FSDP2 on the same recorder: see `tests.streams.cost`."""

from __future__ import annotations

import pytest
import torch

from harness.fsdp.comm.reduction import square_counters
from tests.streams.cost import Counts
from tests.streams.recorder import recording
from tests.streams.steps import Arm, measured
from tests.support.covering import once
from tests.support.spawn import run_ranks

LAYERS = 2
CPU = torch.device("cpu")
WIRES = (torch.float32, torch.bfloat16)
ARMS = tuple(Arm(engine, "optim_grads_params", wire) for wire in WIRES for engine in ("fsdp2", "native"))


@once
def found() -> dict[Arm, Counts]:
    return dict(zip(ARMS, run_ranks(measured, 2, 2, ARMS, LAYERS)[0], strict=True))


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_step_launches_no_more_than_fsdp2s(wire: torch.dtype) -> None:
    ours, theirs = (found()[Arm(engine, "optim_grads_params", wire)] for engine in ("native", "fsdp2"))
    assert ours.stops == theirs.stops == {}, "clipping included"
    assert ours.compute + ours.launches <= theirs.compute + theirs.launches, f"{ours}, beside {theirs}"


def test_an_exact_norm_takes_as_many_kernels_for_a_long_tensor_as_for_a_short_one() -> None:
    values = torch.randn(3 << 20, generator=torch.Generator().manual_seed(0))
    on_host = square_counters([values], CPU)
    launched = []
    for given in (values[:100], values):
        with recording() as recorder:
            counters = square_counters([given], CPU)
        launched.append(len(recorder.log.kernels))
    assert launched[0] == launched[1] < 60
    assert torch.equal(counters, on_host)
