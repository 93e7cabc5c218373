"""DTensors that are cut unevenly, with rules for torch's operations; `torch.load` reads them by default."""

import torch
from torch.optim.optimizer import _foreach_supported_types as optimizers_types
from torch.utils._foreach_utils import _foreach_supported_types as utils_types

from harness.fsdp.ragged import operations as operations
from harness.fsdp.ragged.before_2_12 import ASKS_DTENSOR, ask_subclasses
from harness.fsdp.ragged.placement import RaggedShard
from harness.fsdp.ragged.tensor import GatheredView, RaggedSpec, RaggedTensor, Replicated, _restored, distribute_rows

if ASKS_DTENSOR:
    ask_subclasses(RaggedTensor, GatheredView, Replicated)

torch.serialization.add_safe_globals([RaggedShard, RaggedSpec, _restored])
for types in (optimizers_types, utils_types):
    types.append(RaggedTensor)  # as torch does for DTensor

__all__ = ["RaggedShard", "RaggedTensor", "distribute_rows"]
