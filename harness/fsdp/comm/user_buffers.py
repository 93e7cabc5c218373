"""NCCL user buffers: buckets that collectives read and write without a copy of NCCL's own.

Buckets are allocated inside a pool over the process group's own allocator (ncclMemAlloc), and the pool is registered
with every communicator that moves them, the outer one last. From then on torch registers segments that the pool adds by
itself: a symmetric registration is a meeting of all ranks, so buffers must come in one order on all of them, which
fixed buffers do. What lies in the pool stays there after `close`.

After each communicator the ranks agree over all of them: if any failed, every rank raises. Where there is nothing to
register with, facts give the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.options import Registration


class UserBuffers:
    """A pool for buckets, registered with every communicator that moves them, or the reason why it is not. Raises
    RuntimeError: a rank could not make the pool.

    Args:
        mode: when to register.
        members: communicators by name in order of registration, the outer one last; none where nothing moves.
        runtime: the buckets' device.
        symmetric: as symmetric windows; false registers for zero copy alone.
    """

    def __init__(
        self,
        mode: Registration,
        members: Mapping[str, Communicator],
        runtime: DeviceRuntime,
        *,
        symmetric: bool = True,
    ) -> None:
        self.mode, self._members, self._runtime, self._symmetric = mode, members, runtime, symmetric
        self._registered: list[Communicator] = []
        self._pool: Any = None
        self._closed = False
        # why nothing is registered
        self._reason = "" if mode is Registration.none else _why_unable(members, runtime)
        if mode is not Registration.none and not self._reason:
            allocator = next(iter(members.values())).backend.mem_allocator
            self._pool = self._on_all_ranks(partial(runtime.make_pool, allocator), "no memory pool of NCCL's")

    @property
    def active(self) -> bool:
        return self._pool is not None and not self._closed

    @property
    def due(self) -> bool:
        """True if a registration waits for the end of the first step; nothing may be in flight when it is made."""
        return self.active and self.mode is Registration.manual and not self._registered

    def allocating(self) -> AbstractContextManager[None]:
        return self._runtime.allocating_from(self._pool) if self.active else nullcontext()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in the pool, uninitialised; outside it where nothing is registered."""
        with self.allocating():
            return torch.empty(numel, dtype=dtype, device=self._runtime.device)

    def model_built(self) -> None:
        """The buckets that stay exist now: register, unless that waits for the first step. *Collective.* Raises
        RuntimeError: a rank could not."""
        if self.active and self.mode is Registration.auto:
            self.register()

    def facts(self) -> dict[str, str]:
        """requested, effective (none, pending, or what is registered how, with whom), reason where these differ."""
        kind = "symmetric" if self._symmetric else "zero-copy"
        effective = f"{self.mode.value}, {kind}, {'+'.join(self._members)}" if self._pool is not None else "none"
        reason = {"reason": self._reason} if self._reason else {}
        return {"requested": self.mode.value, "effective": "pending" if self.due else effective} | reason

    def close(self) -> None:
        """Take all registrations back, the last one first. Repeatable; buckets keep their memory."""
        if self._registered:
            self._runtime.synchronize()  # no collective of this rank may still touch what is taken back
        while self._registered:
            self._registered.pop().backend.deregister_mem_pool(self._pool)
        self._closed = True

    def register(self) -> None:
        """Register the pool with every communicator that moves buckets. *Collective.* Raises RuntimeError: a rank could
        not."""
        self._runtime.synchronize()
        # a meeting of all ranks, and communicators that were lazy exist now: torch asks for both
        self._on_all_ranks(lambda: None, "a meeting before it")
        for name, member in self._members.items():
            register = partial(member.backend.register_mem_pool, self._pool, symm=self._symmetric)
            self._on_all_ranks(register, f"registration with {name}")
            self._registered.append(member)

    def _on_all_ranks(self, action: Callable[[], Any], what: str) -> Any:
        made, error = None, ""
        try:
            made = action()
        except RuntimeError as caught:
            error = _words(caught)
        has_succeeded = not error
        for member in self._members.values():  # over one after the other, which reaches a whole grid
            has_succeeded = member.all_succeeded(has_succeeded)
        if not has_succeeded:
            raise RuntimeError(
                f"nccl_ub={self.mode.value} failed: {what}: {error or 'it failed on another rank'}. Valid:"
                " nccl_ub=none, or disable_symmetric_registration=True (nccl_ub.symmetric=false) where only symmetric"
                " windows fail"
            )
        return made


def _why_unable(members: Mapping[str, Communicator], runtime: DeviceRuntime) -> str:
    if not runtime.has_streams:
        return "buckets are on the CPU, where there is no NCCL"
    for name, member in members.items():
        if not hasattr(member.backend, "register_mem_pool"):
            return f"the backend registers no memory: {name} ({type(member.backend).__name__})"
        try:
            _ = member.backend.mem_allocator
        except RuntimeError as error:  # of an NCCL without one, on all ranks alike
            return f"the backend has no memory of its own: {_words(error)}"
    return "" if members else "one rank moves nothing"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
