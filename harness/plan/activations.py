"""Memory that a forward and a backward of the model keep, recorded once on the meta device.

Every storage that an operation makes is followed until autograd and the model have let go of it; weights, buffers and
the batch are left out. Marks stand where the engine's hooks run, so that its own buffers can be put beside the record
(`harness.plan.peak`). A gradient of a weight is let go at its mark, where the engine copies it into a bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config.schema import Config, Device, ModelFamily
from harness.fsdp.runtime.units import Unit
from harness.fsdp.tensor_parallel import gradient_here, values_here
from harness.plan.model import Model
from harness.plan.wire import Rows
from harness.private_torch import tree_leaves
from harness.probe.collectives import CollectiveMeter, by_kind

NOWHERE = -1
SAME = (torch.ops._c10d_functional.wait_tensor.default, torch.ops._c10d_functional._wrap_tensor_autograd.default)
"""Give what they were given, of which the meta device makes another tensor."""
CONVOLUTIONS = {
    torch.ops.aten.convolution.default: slice(0, 2),
    torch.ops.aten.convolution_backward.default: slice(2, 3),
}
"""Operands of which oneDNN has copies in an order of its own, beside the result."""


class Mark(NamedTuple):
    """what: forward, left (it), loss, backward, gradient, done (all of a unit's are in) or end. unit: its place. given:
    bytes of the gradient. live: bytes alive here; most: before the next mark."""

    what: str
    unit: int
    given: int
    live: int
    most: int


@dataclass(frozen=True)
class Recorded:
    """marks: of one microbatch. tensor_parallel: its traffic over that axis. failure: why there are none."""

    marks: tuple[Mark, ...] = ()
    tensor_parallel: Rows = field(default_factory=Rows)
    failure: str = ""


class Recorder(TorchDispatchMode):
    """routed: rows that an expert is taken to have: a route depends on data, and there is none. None: no model here."""

    def __init__(self, known: set[int], routed: int | None, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self.live = self.most = 0
        self.marks: list[Mark] = []
        self._now = "begin", NOWHERE, 0, 0
        self._routed, self._known = routed, known
        self._copied = CONVOLUTIONS if device is Device.cpu else {}
        self._followed: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if func is torch.ops.aten.nonzero.default and self._routed is not None:
            made = args[0].new_empty((self._routed, args[0].dim()), dtype=torch.int64)
        elif func in SAME:
            made = args[0]
        else:
            made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self._follow(each)
        if func in self._copied:
            self.most = max(self.most, self.live + sum(each.nbytes for each in args[self._copied[func]]))
        return made

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._known or place in self._followed or tensor.device.type != "meta":
            return
        size = storage.nbytes()
        self._followed[place] = weakref.ref(storage, partial(self._freed, place, size))
        self.live += size
        self.most = max(self.most, self.live)

    def _freed(self, place: int, size: int, _: Any) -> None:
        if self._followed.pop(place, None) is not None:
            self.live -= size

    def mark(self, what: str, unit: int = NOWHERE, given: int = 0) -> None:
        self.marks.append(Mark(*self._now, self.most))
        self._now, self.most = (what, unit, given, self.live), self.live


@contextmanager
def kernels(device: Device) -> Iterator[None]:
    """Attention by the kernel that a device has, and the meta device has not: none keeps a score of each pair.

    Autocast is off, of which the meta device knows nothing.
    """
    aten, original, asked = torch.ops.aten, F.scaled_dot_product_attention, torch.is_autocast_enabled

    def flash(query: Tensor, key: Tensor, value: Tensor, *given: Any, **options: Any) -> Tensor:
        if given or not options.keys() <= {"is_causal", "enable_gqa"}:  # a mask, dropout, a scale
            return original(query, key, value, *given, **options)
        on_device = aten._scaled_dot_product_flash_attention
        kernel = on_device if device is Device.cuda else aten._scaled_dot_product_flash_attention_for_cpu
        found: Tensor = kernel(query, key, value, 0.0, options.get("is_causal", False))[0]
        return found

    F.scaled_dot_product_attention = flash
    torch.is_autocast_enabled = lambda *_: False
    try:
        yield
    finally:
        F.scaled_dot_product_attention, torch.is_autocast_enabled = original, asked


def record(model: Model) -> Recorded:
    """One microbatch on the meta device; or why a model that looks at its data has no record."""
    try:
        return _record(model)
    except Exception as error:  # whatever a model of the user's does
        if model.config.model.family in (ModelFamily.llama, ModelFamily.moe):
            raise
        return Recorded(failure=f"{type(error).__name__}: {error}".splitlines()[0])


def _record(model: Model) -> Recorded:
    config, module = model.config, model.module
    shape = config.train.microbatch_size, config.data.seq_len
    batch = tuple(torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))
    held = [bucket.compute for bucket in model.buckets]
    held += [values_here(each) for each in (*module.buffers(), *batch)]
    held += [scales.inverse for bucket in model.buckets if bucket.codec for _, scales in bucket.codec.weights]
    recorder = Recorder({each.untyped_storage()._cdata for each in held}, _routed(config), config.cluster.device)
    with ExitStack() as hooks, kernels(config.cluster.device), recorder:
        meter = CollectiveMeter()
        hooks.callback(meter.close)
        for place, unit in enumerate(model.units):
            _watch(recorder, place, unit, hooks, waits=config.cluster.device is Device.cuda)
        loss = model.workload.loss(module, (batch[0], batch[1]))
        recorder.mark("loss")
        loss.backward()
        del loss
        recorder.mark("end")
        recorder.mark("end")
        rows = Rows()
        for kind, each in by_kind(meter.take()).items():
            rows.sent("tp", kind, each["bytes"], each["count"])
    return Recorded(tuple(recorder.marks), rows)


def _watch(recorder: Recorder, place: int, unit: Unit, hooks: ExitStack, *, waits: bool) -> None:
    """waits: gradients come in the dtype of their weight, and are copied together when the unit's are in."""
    trained = unit.readiness.params
    left = list(trained)

    def before(module: nn.Module, args: Any) -> None:
        recorder.mark("forward", place)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        recorder.mark("left", place)
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda _: recorder.mark("backward", place))

    def arrived(param: nn.Parameter) -> None:
        assert param.grad is not None
        recorder.mark("gradient", place, gradient_here(param, param.grad).nbytes)
        param.grad = None
        left.pop()
        if not left:
            recorder.mark("done", place)

    handles = [unit.module.register_forward_pre_hook(before), unit.module.register_forward_hook(after)]
    handles += [param.register_post_accumulate_grad_hook(arrived) for param in trained]
    for gradients in unit.gradients:
        gradients.expect(waits=waits and not unit.is_root)
    for handle in handles:
        hooks.callback(handle.remove)


def _routed(config: Config) -> int | None:
    if config.model.family is not ModelFamily.moe:
        return None
    tokens = config.train.microbatch_size * config.data.seq_len
    return -(-tokens * config.model.experts_per_token // config.model.num_experts)
