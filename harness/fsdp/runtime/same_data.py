"""Data of tensor-parallel ranks, compared once, in the first update.

Where a plan cuts the embedding and the head, too, every activation is a sum over ranks and every copied gradient is the
same, whatever each rank was given: a model would train on a mixture of batches. What a cut module takes as replicated
is compared instead: integers (token ids) by their bits, other data by sums; and gradients of what it gives replicated,
in which other labels show. Activations are left out: they are made of what was compared. Modules that torch.compile
takes in are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from harness.fsdp.comm.mesh import Meshes, all_values
from harness.fsdp.guards.replicas import SMALL, WAVES, CopiesPart, bit_hash, parted, sums_with_waves
from harness.fsdp.runtime.weak_hooks import WeakHook
from harness.fsdp.storage.param_group import ParamGroup
from harness.private_torch import spec_before, tree_leaves


class SameData:
    """buckets: all of the model."""

    def __init__(self, module: nn.Module, buckets: Sequence[ParamGroup], meshes: Meshes) -> None:
        shards = [each for bucket in buckets for each in bucket.tp_shards.items()]
        owners = {name.rpartition(".")[0] for name, shard in shards if not shard.is_whole}
        modules = [(path, part) for path, part in module.named_modules() if path in owners]
        self._names = [path or "the model" for path, _ in modules]
        self._meshes = meshes
        self._handles: list[RemovableHandle] = []
        for place, (_, module) in enumerate(modules):
            look, follow = _outside_graphs(self._look, place), _outside_graphs(self._follow, place)
            self._handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
            self._handles.append(module.register_forward_hook(follow))
        self._begin()

    def _begin(self) -> None:
        count, device = len(self._names), self._meshes.dense.everyone.runtime.device
        self._bits = torch.zeros(count, dtype=torch.int64, device=device)
        self._sums = torch.zeros(count, 2, len(WAVES) + 1, dtype=torch.float64, device=device)  # of data, of gradients

    def _look(self, place: int, module: nn.Module, args: object, kwargs: object) -> None:
        for given in tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ():
            if not isinstance(given, Tensor) or given.requires_grad:
                continue
            if isinstance(given, DTensor):
                if not all(each.is_replicate() for each in given.placements):
                    continue
                given = given.to_local()
            elif given.is_floating_point():
                continue  # nothing says if it is a shard
            if given.is_floating_point():
                self._add(place, 0, given)
            else:
                self._bits[place] += bit_hash(given).to(self._bits.device)

    def _follow(self, place: int, module: nn.Module, args: object, output: object) -> None:
        for each in tree_leaves(output) if torch.is_grad_enabled() else ():
            spec = spec_before(each) if isinstance(each, Tensor) else None
            if spec is not None and all(placement.is_replicate() for placement in spec.placements):
                each.register_hook(WeakHook(self._add, place, 1))

    def _add(self, place: int, kind: int, values: Tensor) -> None:
        self._sums[place, kind] += sums_with_waves(values.detach().reshape(-1), 0).to(self._sums.device)

    def check(self) -> None:
        """The gradients of an update are finished. *Collective* until something was seen. Raises CopiesPart: on all
        ranks."""
        tensor = self._meshes.tensor
        if not self._handles or tensor is None:
            return
        bits = all_values(tensor, self._bits, "data of tensor-parallel ranks")
        sums = all_values(tensor, self._sums, "data of tensor-parallel ranks")
        self._begin()
        sums[..., -1].sqrt_()
        largest, apart = parted(sums)
        apart[:, 1] &= largest[:, 1] > SMALL * largest[:, 1].max()
        apart[:, 0] |= (bits != bits[0]).any(0)
        everyone = self._meshes.dense.everyone
        apart = all_values(everyone, apart.to(torch.int64), "data of tensor-parallel ranks").sum(0).cpu()
        if not apart.any():
            if bool((bits != 0).any()) or bool((largest > 0).any()):
                self._end()
            return
        place, kind = apart.nonzero()[0].tolist()
        what = "gradients of what it gives differ" if kind else "its input differs"
        raise CopiesPart(
            f"tensor-parallel ranks did not see the same data: of {self._names[place]}, which the plan says is"
            f" replicated, {what} between ranks of tp_dim{' (other labels, or another loss)' if kind else ''}."
            " Its weights are cut, so that all ranks would train on a mixture. Give ranks of tp_dim the same batch: a"
            " sampler with num_replicas and rank of the data-parallel dimension, mesh['dp'].size() and"
            " mesh['dp'].get_local_rank(). No weight was changed; zero_grad() forgets the step"
        )

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _outside_graphs(method: Callable[..., None], place: int) -> Callable[..., None]:
    """A hook that torch.compile traces to nothing."""
    weak = WeakHook(method, place)

    def hook(*given: object) -> None:
        if not torch.compiler.is_compiling():
            weak(*given)

    return hook
