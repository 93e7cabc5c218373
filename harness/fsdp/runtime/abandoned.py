"""Ending of what a collected model has under way.

[Note: Left under way] Other ranks may still take what a rank has offered, so its memory must stay; and they wait until
it has read what they offered. Python's collector comes to a model on each rank at another moment, in the middle of
something else. A rank that waited there, for one whose model is not collected yet and that waits for this rank in its
program, would wait for ever. So a thread waits, and nobody waits for it: no watchdog hears of it, and it has no limit,
for a wait of gloo's that ends by its limit closes the connections of the whole group. Nothing is left to a thread where
nothing is under way, nor on CUDA, where streams wait and not the host.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from harness.fsdp.comm import events
from harness.fsdp.comm.device import DeviceRuntime, is_destroyed
from harness.fsdp.guards.watches import Watches
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.installation import WeightInstaller
from harness.fsdp.runtime.reduce import ReducePipeline

EXIT_S = 1.0
"""Seconds that the program's end waits for a thread; one that came back later would abort the interpreter."""

_waiting: dict[threading.Thread, Callable[[], None]] = {}


def abandon(
    runtime: DeviceRuntime,
    groups: Sequence[dist.ProcessGroup],
    reduce: ReducePipeline,
    gather: GatherPipeline,
    weights: WeightInstaller,
    watches: Watches,
) -> None:
    """End what a model that was collected has under way, without waiting for other ranks; see [Note: Left under way].

    What goes over groups that the program has destroyed is given up: nobody comes to it any more.
    """

    def end() -> None:
        with suppress(Exception), events.apart():
            reduce.discard()
            gather.reshard_all()
            weights.wait()

    def give_up(groups: Sequence[dist.ProcessGroup] = groups) -> None:
        for group in groups:
            with suppress(Exception):
                runtime.abort(group)

    watches.close()
    give_up([group for group in groups if is_destroyed(group)])
    if runtime.has_streams or not (reduce.is_under_way or gather.is_under_way or weights.pending):
        end()
    else:
        _hand_over(end, give_up)


def _hand_over(work: Callable[[], None], give_up: Callable[[], None]) -> None:
    def run() -> None:
        try:
            work()
        finally:
            _waiting.pop(threading.current_thread(), None)

    atexit.unregister(_leave)
    atexit.register(_leave)  # before whatever the program registered earlier
    thread = threading.Thread(target=run, name="fsdp-abandoned", daemon=True)
    _waiting[thread] = give_up
    thread.start()


def _leave() -> None:
    until = time.monotonic() + EXIT_S
    for thread in list(_waiting):  # what others are about to come to
        thread.join(max(until - time.monotonic(), 0.0))
    left = {thread: give_up for thread, give_up in list(_waiting.items()) if thread.is_alive()}
    for give_up in left.values():
        give_up()
    for thread in left:
        thread.join(EXIT_S)
