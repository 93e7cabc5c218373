"""State by name: full tensors for whoever looks, this rank's own flat tensors for resuming on the same layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.events import Label
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.placement import WHOLE
from harness.fsdp.update.optimizer import ShardedOptimizer

STEP_DTYPE = torch.float64
"""Plain numbers of an optimizer's state (torch keeps `step` as a tensor or a number) are saved as this."""


def full_weights(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Main weights of every parameter, whole, on the CPU, one bucket in memory at a time. *Collective.*"""
    return _full(buckets, lambda bucket: bucket.main_shards, "weights")


def full_gradients(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Main gradients of every trained parameter, whole, on the CPU, after they were reduced. *Collective.*"""
    return _full([bucket for bucket in buckets if bucket.trainable], lambda bucket: bucket.grad_shards, "gradients")


def _full(
    buckets: Sequence[Bucket], shards_of: Callable[[Bucket], list[Tensor]], what: str
) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets:
        shards = shards_of(bucket)
        whole = torch.zeros(bucket.layout.bucket_numel, dtype=shards[0].dtype, device=bucket.memory.device)
        inner = bucket.cuts.inner_shards(whole)
        for own, shard in zip(bucket.cuts.own_shards(inner), shards, strict=True):
            own.copy_(shard)
        with events.waiting(Label("all_gather", f"{bucket.name} {what}")):
            for pending in bucket.gather_shards(whole, inner, WHOLE, what):
                pending.wait()
        for name, view in bucket.named_slices(whole):
            yield name, view.detach().to("cpu", copy=True)


def local_state(buckets: Sequence[Bucket], optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """This rank's main weights and optimizer state as flat tensors; keys name bucket, segment and range."""
    state = {
        f"weights/{bucket.name}:{index}": shard.detach()
        for bucket in buckets
        for index, shard in enumerate(bucket.main_shards)
    }
    for name, values, _ in optimizer.named_state():
        for key, value in values.items():
            if value is not None:
                is_tensor = isinstance(value, Tensor)
                state[f"optimizer/{name}/{key}"] = value if is_tensor else torch.tensor(value, dtype=STEP_DTYPE)
    return state


def load_local_state(buckets: Sequence[Bucket], optimizer: ShardedOptimizer, state: Mapping[str, Tensor]) -> None:
    """Put back what `local_state` gave on the same layout. Compute weights are the caller's to refresh.

    Raises:
        ValueError: a key is missing, unexpected, or of another shape or dtype; nothing was loaded.
    """
    weights = {
        f"weights/{bucket.name}:{index}": shard for bucket in buckets for index, shard in enumerate(bucket.main_shards)
    }
    runs = {name: (values, weight) for name, values, weight in optimizer.named_state()}
    moments = {key: value for key, value in state.items() if key.startswith("optimizer/")}
    problems = [f"missing {key}" for key in weights if key not in state]
    problems += [f"unexpected {key}" for key in state if key not in weights and key not in moments]
    for key, value in state.items():
        target = weights[key] if key in weights else runs.get(_run_name(key), (None, None))[1]
        problems += _mismatch(key, value, target)
    held = {name: {key.rsplit("/", 1)[1] for key in moments if _run_name(key) == name} for name in runs}
    complete = set().union(*held.values()) | {key for values, _ in runs.values() for key in values}
    problems += [f"missing optimizer/{name}/{key}" for name in runs for key in complete - held[name] if moments]
    if problems:
        raise ValueError("state does not fit this layout, nothing was loaded: " + "; ".join(problems[:8]))
    for key, shard in weights.items():
        shard.copy_(state[key])
    for values, _ in runs.values():
        values.clear()
    for key, value in moments.items():
        values, weight = runs[_run_name(key)]
        values[key.rsplit("/", 1)[1]] = value.to(weight.device if value.dim() else value.device, copy=True)


def _run_name(key: str) -> str:
    return key.removeprefix("optimizer/").rsplit("/", 1)[0]


def _mismatch(key: str, value: Tensor, target: Tensor | None) -> list[str]:
    if target is None:
        return [f"unexpected {key}"] if key.startswith("optimizer/") else []
    if key.startswith("optimizer/") and value.dim() == 0:
        return []
    if value.shape != target.shape:
        return [f"{key} has shape {tuple(value.shape)}, not {tuple(target.shape)}"]
    if value.dtype != target.dtype:
        return [f"{key} has dtype {value.dtype}, not {target.dtype}"]
    return []
