"""Training loops by hand, of torch and of DeepSpeed, to which faults of the corpus (tests/faults) are handed.

[Note: Handles] A fault of the corpus wraps methods and changes tensors of our engine. Here those that mean something
outside of it stand over objects of another program: the forward of a microbatch, gradients that are handed over and
summed over ranks, the norm, the update, weights that arrive from other ranks, a state to resume from. A loop without a
fault runs its program's own code between them: its sums over ranks are replaced only where there is a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from harness.capture.shards import find
from harness.config.schema import NO_FAULT, Config
from harness.engines import optim
from harness.engines.protocol import Microbatch, State
from harness.fsdp import create_state
from harness.models.workload import workload_for
from tests.capture import loops
from tests.faults import clips, site


@dataclass(frozen=True)
class Rows:
    """This rank's rows of a parameter, flat, as `tests.faults.update.Rows` has them of our engine."""

    name: str
    bucket: Bucket
    group: int
    loop: Loop

    @property
    def grad(self) -> Tensor:
        return self.loop.grad_of(self.name).view(-1)

    @property
    def weight(self) -> Tensor:
        return self.loop.weight_of(self.name).view(-1)

    @property
    def settings(self) -> dict[str, Any]:
        return self.loop.groups[self.group]

    def state(self, entry: str) -> Tensor:
        found = self.loop.state_of(self.name)[entry]
        return found.view(-1) if found.ndim else found


class Bucket:
    """Parameters of a block, the embedding or the head."""

    trainable, is_resident, main_version = True, False, 0

    def __init__(self, name: str, params: dict[str, torch.Size], loop: Loop) -> None:
        self.name, self.params, self.loop = name, params, loop
        self.is_whole_everywhere = not loop.is_sharded
        numel = sum(shape.numel() for shape in params.values())
        self.layout = SimpleNamespace(param_numel=numel, bucket_numel=numel, gaps=())
        self.inner = SimpleNamespace(fold=lambda exchange, into, *, add: None)
        self.gradients = SimpleNamespace(take=lambda: torch.cat([self.taken[name].reshape(-1) for name in params]))
        self.taken: dict[str, Tensor] = {}

    @property
    def rows(self) -> list[Rows]:
        return [rows for rows in self.loop.rows if rows.bucket is self]

    @property
    def grad_shards(self) -> list[Tensor]:
        return [rows.grad for rows in self.rows] or [torch.zeros(1)]

    @property
    def main_shards(self) -> list[Tensor]:
        return [rows.weight for rows in self.rows] or [torch.zeros(1)]

    @property
    def others(self) -> list[Tensor]:
        """Parts of whole weights that other ranks own."""
        return [part for name in self.params for part in self.loop.others_of(name) if part.numel()]

    def named_slices(self, source: Tensor) -> list[tuple[str, Tensor]]:
        parts = source.split([shape.numel() for shape in self.params.values()])
        return [(name, part.view(shape)) for (name, shape), part in zip(self.params.items(), parts, strict=True)]

    def hand_over(self, gradients: dict[str, Tensor]) -> None:
        """This rank's gradients, before they are summed, through whatever a fault made of `gradients.take`."""
        if self.params.keys() <= gradients.keys():
            self.taken = gradients
            for name, part in self.named_slices(self.gradients.take()):
                gradients[name].copy_(part)


