"""Updated weights that are on their way from other ranks.

[Note: Weights on their way] After an update, a bucket that is kept whole between uses gets the parts that others
updated. On a device nobody waits for them at once: each unit waits for its own
when it is used for the first time, so that the forward begins beside the gathers of later units. Until then its
parameters stay *resting* ([Note: The class of a parameter]), inside the forward too: whoever touches one, wherever,
waits for all first. On a CPU everything is received as it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Pending
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.events import Label


class Awaited:
    """Gathers of one bucket after an update; made on the stream that updated.

    Whoever uses weights on another stream has that one wait for the stream that updated, and no more: so that stream
    waits for the gathers, whoever asks for them first.

    Args:
        gathers: the last of which brings the weights; the others have been received.
        label: of the bucket's gathers.
        runtime: of the device the bucket lies on.
    """

    def __init__(self, gathers: Sequence[Pending], label: Label, runtime: DeviceRuntime) -> None:
        self._gathers = gathers
        self._label = label
        self._runtime = runtime
        self._stream: Any = runtime.current

    def receive(self) -> None:
        """Have the weights here, for the current stream and the one that updated."""
        with self._runtime.as_on(self._stream):
            self.receive_here()

    def receive_here(self) -> None:
        """Have them here for the current stream alone."""
        with events.waiting(self._label):
            for each in self._gathers:
                each.wait()
