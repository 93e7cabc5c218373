"""The meter of tensor storage against programs whose bytes are counted by hand."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from harness.probe.storage import Event, StepBytes, StorageMeter, summed
from harness.shm.segment import Segment
from tests.support.spawn import run_ranks

KIB = 256
"""fp32 elements of one KiB."""


def measure(*steps: Callable[[], object]) -> list[tuple[int, int, int]]:
    """Bytes of each step, in KiB: before, at most, after."""
    gc.collect()
    meter = StorageMeter()
    try:
        for step in steps:
            with meter.step():
                step()
        found = meter.finish()
    finally:
        meter.close()
    assert all(number % 1024 == 0 for row in found for number in row), found
    return [(row.persistent // 1024, row.peak // 1024, row.left // 1024) for row in found]


def test_allocations_frees_and_what_stays() -> None:
    kept: list[torch.Tensor] = []

    def grow() -> None:
        first = torch.empty(4 * KIB)
        del first
        second, third = torch.empty(3 * KIB), torch.empty(2 * KIB)
        del third
        kept.append(second)

    assert measure(grow, grow) == [(0, 5, 3), (3, 8, 6)]


def test_views_and_in_place_operations_take_nothing() -> None:
    kept = torch.ones(8 * KIB)

    def work() -> None:
        kept.view(8, KIB)[2:4].neg_().exp_()  # a scalar operand would be a tensor of its own
        kept.t().detach().zero_()

    assert measure(work) == [(0, 0, 0)], "and what was there before the meter is not known to it"


def test_what_a_thread_allocates_and_another_frees() -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: kept.append(torch.empty(4 * KIB))).result()
            pool.submit(lambda: torch.empty(2 * KIB).zero_().numel()).result()

    def free_elsewhere() -> None:
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()

    assert measure(work, free_elsewhere) == [(0, 6, 4), (4, 4, 0)]


def test_a_thread_of_the_engine_lives_through_the_meter_and_is_let_go() -> None:
    with ThreadPoolExecutor(1) as pool:

        def work() -> None:
            pool.submit(lambda: torch.empty(KIB).numel()).result()

        assert measure(work, work) == [(0, 1, 0), (0, 1, 0)]
        assert pool.submit(lambda: (torch.empty(KIB).numel(), sys.getprofile())).result() == (KIB, None)


def test_a_backward_is_followed() -> None:
    """y = w * x with w, x of 4 KiB: the product, its gradient of ones, and the weight's gradient, which stays."""
    weight, x = torch.ones(4 * KIB, requires_grad=True), torch.ones(4 * KIB)
    ones = torch.ones(4 * KIB)

    def work() -> None:
        (weight * x).backward(ones)

    ((before, peak, after),) = measure(work)
    assert (before, after) == (0, 4)
    assert 8 <= peak <= 12


def test_what_was_freed_unheard_is_gone_with_the_next_report() -> None:
    begin, end = (lambda time: Event(time, 1, None)), (lambda time: Event(time, -1, None))
    first = [Event(0, 50, 150), begin(1), Event(2, 100, 250), Event(3, -20, 230), end(4)]
    # Between the steps 130 bytes went without a word; the second step takes 10 and the third nothing.
    second = [begin(5), Event(6, 10, 110), end(7), begin(8), end(9)]
    assert summed([*second, *first]) == [StepBytes(50, 150, 130), StepBytes(0, 10, 10), StepBytes(10, 10, 10)]


def test_blocks_of_shared_memory_are_added_where_they_fall() -> None:
    """One is taken before the first step and stays, one lies within the second step, where 30 of torch's are freed."""
    begin, end = (lambda at: Event(at, 1, None)), (lambda at: Event(at, -1, None))
    events = [begin(2), Event(3, 50, 150), end(5), begin(6), Event(8, -30, 120), end(10)]
    shared = [(1, 1000), (7, 200), (9, -200)]
    assert summed(events, shared) == [StepBytes(1000, 1050, 1050), StepBytes(1050, 1250, 1020)]


def test_shared_memory_of_this_process_is_followed() -> None:
    """In whole lines of memory, as it is taken; given back with the last tensor."""
    segment = Segment(0, 1 << 20)
    meter = StorageMeter()
    with meter.step():
        _, kept = segment.allocate(5000)
        segment.allocate(100_000)
    with meter.step():
        del kept
    first, second = meter.finish()
    assert (first.persistent, first.left, second.left) == (0, 5056, 0)
    assert first.peak >= 5056 + 100_032


def test_tensors_that_gloo_lets_go_are_not_counted_for_ever() -> None:
    """A collective's tensors may be freed by gloo's thread after the profiler's reach; 50 of them leave nothing."""
    run_ranks(_let_gloo_free, 2)


def _let_gloo_free(_rank: int) -> None:
    meter = StorageMeter()
    for _ in range(4):
        with meter.step():
            for _ in range(50):
                dist.all_reduce(torch.ones(KIB))
                dist.all_reduce(torch.ones(KIB), async_op=True)
            dist.barrier()
            kept = torch.ones(KIB)
            del kept
    found = meter.finish()
    assert abs(found[-1].persistent - found[1].persistent) <= 2048, found


def test_a_meter_is_stopped_once_and_a_new_one_may_follow() -> None:
    meter = StorageMeter()
    meter.close()
    meter.close()
    with pytest.raises(RuntimeError, match="stopped before"):
        meter.finish()
    assert threading.getprofile() is None
    assert measure(lambda: torch.empty(KIB)) == [(0, 1, 0)]
