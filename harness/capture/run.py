"""A watched run of a training loop: one object on each rank, which never changes, slows or ends what it watches."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.capture import describe, merge
from harness.capture.parts import Part, folder_of
from harness.capture.shards import Parts, models_of
from harness.capture.watching import Watching
from harness.probe.hooks import Nothing
from harness.probe.step_checks.cadence import Cadence
from harness.probe.traffic import Traffic, by_kind
from harness.store.files import Lock
from harness.store.status import OWNER_LOCK

LOG = logging.getLogger("harness.capture")

MIB = 1 << 20
ROWS_BYTES = 256 * MIB
"""Sketches of a rank on disk, beyond which every second step is looked at that was before; and so on."""
PARTS_OF_A_STEP = 6
"""Gradients and their local sums, weights before and after, two moments."""


def watch(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Any,
    path: str | Path,
    *,
    steps: Sequence[int] | None = None,
    limit_mib: int = 1024,
    keep_last: int = 0,
    share: float = 0.02,
    done: int = 0,
    parts: Parts | None = None,
) -> Run:
    """Record a training loop into a run directory of its own. Call it on every rank, after the model is sharded.

    It raises nothing: where it cannot record, it warns once, the run is incomplete, and training goes on.

    Args: model: one module, or several (pipeline stages). optimizer: one, several, or None. path: a new folder, shared
    by all ranks. steps: those whose whole tensors are kept; None: 1, 10, 100, ... while `limit_mib` MiB hold them.
    keep_last: of these steps the first one's tensors and those of the last so many stay on disk; 0: of all.
    share: of the loop's processor time that looking at tensors may take, beyond a second: steps are then looked at in
    pairs, in every 4, 8, 16, ... of them; losses and data are recorded in all. done: steps before this process, whose
    model and optimizer go on from a checkpoint: the record that `path` holds of them goes on as well. parts: what
    parameters are made of, where their names and shapes do not say it (packed, stacked, cut by hand).
    """
    run = Run(Path(path), limit_mib * MIB, steps, share, done, keep_last)
    run.guard(run.start)(model, optimizer, parts)
    return run


class Guarded:
    """Work of a run without its errors, and without a graph; nothing once one has failed.

    In a model that is copied or pickled, a hook is nothing.
    """

    def __init__(self, run: Run, work: Callable[..., Any]) -> None:
        self._run, self._work = run, work

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._run.problem:
            return None
        try:
            with torch.no_grad(), self._run.cadence.looking():
                return self._work(*args, **keywords)
        except Exception as error:
            self._run.give_up(f"step {self._run.steps + 1}: {type(error).__name__}: {error}")
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return Nothing, ()


class Run:
    def __init__(
        self, path: Path, limit_bytes: int, steps: Sequence[int] | None, share: float, done: int, keep_last: int
    ) -> None:
        self.path, self.limit_bytes, self.chosen, self._share = path, limit_bytes, steps, share
        self._keep_last = keep_last
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_distributed else 0
        self.world_size = dist.get_world_size() if is_distributed else 1
        self.steps = self.done = done
        self.cadence = self._cadence()
        """Each rank's own: ranks exchange nothing, and steps of a wide cadence are steps of a narrow one."""
        self.problem = ""
        """Why the record is incomplete; empty while it is whole."""
        self._watching: Watching | None = None
        self._part: Part | None = None
        self._lock: Lock | None = None
        self._traffic: Traffic | None = None
        self._is_closed = False
        self._earlier = _last_error()
        self._kept_bytes, self._rows_bytes = 0, ROWS_BYTES
        self._losses: list[float] = []
        self._rows: list[str] = []
        self._tokens = 0
        self._last = time.perf_counter()

    def _cadence(self) -> Cadence:
        return Cadence(self._share, self.done, (), int, on_device=torch.cuda.is_initialized())

    def guard(self, work: Callable[..., Any]) -> Callable[..., Any]:
        return Guarded(self, work)

    def give_up(self, problem: str) -> None:
        self.problem = problem
        LOG.warning("%s is incomplete, training goes on: %s", self.path, problem)
        self._let_go()

    def _let_go(self) -> None:
        for each in (self._watching, self._traffic):
            if each is not None:
                each.close()

    def start(self, model: nn.Module | Iterable[nn.Module], optimizer: Any, parts: Parts | None) -> None:
        folder = folder_of(self.path, self.rank)
        self._is_closed = True  # what lies there is another's
        if self.done:
            merge.cut(folder, self.done)
        elif folder.exists() or (self.path / "summary.json").exists():
            other = "name another folder, remove it, or go on with it behind N steps (done=N)"
            raise FileExistsError(f"{self.path} holds a run already: {other}")
        self._is_closed = False
        self._part = Part(self.path, self.rank, self._keep_last)
        models = models_of(model)
        self._watching = Watching(models, optimizer, parts, self.guard)
        with contextlib.suppress(RuntimeError):  # of several runs in one process the first counts
            self._traffic = Traffic()
        self._begin_step()
        if self.rank == 0:
            self._lock = Lock.acquire(self.path / OWNER_LOCK)
            describe.begin(self.path, models)
        atexit.register(self.close)

    def step(self, loss: Any = None, data: Any = None) -> None:
        """End a step, after the optimizer's; before it, the call adds a microbatch to the step.

        Args: loss: this rank's, a number or a tensor of one. data: what this rank was fed; its digests are kept.
        """
        self.guard(self._step)(loss, data)

    def _step(self, loss: Any, data: Any) -> None:
        watching, part = self._watching, self._part
        assert watching is not None
        assert part is not None
        if loss is not None:
            self._losses.append(float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss))
        if data is not None:
            found = fed(data)
            self._rows += found.rows
            self._tokens += found.tokens
        if watching.optimizers and not watching.updated:
            return
        watching.end()
        self.steps += 1
        if self.steps == self.done + 1:
            part.facts(describe.part(watching, self.rank, self.world_size))
            self.cadence = self._cadence()  # what a first step does once is no cost of a step
        now = time.perf_counter()
        line = {
            "step": self.steps,
            "losses": self._losses,
            "rows": self._rows,
            "tokens": self._tokens,
            "lr": watching.lr,
            "forwards": watching.forwards,
            "repeats": len({*watching.updated}) < len(watching.updated),
            "seconds": now - self._last,
            "memory": _memory(),
            "comm": by_kind(self._traffic.take()) if self._traffic is not None else {},
            "looked": watching.looks,
            "done": self.done,
        }
        if watching.kept:
            part.tensors(f"step-{self.steps:06d}", watching.kept)
        part.step(line, watching.table.values if watching.looks else None)
        self.cadence.end(self.steps)
        if part.num_bytes > self._rows_bytes:
            self.cadence.thin()
            self._rows_bytes += ROWS_BYTES
        self._begin_step()

    def _begin_step(self) -> None:
        assert self._watching is not None
        self._losses, self._rows, self._tokens = [], [], 0
        self._watching.forwards = 0
        step = self.steps + 1
        captured = self._is_captured(step)
        self._watching.begin(looks=captured or self.cadence.looks(step), captured=captured)
        self._last = time.perf_counter()

    def _is_captured(self, step: int) -> bool:
        assert self._watching is not None
        if self.chosen is not None:
            return step in self.chosen
        if int(str(step)[1:] or 0) or str(step)[0] != "1":
            return False
        shards = self._watching.shards.values()
        size = PARTS_OF_A_STEP * sum(shard.numel * shard.source.element_size() for shard in shards)
        self._kept_bytes += size
        if self._keep_last:
            self._kept_bytes = min(self._kept_bytes, (1 + self._keep_last) * size)
        return self._kept_bytes <= self.limit_bytes

    def close(self, reason: str = "") -> None:
        """End the run, as the end of the process does. The last rank to end puts the record together."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._let_go()
        unhandled = None if (last := _last_error()) is self._earlier else last
        reason = self.problem or reason or (f"{type(unhandled).__name__}: {unhandled}" if unhandled else "")
        if not reason:
            self.guard(self._end)()
            reason = self.problem
        try:
            if self._part is not None:
                if reason:
                    self._part.end({"reason": reason})
                merge.if_last(self.path, self.world_size)
        except Exception as error:  # a full disk, say
            LOG.warning("%s is incomplete: %s: %s", self.path, type(error).__name__, error)
        if self._lock is not None:
            self._lock.release()

    def _end(self) -> None:
        assert self._watching is not None
        assert self._part is not None
        self._watching.follow()
        self._part.end({"reason": "", "final": self._watching.digests()})

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")


def _last_error() -> BaseException | None:
    """The error that ends this process, or that ended an earlier cell of a notebook."""
    return getattr(sys, "last_value", None)


def _memory() -> dict[str, int | None]:
    """The most until now, in bytes: of tensors by CUDA's allocator, and of this process."""
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    return {"allocated": allocated, "rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


DIGEST_BYTES = 8


class Fed(NamedTuple):
    rows: list[str]
    """Digest of each row of the batch, 16 hex digits; of the whole batch where its tensors have no common length."""
    tokens: int
    """Numbers in the first tensor of integers; rows if there is none."""


def fed(data: Any) -> Fed:
    """Digests of a batch: a tensor, an array, a number, a text, or any nest of dicts and lists of them."""
    leaves = [(key, _tensor(leaf)) for key, leaf in _leaves(data)]
    lengths = {leaf.shape[0] if leaf.ndim else 0 for _, leaf in leaves}
    count = lengths.pop() if len(lengths) == 1 else 0
    if not count:
        return Fed([_digest_of(leaves)] if leaves else [], 1 if leaves else 0)
    rows = [_digest_of([(key, leaf[row]) for key, leaf in leaves]) for row in range(count)]
    each = next((math.prod(leaf.shape[1:]) for _, leaf in leaves if not leaf.is_floating_point()), 1)
    return Fed(rows, count * each)


def _leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if data is None:
        return
    if isinstance(data, Mapping):
        for name in sorted(data, key=str):
            yield from _leaves(data[name], f"{key}/{name}")
    elif isinstance(data, list | tuple) and not (data and all(isinstance(item, str | int | float) for item in data)):
        for place, item in enumerate(data):
            yield from _leaves(item, f"{key}/{place}")
    else:
        yield key, data


def _tensor(leaf: Any) -> Tensor:
    """A list of numbers or texts has an item a row."""
    if isinstance(leaf, list | tuple) and any(isinstance(each, str) for each in leaf):
        leaf = [list(hashlib.blake2b(str(each).encode(), digest_size=DIGEST_BYTES).digest()) for each in leaf]
    elif isinstance(leaf, str):
        leaf = list(leaf.encode())
    found = leaf.detach() if isinstance(leaf, Tensor) else torch.as_tensor(leaf)
    found = getattr(found, "_local_tensor", found)
    return found.to("cpu", copy=True).contiguous()


def _digest_of(leaves: list[tuple[str, Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for key, leaf in leaves:
        digest.update(f"{key} {leaf.dtype} {list(leaf.shape)}\n".encode())
        digest.update(leaf.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
