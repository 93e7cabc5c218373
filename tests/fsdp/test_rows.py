"""DTensors handed out by the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.fsdp import module
from harness.fsdp.ragged import RaggedTensor
from harness.fsdp.tensor_parallel import values_here
from tests.fsdp.checked import Mutant, each_is_found, patched
from tests.fsdp.pairs import PAIRS, Pair, by_pair, data, loss_of, same, shard

WORLD = 4


def whole(value: Tensor) -> Tensor:
    """All of it; plain where nothing is cut."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def handed_out(rank: int, pair: Pair) -> list[str]:
    """What is wrong with a trained model's DTensors."""
    model, optimizer = shard(pair)
    loss_of(model, data(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    told = []
    right, held = dict(model.full_weights()), model.state_dict()
    right["exit.weight"] = right["entry.weight"]  # torch has tied weights under each of their names
    told += same({name: whole(value) for name, value in held.items()}, right)
    told += [name for name, value in held.items() if value.shape != right[name].shape]
    state = model.sharded_state()
    keys: list[Any] = [None] * WORLD
    dist.all_gather_object(keys, sorted(state))
    if any(each != keys[0] for each in keys):
        return ["ranks have other keys"]
    moments = {key: whole(value) for key, value in state.items() if key.endswith("/exp_avg")}
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, {key: value.double().sum().item() for key, value in moments.items()})
    told += ["moments differ between ranks"] if any(each != everyone[0] for each in everyone) else []
    told += ["no moment is there"] if not moments or not any(everyone[0].values()) else []
    model.close()
    return told


def _as_torch_cuts(self: RaggedTensor, **_: Any) -> Tensor:
    """What `Shard(0)` promises: even chunks in rank order."""
    group = self.device_mesh.get_group(self.device_mesh.ndim - 1)
    size, place = dist.get_world_size(group), dist.get_rank(group)
    even = torch.zeros(self.shape, dtype=self.dtype).chunk(size)
    found = [torch.zeros_like(each) for each in even] + [even[0][:0]] * (size - len(even))
    mine, rows = found[place], min(len(found[place]), len(self._local_tensor)) if self.shape else 0
    mine[:rows] = self._local_tensor[:rows]
    whole = torch.cat(found)
    dist.all_reduce(whole, group=group)
    return whole.reshape(self.shape)


_entries = module.optimizer_entries


def _only_what_lies_here(*args: Any) -> dict[str, Tensor]:
    return {key: value for key, value in _entries(*args).items() if not value.dim() or values_here(value).numel()}


MUTANTS = {
    "as torch cuts": Mutant(
        "A whole tensor is put together as torch's placement says",
        patched(RaggedTensor, "full_tensor", _as_torch_cuts),
        handed_out,
        Pair("optim_grads_params", "optim"),
    ),
    "what lies here alone": Mutant(
        "Parameters of which a rank holds no row have no key there",
        patched(module, "optimizer_entries", _only_what_lies_here),
        handed_out,
        Pair("optim_grads_params", "optim"),
    ),
}
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by saved state")


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_dtensor_gathers_rightly(pair: Pair) -> None:
    assert by_pair(handed_out)[pair] == [[]] * WORLD
