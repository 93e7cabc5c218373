"""Streams and events behind one face: the only file that says `cuda`.

On CUDA, collectives are issued on side streams and ordered against compute by events. On a CPU there are no streams:
every operation here is a no-op, and overlap comes from the backend's own threads. A third kind of device is for tests:
it computes on the host, and `tests/streams` keeps a record of what its streams would have had to wait for.

glibc gives freed blocks above a threshold back to the system, and a step that takes them again faults in each of their
pages anew: a tenth of its time where units have a few megabytes. The threshold follows the largest block of up to
32 MiB that was ever freed; so the engine frees one that it has not touched. At most 62 MiB stay with the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from harness.private_torch import foreach_copy_, foreach_mul_

cuda: Any = torch.cuda
"""Streams, events and memory pools; a recorder in tests."""
QUEUED = ("cuda",)


_HERE = nullcontext()


def is_queued(device: torch.device) -> bool:
    """True if the host runs ahead of what it gives this device: then a look at a result stops it, and few large
    operations are better than many small ones that stay in a cache."""
    return device.type in QUEUED


class Event:
    """A point on a stream that another stream can wait for; always reached on a CPU."""

    def __init__(self, recorded: Any, device: torch.device) -> None:
        self._recorded, self._device = recorded, device

    def wait(self) -> None:
        """Make the current stream wait for this point (the host does not)."""
        if self._recorded is not None:
            cuda.current_stream(self._device).wait_event(self._recorded)

    @property
    def is_reached(self) -> bool:
        """True if the device has come to this point; asked without waiting, from any thread."""
        return self._recorded is None or bool(self._recorded.query())


class DeviceRuntime:
    """Streams of one device.

    device: where buckets live; "cpu" or a CUDA device. Raises ValueError: another kind of device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device={device} is not supported; use cpu or cuda")
        self.device, self.has_streams = device, is_queued(device)
        self._streams: dict[str, Any] = {}

    def stream(self, name: str, *, waits: bool = True) -> AbstractContextManager[None]:
        """Issue work on the side stream of this name, behind everything the current stream holds so far.

        waits: false where the stream has waited for what the work needs: a wait is work for the host, too.
        """
        return self._on_side_stream(name, waits=waits) if self.has_streams else _HERE

    @contextmanager
    def _on_side_stream(self, name: str, *, waits: bool) -> Iterator[None]:
        if name not in self._streams:
            self._streams[name] = cuda.Stream(self.device, priority=-1)
        side = self._streams[name]
        if waits:
            side.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(side):
            yield

    @property
    def current(self) -> Any:
        """The stream that work is issued on now; None where there are none."""
        return cuda.current_stream(self.device) if self.has_streams else None

    @contextmanager
    def as_on(self, stream: Any) -> Iterator[None]:
        """Issue work on a stream that was `current`, and have the one that is current now wait for it."""
        now = self.current
        if now == stream:
            yield
            return
        with cuda.stream(stream):
            yield
        now.wait_stream(stream)

    def make_pool(self, allocator: Any) -> Any:
        return cuda.MemPool(allocator)

    def allocating_from(self, pool: Any) -> AbstractContextManager[None]:
        """Allocations of this thread on this device come from the pool."""
        return cast(AbstractContextManager[None], cuda.use_mem_pool(pool, self.device))

    def keep_pages(self) -> None:
        """Have the host's allocator keep pages from step to step; see the head of this file."""
        if not self.has_streams:
            torch.UntypedStorage(31 << 20)  # freed at once; at most 32 MiB move glibc's thresholds

    def synchronize(self) -> None:
        """Block the host until the device has done all it was given; nothing to wait for on CPU."""
        if self.has_streams:
            cuda.synchronize(self.device)

    def record(self) -> Event:
        recorded = cuda.current_stream(self.device).record_event() if self.has_streams else None
        return Event(recorded, self.device)


def usual_device(of_parameters: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Where parameters are; those on meta belong on the current CUDA device under NCCL, else on the CPU."""
    if of_parameters.type != "meta":
        return of_parameters
    if "nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# -- several tensors in one operation, with the bits of one for each ---------------------------------------------------


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor], *, follows: bool = True) -> None:
    """Copy each source into its target, unless it lies there. follows: the host waits for what is copied to it."""
    pairs = zip(targets, sources, strict=True)
    apart = [(to, source) for to, source in pairs if not to.numel() or to.data_ptr() != source.data_ptr()]
    if apart:
        foreach_copy_([target for target, _ in apart], [source for _, source in apart], not follows)


def scale_together(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply each by a factor, rounding once. A factor of shape [] on a device to which work is queued stays there:
    it multiplies even where it is 1, and the host does not look at it."""
    if isinstance(factor, Tensor) and tensors and is_queued(factor.device):
        _scale_on_device(tensors, factor)
    elif (factor := float(factor)) != 1.0:
        if len(tensors) > 1 and is_queued(tensors[0].device):
            foreach_mul_(list(tensors), factor)  # which on a CPU would first round the factor to their dtype
        else:
            for tensor in tensors:
                tensor.mul_(factor)


def _scale_on_device(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """One launch for tensors of the factor's own width; 16-bit ones go one by one, for which torch would first round
    the factor to their dtype."""
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        alike = [each for each in tensors if each.dtype == dtype]
        if dtype.itemsize >= torch.float32.itemsize:
            foreach_mul_(alike, factor.to(dtype))
        else:
            wide = factor.to(torch.float32).reshape(1)
            for each in alike:
                torch.mul(each, wide, out=each)
