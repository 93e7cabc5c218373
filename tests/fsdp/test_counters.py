"""What a model counts of itself: peaks and totals since it was built or last asked to begin anew."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import fully_shard
from tests.fsdp.checked import each_is_found, of_slips
from tests.support.spawn import run_ranks

UNIT_BYTES = 64 * 64 * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def peaks(rank: int, prefetch: int) -> list[int]:
    """Most bytes that were there at once, of each of two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    sharded, optimizer = fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        fsdp_unit_modules=[Block],
        transport="backend",
        prefetch=prefetch,
    )
    found = []
    sharded.engine.memory.reset_peak()
    for _ in range(2):
        sharded(torch.full((2, 64), 1.0 + rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(sharded.engine.counters()["transient_peak_bytes"])
        sharded.engine.memory.reset_peak()
    assert sharded.engine.counters() == dict.fromkeys(sharded.engine.counters(), 0), "nothing is alive between steps"
    sharded.close()
    return found


@pytest.mark.parametrize(("prefetch", "units_alive"), [(0, 3), (1, 4), (3, 5)])
def test_peaks_are_of_one_step(prefetch: int, units_alive: int) -> None:
    """The unit in use, those fetched ahead, and unreduced gradients of two; of the four units the last ones' weights
    are gone before the first one's gradients come."""
    assert run_ranks(peaks, 2, prefetch) == [[units_alive * UNIT_BYTES] * 2] * 2


def _fetched_in_turn(rank: int, strategy: str) -> list[str]:
    return [f"{peak} bytes are there at once" for peak in peaks(rank, 1) if peak > 4 * UNIT_BYTES]


CHECKS = {"fetched": _fetched_in_turn}
MUTANTS = of_slips(
    """
    no limit ahead: Everything is fetched as soon as the forward begins
        fsdp.runtime.gather.GatherPipeline._prefetch: len(ahead) >= self.prefetch or not self._has_room(following)
            => False
        fetched
    peaks for ever: The most bytes are those of the whole training
        fsdp.storage.memory.BucketMemory.reset_peak: lambda *_, **__: None
        fetched
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by its oracle")
