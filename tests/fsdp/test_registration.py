"""NCCL user buffers against pretended backends: order, timing, agreement, taking back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.fsdp import fully_shard
from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.user_buffers import UserBuffers
from harness.fsdp.options import Registration, Transport
from harness.fsdp.storage.memory import BucketMemory
from tests.support.mutants import each_found_by
from tests.support.spawn import run_ranks

CPU = torch.device("cpu")


class Runtime:
    """A device that notes what is asked of it."""

    def __init__(self, log: list[str], *, pool_fails: bool = False) -> None:
        self.log = log
        self.has_streams = True
        self.pool_fails = pool_fails

    def make_pool(self, allocator: Any) -> Any:
        if self.pool_fails:
            raise RuntimeError("no memory for a pool\nsecond line")
        self.log.append(f"pool of {allocator}")
        return "pool"

    @contextmanager
    def allocating_from(self, pool: Any) -> Iterator[None]:
        self.log.append(f"into {pool}")
        yield
        self.log.append(f"out of {pool}")

    def synchronize(self) -> None:
        self.log.append("synchronize")


class Backend:
    """A backend of torch 2.9 and later."""

    mem_allocator = "ncclMemAlloc"

    def __init__(self, name: str, log: list[str], *, fails: bool = False) -> None:
        self.name, self.log, self.fails = name, log, fails

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        self.log.append(f"{self.name} registers {pool} symm={symm}")
        if self.fails:
            raise RuntimeError("ncclCommWindowRegister: unhandled cuda error")

    def deregister_mem_pool(self, pool: Any) -> None:
        self.log.append(f"{self.name} takes back {pool}")
        if self.fails:
            raise RuntimeError("segment was not registered")


class Solo(Communicator):
    """Its other ranks always succeed, or never do."""

    def __init__(self, name: str, backend: Any, log: list[str]) -> None:
        self.name, self.backend, self.log, self.others = name, backend, log, True

    def all_succeeded(self, mine: bool) -> bool:
        self.log.append(f"{self.name} agrees on {mine}")
        return mine and self.others


def make(log: list[str], mode: str = "auto", failing: str = "", **settings: Any) -> UserBuffers:
    runtime = settings.pop("runtime", None) or Runtime(log)
    made = [Backend(name, log, fails=name == failing) for name in ("dp", "dp_outer")]
    members = {backend.name: Solo(backend.name, backend, log) for backend in made}
    return UserBuffers(Registration.parse(mode, "nccl_ub"), members, runtime, **settings)


MEETING = ["dp agrees on True", "dp_outer agrees on True"]
MADE = ["pool of ncclMemAlloc", *MEETING]
REGISTERED = [
    "synchronize",
    *MEETING,  # before the first registration, and after each
    "dp registers pool symm=True",
    *MEETING,
    "dp_outer registers pool symm=True",
    *MEETING,
]


def test_auto_registers_in_order_once_the_model_is_built_and_takes_back_in_reverse() -> None:
    log: list[str] = []
    buffers = make(log)
    with buffers.allocating():
        log.append("allocate")
    buffers.model_built()
    assert not buffers.due
    buffers.close()
    buffers.close()
    used, taken_back = ["into pool", "allocate", "out of pool"], ["dp_outer takes back pool", "dp takes back pool"]
    assert log == [*MADE, *used, *REGISTERED, "synchronize", *taken_back]


def test_manual_registers_after_the_first_step_and_only_then() -> None:
    log: list[str] = []
    buffers = make(log, "manual")
    buffers.model_built()
    assert buffers.due
    assert (buffers.facts(), log) == ({"requested": "manual", "effective": "pending"}, MADE)
    buffers.register()
    assert not buffers.due
    assert log == [*MADE, *REGISTERED]
    assert buffers.facts() == {"requested": "manual", "effective": "manual, symmetric, dp+dp_outer"}


def test_none_touches_nothing() -> None:
    log: list[str] = []
    buffers = make(log, "none")
    with buffers.allocating():
        pass
    buffers.model_built()
    buffers.close()
    assert (buffers.due, log, buffers.facts()) == (False, [], {"requested": "none", "effective": "none"})


def test_registered_without_symmetric_windows_where_asked() -> None:
    log: list[str] = []
    buffers = make(log, symmetric=False)
    buffers.model_built()
    assert [line.rsplit(" ", 1)[1] for line in log if "registers" in line] == ["symm=False"] * 2
    assert buffers.facts() == {"requested": "auto", "effective": "auto, zero-copy, dp+dp_outer"}


def test_a_failed_registration_ends_the_run_with_the_ways_out() -> None:
    log: list[str] = []
    buffers = make(log, failing="dp")
    with pytest.raises(RuntimeError, match=r"dp: .*ncclCommWindowRegister.*nccl_ub=none.*nccl_ub\.symmetric=false"):
        buffers.model_built()
    assert "dp_outer registers pool symm=True" not in log  # nobody goes on to the next communicator


def test_a_failure_elsewhere_is_one_here() -> None:
    member = Solo("dp", Backend("dp", []), [])
    buffers = UserBuffers(Registration.auto, {"dp": member}, Runtime([]))
    member.others = False
    with pytest.raises(RuntimeError, match="failed on another rank"):
        buffers.model_built()


def test_a_pool_that_cannot_be_made_is_a_failure_like_any_other() -> None:
    with pytest.raises(RuntimeError, match="no memory pool of NCCL's: RuntimeError: no memory for a pool"):
        make([], runtime=Runtime([], pool_fails=True))


class OldNccl(Backend):
    @property
    def mem_allocator(self) -> Any:  # type: ignore[override] # torch's is a property, too
        raise RuntimeError("NCCL mem allocator is not supported in this NCCL version")


@pytest.mark.parametrize(
    ("backends", "reason"),
    [
        ({"dp": object()}, "the backend registers no memory: dp (object)"),
        (
            {"dp": OldNccl("dp", [])},
            "the backend has no memory of its own: RuntimeError: NCCL mem allocator is not supported",
        ),
        ({}, "one rank moves nothing"),
    ],
)
def test_a_backend_that_cannot_register_is_no_error(backends: dict[str, Any], reason: str) -> None:
    buffers = UserBuffers(
        Registration.auto, {name: Solo(name, each, []) for name, each in backends.items()}, Runtime([])
    )
    buffers.model_built()
    facts = buffers.facts()
    assert facts.pop("reason").startswith(reason)
    assert facts == {"requested": "auto", "effective": "none"}


def test_every_allocation_of_a_bucket_is_surrounded() -> None:
    log: list[str] = []

    @contextmanager
    def allocating() -> Iterator[None]:
        log.append("in")
        yield
        log.append("out")

    memory = BucketMemory(CPU, allocating=allocating)
    bucket = memory.take(8, torch.float32)
    assert log == ["in", "out"]
    memory.give_back(bucket)
    assert memory.take(8, torch.float32) is bucket
    assert log == ["in", "out"]  # the spare one was registered when it was allocated
    memory.free(bucket)
    memory.refill(bucket)
    assert log == ["in", "out"] * 2


# -- over real ranks -------------------------------------------------------------------------------------------------


def _one_rank_fails(rank: int, failing: int, outer: int) -> tuple[list[str], str]:
    """Two axes over four ranks; one rank's backend fails on one axis."""
    groups = {
        "dp": dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0],
        "dp_outer": dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0],
    }
    log: list[str] = []
    members = {name: Communicator(group, DeviceRuntime(CPU), Transport.backend) for name, group in groups.items()}
    for name, member in members.items():
        member.backend = Backend(name, log, fails=rank == failing and name == ("dp", "dp_outer")[outer])
    buffers = UserBuffers(Registration.auto, members, Runtime(log))
    with pytest.raises(RuntimeError) as caught:
        buffers.model_built()
    buffers.close()
    return log, str(caught.value)