class Loop:
    """One process: plain torch."""

    is_sharded = False

    def __init__(self, config: Config, rank: int, size: int) -> None:
        self.config, self.rank, self.size = config, rank, size
        self.is_faulty, self._number = config.fault.name != NO_FAULT, 0
        self.workload = workload_for(config)
        self.net = self.workload.build("cpu", torch.float32)
        shapes = {name: param.shape for name, param in self.net.named_parameters()}
        with torch.no_grad():
            for name, param in self.net.named_parameters():
                param.copy_(self.workload.initial_weight(name, param.shape))
        self.wrapped: Any = self._wrap()
        self.params: dict[str, Any] = dict(self.net.named_parameters())
        groups = optim.groups_of(config.optimizer, self.workload, self.params, shapes)
        self.optimizer = optim.make_optimizer(config.optimizer, groups)
        place = {id(param): number for number, each in enumerate(groups) for param in each.params}
        self.watched: Any = self.optimizer
        self.buckets: list[Bucket] = []
        self._finish()
        self.groups, self.rows = [*self.optimizer.param_groups], list[Rows]()
        for unit in dict.fromkeys(map(_unit, shapes)):
            of_unit = {name: shape for name, shape in shapes.items() if _unit(name) == unit}
            self.buckets.append(Bucket(unit, of_unit, self))
            rows = (Rows(name, self.buckets[-1], place[id(self.params[name])], self) for name in of_unit)
            self.rows += [each for each in rows if each.weight.numel()]
        self.parts = SimpleNamespace(
            buckets=self.buckets,
            reduce=SimpleNamespace(factor=1.0, finish=self._scale, order=[SimpleNamespace(trainable=self.buckets)]),
            gather=SimpleNamespace(_wait_for_unshard=lambda unit: None),
            weights=SimpleNamespace(install=lambda: None),
        )
        self.model = SimpleNamespace(module=self.net, install_weights=self.install, engine=self.parts)
        if self.is_faulty:
            self._open()

    # -- of each program -------------------------------------------------------------------------------------------

    def _wrap(self) -> Any:
        return self.net

    def _finish(self) -> None:
        """Make of model and optimizer what the program makes of them."""

    def _open(self) -> None:
        """Let a fault into what the program does by itself."""

    def _backward(self, batch: Microbatch, last: bool) -> Tensor:
        loss = self.workload.loss(self.wrapped, batch)
        (loss / (self.config.train.global_batch_size // self.config.train.microbatch_size // self.size)).backward()
        return loss

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def install(self) -> None:
        """Bring weights that were changed into the next forward."""

    def grad_of(self, name: str) -> Tensor:
        return _local(self.params[name].grad)

    def weight_of(self, name: str) -> Tensor:
        return _local(self.params[name].detach())

    def state_of(self, name: str) -> dict[str, Tensor]:
        return {entry: _local(value) for entry, value in self.optimizer.state[self.params[name]].items()}

    def others_of(self, name: str) -> list[Tensor]:
        return []

    # -- as the corpus finds an engine -----------------------------------------------------------------------------

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        self._number += 1
        if self._number > 1:
            for bucket in self.buckets:
                bucket.inner.fold(None, bucket.grad_shards, add=True)
        loss = self._backward(batch, last)
        self._number = 0 if last else self._number
        return loss.detach()

    @torch.no_grad()
    def _scale(self) -> None:
        for bucket in self.buckets if self.parts.reduce.factor != 1.0 else ():
            for piece in bucket.grad_shards:
                piece.mul_(self.parts.reduce.factor)

    def step(self, lr: float) -> float:
        bound = self.config.optimizer.clip_norm
        self.parts.reduce.finish()
        norm = clips.norms.gradient_norm(self.buckets)
        if bound is not None:
            clips.norms.clip_gradients(self.buckets, norm, bound)
        optim.set_lr(self.optimizer, lr)
        self._update()
        self.parts.weights.install()
        return float(norm)

    def state(self) -> State:
        create_state(self.optimizer)
        found = {f"weights/{rows.name}": rows.weight for rows in self.rows}
        for rows in self.rows:
            found |= {f"optimizer/{rows.name}/{entry}": rows.state(entry) for entry in self.state_of(rows.name)}
        return State(found, self.install)

    # -- sums over ranks -------------------------------------------------------------------------------------------

    def hand_over(self, gradients: dict[str, Tensor]) -> None:
        for bucket in self.buckets:
            bucket.hand_over(gradients)

    def summed(self, flat: Tensor) -> Tensor:
        """Sum over the ranks, of which each adds up one part."""
        every = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(every, flat.contiguous())
        own = [each.tensor_split(self.size)[self.rank].clone() for each in every]
        parts = [part.clone() for part in flat.tensor_split(self.size)]
        site.reduction.sum_in_order(own, parts[self.rank], flat.dtype)
        for rank, part in enumerate(parts):
            dist.broadcast(part, rank)
        return torch.cat(parts)

    def waited(self, buckets: list[Bucket]) -> None:
        self.parts.gather._wait_for_unshard(SimpleNamespace(buckets=buckets))


class Ddp(Loop):
    def _wrap(self) -> Any:
        return nn.parallel.DistributedDataParallel(self.net, bucket_cap_mb=64)

    def _backward(self, batch: Microbatch, last: bool) -> Tensor:
        with nullcontext() if last else self.wrapped.no_sync():
            return super()._backward(batch, last)

    def _open(self) -> None:
        names = {id(param): name for name, param in self.params.items()}

        self.wrapped.register_comm_hook(None, lambda state, bucket: self._sending(names, bucket))

    def _sending(self, names: dict[int, str], sent: Any) -> torch.futures.Future[Tensor]:
        ids = [names[id(param)] for param in sent.parameters()]
        self.hand_over(dict(zip(ids, sent.gradients(), strict=True)))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(self.summed(sent.buffer()) / self.size)
        return done


class Fsdp2(Loop):
    is_sharded = True

    def _wrap(self) -> Any:
        for module in [each for each in self.net.modules() if isinstance(each, self.workload.unit_classes)]:
            fully_shard(module)
        return fully_shard(self.net)

    def _open(self) -> None:
        names = {id(param): name for name, param in self.params.items()}
        self._inside: dict[str, Any] = {}
        states = [each._get_fsdp_state() for each in self.net.modules() if isinstance(each, FSDPModule)]
        for group in (group for state in states for group in state._fsdp_param_groups):
            inside = {names[id(each.sharded_param)]: each for each in group.fsdp_params}
            self._inside |= inside
            buckets = [bucket for bucket in self.buckets if bucket.params.keys() & inside.keys()]
            group.post_backward = partial(self._sending, group.post_backward, inside)
            group.wait_for_unshard = partial(self._landing, group, group.wait_for_unshard, buckets)

    @torch.no_grad()
    def _sending(self, send: Callable[..., None], inside: dict[str, Any], *unused: Any) -> None:
        found = {name: getattr(each, "_unsharded_param", None) for name, each in inside.items()}
        self.hand_over({name: each.grad for name, each in found.items() if each is not None and each.grad is not None})
        send(*unused)

    def _landing(self, group: Any, wait: Callable[[], None], buckets: list[Bucket]) -> None:
        is_due = bool(group._all_gather_result)
        wait()
        if is_due:
            self.waited(buckets)

    def others_of(self, name: str) -> list[Tensor]:
        chunks = self._inside[name]._unsharded_param.data.chunk(self.size)
        return [chunk.view(-1) for rank, chunk in enumerate(chunks) if rank != self.rank]


class Ours(Loop):
    """Our engine, by the call that FSDP2 has; for clean pairs."""

    is_sharded = True

    def _wrap(self) -> Any:
        from harness.fsdp import fully_shard as ours

        return ours(self.net, unit_modules=[*self.workload.unit_classes])


class Zero2(Loop):
    """DeepSpeed at its second stage: fp32, gradients of all of a microbatch in one message."""

    is_sharded = True

    def _finish(self) -> None:
        k = self.config.train.global_batch_size // self.config.train.microbatch_size // self.size
        options = {"gradient_accumulation_steps": k, "zero_optimization": {"stage": 2, "reduce_bucket_size": 10**6}}
        options |= {"train_micro_batch_size_per_gpu": self.config.train.microbatch_size, "gradient_clipping": 0.0}
        options |= {"zero_allow_untested_optimizer": True}
        self.wrapped, self.watched = loops._zero(self.net, self.optimizer, stage=2, **options)
        self.zero: Any = self.watched
        self._updates = False
        self.shards = find([self.wrapped], self.zero).shards

    def _backward(self, batch: Microbatch, last: bool) -> Tensor:
        self.wrapped.set_gradient_accumulation_boundary(last)
        loss = self.workload.loss(self.wrapped, batch)
        self.wrapped.backward(loss)
        return loss

    def _update(self) -> None:
        self._updates = True
        self.wrapped.step()
        self._updates = False
        self.waited(self.buckets)

    def _open(self) -> None:
        send = self.zero.reduce_ipg_grads

        def sending(*args: Any) -> None:
            with torch.no_grad():
                self.hand_over({name: each.grad for name, each in self.params.items() if each.grad is not None})
            send(*args)

        self.zero.reduce_ipg_grads = sending
        self.zero._optimizer_step = partial(self._stepping, [])

    def _stepping(self, held: list[Tensor], at: int) -> None:
        """Step all groups at once, as faults of the corpus expect it; DeepSpeed steps one after the other."""
        flats = self.zero.single_partition_of_fp32_groups
        held.append(flats[at].grad)
        if len(held) == len(flats):
            for flat, gradient in zip(flats, held, strict=True):
                flat.grad = gradient
            held.clear()
            self.optimizer.step()
            for flat, parts in zip(flats, self.zero.parallel_partitioned_bit16_groups, strict=True):
                flat.grad = None
                parts[self.rank].data.copy_(flat.data)

    def install(self) -> None:
        """Collective; after an update DeepSpeed does it itself."""
        if not self._updates:
            self.zero.update_lp_params()

    def _here(self, name: str, flat: Tensor) -> Tensor:
        shard = self.shards[name]
        begin = shard.blocks[0].begin if shard.blocks else 0
        return flat[begin : begin + shard.numel] if flat.ndim else flat

    def weight_of(self, name: str) -> Tensor:
        return self._here(name, self.shards[name].source.data)

    def grad_of(self, name: str) -> Tensor:
        """In the update of its group, of a step before it, or between microbatches; zeros where there is none."""
        flat = self.shards[name].source.grad
        if flat is not None:
            return self._here(name, flat)
        for at, params in enumerate(self.zero.params_in_partition):
            pieces = self.zero.averaged_gradients.get(at) or self.zero.all_grad_tensors.get(at) or ()
            for param, piece in zip(params, pieces, strict=False):
                if param is self.params[name]:
                    return piece
        return torch.zeros(self.shards[name].numel)

    def state_of(self, name: str) -> dict[str, Tensor]:
        """One count of a partition: the first of its rows has it, the others a copy."""
        source = self.shards[name].source
        first = next(rows.name for rows in self.rows if self.shards[rows.name].source is source)
        held = {entry: self._here(name, value) for entry, value in self.optimizer.state[source].items()}
        return {entry: value if value.ndim or name == first else value.clone() for entry, value in held.items()}

    def others_of(self, name: str) -> list[Tensor]:
        flat, shard = self.params[name].data.view(-1), self.shards[name]
        return [flat[: shard.begin], flat[shard.begin + shard.numel :]] if shard.numel else [flat]


KINDS: dict[str, type[Loop]] = {"single": Loop, "ddp": Ddp, "fsdp2": Fsdp2, "zero_2": Zero2, "ours": Ours}


def _unit(name: str) -> str:
    return ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])


def _local(tensor: Any) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found
