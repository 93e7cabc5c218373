"""A state copied to the CPU, so that training can change it while it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.tensor import DTensor


class Copied:
    def __init__(self, key: str, tensor: Tensor, memory: Tensor | None) -> None:
        self.items: list[WriteItem] = _create_write_items(key, tensor)
        held = tensor.detach()
        local: Tensor = held.to_local() if isinstance(held, DTensor) else held
        pinned = local.device.type == "cuda"
        fits = memory is not None and memory.shape == local.shape and memory.dtype == local.dtype
        self.tensor = (
            memory if memory is not None and fits else torch.empty_like(local, device="cpu", pin_memory=pinned)
        )
        self.tensor.copy_(local)

    def __create_write_items__(self, _fqn: str, _object: object) -> list[WriteItem]:
        return self.items


class Snapshots:
    def __init__(self) -> None:
        self._held: dict[str, Copied] = {}

    def take(self, state: Mapping[str, Tensor]) -> dict[str, Copied]:
        memory = {key: copied.tensor for key, copied in self._held.items()}
        self._held = {key: Copied(key, tensor, memory.get(key)) for key, tensor in state.items()}
        return self._held


class SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.tensor if isinstance(held, Copied) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