@pytest.mark.parametrize("outer", [0, 1])
def test_one_rank_that_fails_is_known_to_all_ranks_of_both_axes(outer: int) -> None:
    for rank, (log, told) in enumerate(run_ranks(_one_rank_fails, 4, 3, outer)):
        assert ("another rank" in told) == (rank != 3)
        assert any("dp_outer registers" in line for line in log) == bool(outer)


def test_gloo_trains_on_and_says_why(group_of_one: Any) -> None:
    module = nn.Linear(6, 2)
    model, optimizer = fully_shard(
        module, torch.optim.SGD(module.parameters()), nccl_ub=True, disable_symmetric_registration=True
    )
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    reason = "buckets are on the CPU, where there is no NCCL"
    assert model.engine.user_buffers.facts() == {"requested": "auto", "effective": "none", "reason": reason}
    model.close()


def _watched(rank: int) -> list[str]:
    """A model on CPU whose runtime and backend pretend to be NCCL's, to see when the model calls what."""
    log: list[str] = []
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model = fully_shard(module, unit_modules=[nn.Linear], nccl_ub="none")
    buffers = UserBuffers(Registration.manual, {"dp": Solo("dp", Backend("dp", log), log)}, Runtime(log))
    model.engine.user_buffers = buffers
    model.engine.weights.user_buffers = buffers
    model.engine.memory.allocating = buffers.allocating
    for _ in range(2):
        model(torch.ones(4, 6)).sum().backward()
        model.finish_grad_sync()
        log.append("step")
        model.install_weights()
        model.zero_grad()
    model.close()
    return log


def test_the_model_registers_after_its_first_step_allocates_in_the_pool_and_takes_back_at_close() -> None:
    for log in run_ranks(_watched, 2):
        assert log.index("into pool") < log.index("step") < log.index("dp registers pool symm=True")
        assert sum("registers" in line for line in log) == 1
        assert log[-1] == "dp takes back pool"


test_a_mutant_is_found = each_found_by(
    "The engine, by user buffers",
    """
    first one first: Registrations are taken back in the order in which they were made
        fsdp.comm.user_buffers.UserBuffers.close: self._registered.pop() => self._registered.pop(0)
    in flight: Buffers are taken back while a collective may use them
        fsdp.comm.user_buffers.UserBuffers.close: self._runtime.synchronize() => pass
    due for ever: Buffers are registered after each step
        fsdp.comm.user_buffers.UserBuffers.due: manual and not self._registered => manual
    before the first step: Buffers that wait for the first step are registered at once
        fsdp.comm.user_buffers.UserBuffers.model_built: self.active and self.mode is Registration.auto => self.active
    windows for all: Who asks for zero copy alone gets symmetric windows
        fsdp.comm.user_buffers.UserBuffers.register: symm=self._symmetric => symm=True
    no meeting: Ranks register before all have come
        fsdp.comm.user_buffers.UserBuffers.register: self._on_all_ranks(lambda: None, "a meeting before it") => pass
    own failures alone: A rank goes on where another one could not register
        fsdp.comm.user_buffers.UserBuffers._on_all_ranks: if not has_succeeded: => if error:
    a pool for nobody: A pool is made where nothing is to be registered
        fsdp.comm.user_buffers.UserBuffers.__init__: if mode is not Registration.none and not => if not
    """,
    test_auto_registers_in_order_once_the_model_is_built_and_takes_back_in_reverse,
    test_manual_registers_after_the_first_step_and_only_then,
    test_none_touches_nothing,
    test_a_failure_elsewhere_is_one_here,
    test_registered_without_symmetric_windows_where_asked,
)
