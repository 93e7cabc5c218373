"""Notes which operation reads and writes which bytes, on which stream, and who has which memory when."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.fsdp.comm import device
from tests.streams.cuda import RecordedCuda
from tests.streams.log import HOST, Allocate, Entry, Free, Keep, Kernel, Log, Phase, Span, Stop
from tests.streams.site import NOWHERE, site

COPIES = ("copy_", "_to_copy", "_foreach_copy_")
"""Operations that may bring data from the host, or to it."""
NOTHING_RUNS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
    "lift_fresh",
    "is_same_size",
}
"""Operations that give work to no device."""
LOOKS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}
"""Operations whose result the host has to know before it goes on."""


class Schema(NamedTuple):
    """Of an operation: its name, and which arguments it writes, by place and by name."""

    name: str
    writes: tuple[bool, ...]
    named: dict[str, bool]


@cache
def schema_of(function: Any) -> Schema:
    written = [
        (each.name, each.kwarg_only, bool(each.alias_info and each.alias_info.is_write))
        for each in function._schema.arguments
    ]
    name = function._schema.name.removeprefix("aten::").removeprefix("c10d::")
    return Schema(name, tuple(w for _, _, w in written), {n: w for n, _, w in written})


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


class Recorder(TorchDispatchMode):
    """Writes a log while it is entered. One at a time in a process, which computes in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.cuda = RecordedCuda(self.put, site)
        self._blocks: dict[int, tuple[int, Any]] = {}
        """By address of a storage: its block, and what tells when it is gone."""
        self._names: dict[int, list[tuple[int, int, str]]] = {}
        """By address of a storage: what lies where in it, whatever memory it has."""
        self.host_functions: set[str] = set()
        """Functions of the program that make new tensors on the host."""
        self._numbers = count()
        self._paused = 0
        self._ends = ExitStack()

    # -- being entered ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self._ends.enter_context(self._patches())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._ends.close()
        self._blocks.clear()

    @contextmanager
    def _patches(self) -> Iterator[None]:
        resize, tensor, tolist, to = torch.UntypedStorage.resize_, torch.tensor, Tensor.tolist, Tensor.to

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            before = storage.nbytes()
            found = resize(storage, num_bytes)
            if not self._paused:
                self._resized(storage, before, num_bytes)
            return found

        def made(data: Any, *args: Any, **given: Any) -> Tensor:
            found = tensor(data, *args, **given)
            if not self._paused:
                self._brought(found, to_device=given.get("device") is not None)
            return found

        def listed(value: Tensor) -> Any:
            if not self._paused:
                self._look([value], "tolist")
            with self.paused():
                return tolist(value)

        def moved(value: Tensor, *args: Any, **given: Any) -> Tensor:
            found = to(value, *args, **given)
            asked = any(isinstance(each, torch.device) for each in (*args, given.get("device")))
            if self._paused or found is not value or not asked or not self._is_on_host(value):
                return found
            with self.paused():  # one kind of device stands for both here
                found = value.clone()
            self._brought(found, to_device=True)
            return found

        with (
            mock.patch.object(Tensor, "to", moved),
            mock.patch.object(torch.UntypedStorage, "resize_", resize_),
            mock.patch.object(torch, "tensor", made),
            mock.patch.object(Tensor, "tolist", listed),
        ):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in the body is nothing a device would do."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    # -- what is written -------------------------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        self.log.entries.append(entry)

    def phase(self, name: str) -> None:
        self.put(Phase(name))

    def name(self, tensor: Tensor, name: str) -> None:
        span = self.span(tensor)
        if span is not None:
            names = self._names.setdefault(tensor.untyped_storage()._cdata, [])
            names.append((span.begin, span.end, name))
            self.log.names[span.block] = names

    def on_host(self, tensor: Tensor) -> None:
        span = self.span(tensor)
        if span is not None:
            self.log.hosts.add(span.block)

    def _is_on_host(self, tensor: Tensor) -> bool:
        held = self._blocks.get(tensor.untyped_storage()._cdata)
        return held is not None and held[0] in self.log.hosts

    def span(self, tensor: Tensor) -> Span | None:
        """Which bytes of which block a tensor may touch; None of an empty one."""
        if not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        block = self._block_of(storage)
        begin = tensor.storage_offset() * tensor.itemsize
        reach = 1 + sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return Span(block, begin, begin + reach * tensor.itemsize)

    def spans(self, tensors: Iterable[Tensor]) -> tuple[Span, ...]:
        return tuple(span for each in tensors if (span := self.span(each)) is not None)

    def _block_of(self, storage: torch.UntypedStorage) -> int:
        """A storage's block; one that was there before is nobody's."""
        held = self._blocks.get(storage._cdata)
        return held[0] if held is not None else self._adopt(storage)

    def _adopt(self, storage: torch.UntypedStorage) -> int:
        key, block = storage._cdata, next(self._numbers)
        self._blocks[key] = block, weakref.ref(storage, lambda _: self._gone(key))
        return block

    def _gone(self, key: int) -> None:
        held = self._blocks.pop(key, None)
        self._names.pop(key, None)
        if held is not None:
            self.put(Free(held[0], NOWHERE))

    def _allocated(self, storage: torch.UntypedStorage) -> int:
        block, line = self._adopt(storage), site()
        of = [(0, storage.nbytes(), f"memory for {line.of}")] if line.of else []
        self.log.names[block] = self._names.get(storage._cdata, of)
        self.put(Allocate(block, self.cuda.current.name, storage.nbytes(), self.cuda.pool, line))
        return block

    def _resized(self, storage: torch.UntypedStorage, before: int, num_bytes: int) -> None:
        if before == num_bytes:
            return
        held = self._blocks.pop(storage._cdata, None)
        if held is not None and before:
            self.put(Free(held[0], site()))
        if num_bytes:
            self._allocated(storage)

    # -- operations ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return function(*args, **kwargs)
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # torch takes it apart, and what it then asks of local tensors comes here again
        schema = schema_of(function)
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for place, value in enumerate(args):
            (writes if schema.writes[place] else reads).extend(tensors_in(value))
        for name, value in kwargs.items():
            (writes if schema.named.get(name) else reads).extend(tensors_in(value))
        touched = self.spans(reads), self.spans(writes)
        result = function(*args, **kwargs)
        if schema.name == "record_stream":
            self.put(Keep(touched[1][0].block, args[1].name, site()))
            return result
        made = self._results(result, [*touched[0], *touched[1]])
        if schema.name in NOTHING_RUNS or not (made or writes or schema.name in LOOKS):
            return result
        self._ran(
            schema.name, reads, writes, touched[0], (*touched[1], *made), follows=_follows(schema.name, args, kwargs)
        )
        return result

    def _results(self, result: Any, touched: Sequence[Span]) -> list[Span]:
        """Of results, those in memory that nobody had before: on the host where all that was read is."""
        found = []
        for each in tensors_in(result):
            storage = each.untyped_storage()
            if storage.nbytes() and storage._cdata not in self._blocks:
                if self._is_made_on_host(touched):
                    self.log.hosts.add(self._adopt(storage))
                else:
                    self._allocated(storage)
                found += self.spans([each])
        return found

    def _is_made_on_host(self, touched: Sequence[Span]) -> bool:
        """Whether a result lies where all that was read does, or its maker works for the host."""
        if not touched:
            return site().function in self.host_functions
        return all(span.block in self.log.hosts for span in touched)

    def _ran(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        read: tuple[Span, ...],
        wrote: tuple[Span, ...],
        *,
        follows: bool,
    ) -> None:
        line, hosts = site(), self.log.hosts
        blocks = {span.block for span in (*read, *wrote)}
        size = max((each.numel() for each in (*reads, *writes)), default=0)
        stream, crosses = self.cuda.current.name, bool(blocks & hosts) and not blocks <= hosts
        if blocks and blocks <= hosts:
            stream = HOST
        elif crosses and name not in COPIES:
            if any(span.block in hosts for span in wrote):  # the host computes, with numbers nobody had placed
                hosts |= blocks
                stream = HOST
            else:  # it reads a number and hands it over
                read = tuple(span for span in read if span.block not in hosts)
            crosses = False
        self.put(Kernel(name, stream, read, wrote, line, size))
        if stream != HOST and ((crosses and follows) or name in LOOKS):
            self.put(Stop(stream, line, "a copy from or to the host" if crosses else name))

    def _look(self, tensors: Sequence[Tensor], why: str) -> None:
        read, line = self.spans(tensors), site()
        if read and not {span.block for span in read} <= self.log.hosts:
            self.put(Kernel(why, self.cuda.current.name, read, (), line, sum(t.numel() for t in tensors)))
            self.put(Stop(self.cuda.current.name, line, why))

    def _brought(self, made: Tensor, *, to_device: bool) -> None:
        """The program has made a tensor of its own numbers."""
        if not made.numel():
            return
        if not to_device:
            self.on_host(made)
            return
        self._gone_quietly(made)
        self._allocated(made.untyped_storage())
        self.put(Kernel("copy from the host", self.cuda.current.name, (), self.spans([made]), site()))
        self.put(Stop(self.cuda.current.name, site(), "a tensor made of numbers"))

    def _gone_quietly(self, made: Tensor) -> None:
        """Forget a block that torch made on the way."""
        held = self._blocks.pop(made.untyped_storage()._cdata, None)
        if held is not None:
            self.put(Free(held[0], NOWHERE))


def _follows(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for a copy that crosses to or from it."""
    given = args[2] if name in COPIES and len(args) > 2 else kwargs.get("non_blocking")
    return not given


@contextmanager
def recording() -> Iterator[Recorder]:
    """The engine believes in streams, and everything this process computes is written down."""
    from tests.streams.group import listens

    recorder = Recorder()
    end: Callable[[], None] = listens(recorder)
    try:
        with believing_in(recorder.cuda), recorder:
            yield recorder
    finally:
        end()


@contextmanager
def believing_in(cuda: Any) -> Iterator[None]:
    """The engine takes the CPU for a device with streams, which are those of `cuda`."""
    with (
        mock.patch.object(device, "cuda", cuda),
        mock.patch.object(device, "QUEUED", ("cpu",)),
        mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor),  # no CPU build of torch pins
    ):
        yield
