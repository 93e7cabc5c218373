"""NCCL user buffers: buckets that collectives read and write without a copy of NCCL's own.

Buckets are allocated inside a pool over the process group's own allocator (ncclMemAlloc), and the pool is registered
with every communicator that moves them, the outer one last. From then on torch registers segments that the pool adds by
itself: a symmetric registration is a meeting of all ranks, so buffers must come in one order on all of them, which
fixed buffers do. What lies in the pool stays there after `close`.

A registration that fails on one rank while others use theirs is a hang at best. After each communicator the ranks agree
over all of them: if any failed, every rank takes back what it registered, and all of them raise, or all of them go on
without and their facts give the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.events import CONTROL
from harness.fsdp.vocabulary import Registration
from harness.private_torch import backend_of


class Member:
    """One communicator that moves the buckets, and how its ranks agree.

    Args:
        name: used in messages: "dp", "dp_outer".
        group: its process group.
        device: where flags for agreement are made.
        backend: what is registered with; None is the group's own backend for this device.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device, backend: Any = None) -> None:
        self.name, self.group, self.device = name, group, device
        self.backend = backend_of(group, device) if backend is None else backend

    def all_succeeded(self, mine: bool) -> bool:
        """True if every rank of this communicator says so. *Collective*; makes a lazy communicator exist."""
        flag = torch.tensor([int(mine)], dtype=torch.int32, device=self.device)
        with events.resume(CONTROL), events.waiting():  # no traffic of the step's
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
            return bool(flag.item())


class UserBuffers:
    """A pool for buckets, registered with every communicator that moves them, or the reason why it is not. Raises
    RuntimeError: the pool could not be made, on any rank, and `may_fall_back` is false.

    Args:
        mode: when to register.
        members: communicators in order of registration, the outer one last; none where there is nothing to move.
        runtime: the buckets' device.
        symmetric: as symmetric windows; false registers for zero copy alone.
        may_fall_back: a failed registration goes on without user buffers, and the facts say why; false raises.
    """

    def __init__(
        self,
        mode: Registration,
        members: Sequence[Member],
        runtime: DeviceRuntime,
        *,
        symmetric: bool = True,
        may_fall_back: bool = False,
    ) -> None:
        self.mode, self.may_fall_back = mode, may_fall_back
        self._members, self._runtime, self._symmetric = list(members), runtime, symmetric
        self._registered: list[Member] = []
        self._pool: Any = None
        self._closed = False
        # why nothing is registered
        self._reason = "" if mode is Registration.none else _why_unable(self._members, runtime)
        if mode is not Registration.none and not self._reason:
            self._make_pool()

    @property
    def active(self) -> bool:
        return self._pool is not None and not self._reason and not self._closed

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
        RuntimeError: a rank could not, and `may_fall_back` is false."""
        if self.active and self.mode is Registration.auto:
            self.register()

    def facts(self) -> dict[str, str]:
        """requested, effective (none, pending, or what is registered how, with whom), reason where these differ."""
        facts = {"requested": self.mode.value, "effective": self._effective()}
        return facts | ({"reason": self._reason} if self._reason else {})

    def close(self) -> None:
        """Take all registrations back, the last one first. Repeatable; buckets keep their memory."""
        if self._registered:
            self._runtime.synchronize()  # no collective of this rank may still touch what is taken back
        while self._registered:
            self._registered.pop().backend.deregister_mem_pool(self._pool)
        self._closed = True

    # -- inside --------------------------------------------------------------------------------------------------

    def _effective(self) -> str:
        if self._pool is None or self._reason:
            return "none"
        if self.due:
            return "pending"
        kind = "symmetric" if self._symmetric else "zero-copy"
        return f"{self.mode.value}, {kind}, {'+'.join(member.name for member in self._members)}"

    def _make_pool(self) -> None:
        pool, error = None, ""
        try:
            pool = self._runtime.make_pool(self._members[0].backend.mem_allocator)
        except RuntimeError as caught:
            error = _words(caught)
        if self._agree(not error):
            self._pool = pool
        else:
            self._fail(f"no memory pool of NCCL's: {error or 'another rank could not make one'}")

    def register(self) -> None:
        """Register the pool with every communicator that moves buckets, or with none. *Collective.* Raises
        RuntimeError: a rank could not, and `may_fall_back` is false."""
        self._runtime.synchronize()
        self._agree(True)  # a meeting of all ranks, and communicators that were lazy exist now: torch asks for both
        for member in self._members:
            error = self._register_with(member)
            if not self._agree(not error):
                self._take_back(member)
                self._fail(f"registration with {member.name}: {error or 'it failed on another rank'}")
                return

    def _register_with(self, member: Member) -> str:
        try:
            member.backend.register_mem_pool(self._pool, symm=self._symmetric)
        except RuntimeError as error:
            return _words(error)
        self._registered.append(member)
        return ""

    def _take_back(self, failed: Member) -> None:
        if failed not in self._registered:
            # torch lists a pool before it registers its segments: unlisted, or its next segment would try again.
            # Of those that were never registered it complains, which is no news.
            with suppress(RuntimeError):
                failed.backend.deregister_mem_pool(self._pool)
        while self._registered:
            self._registered.pop().backend.deregister_mem_pool(self._pool)

    def _agree(self, mine: bool) -> bool:
        """True if all ranks of all communicators succeeded: over one after the other, which reaches a whole grid."""
        for member in self._members:
            mine = member.all_succeeded(mine)
        return mine

    def _fail(self, reason: str) -> None:
        self._reason = reason
        if not self.may_fall_back:
            raise RuntimeError(
                f"nccl_ub={self.mode.value} failed: {reason}. Valid: nccl_ub=none, or a recorded fallback"
                " (nccl_ub.fallback=record; registration_fallback='record'), or disable_symmetric_registration=True"
                " (nccl_ub.symmetric=false) where only symmetric windows fail"
            )


def _why_unable(members: Sequence[Member], runtime: DeviceRuntime) -> str:
    if not runtime.has_streams:
        return "buckets are on the CPU, where there is no NCCL"
    if not members:
        return "one rank moves nothing"
    lacking = [member for member in members if not hasattr(member.backend, "register_mem_pool")]
    if lacking:
        names = ", ".join(f"{member.name} ({type(member.backend).__name__})" for member in lacking)
        return f"the backend registers no memory: {names}"
    return ""


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
