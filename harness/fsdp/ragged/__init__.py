"""DTensors that are cut unevenly, with rules for torch's operations; `torch.load` reads them by default."""

import torch

from harness.fsdp.ragged import operations as operations
from harness.fsdp.ragged.before_2_12 import ASKS_DTENSOR, ask_subclasses
from harness.fsdp.ragged.tensor import GatheredView, RaggedShard, RaggedTensor, Replicated, _restored, distribute_rows
from harness.private_torch import foreach_types

if ASKS_DTENSOR:
    ask_subclasses(RaggedTensor, GatheredView, Replicated)

torch.serialization.add_safe_globals([RaggedShard, _restored])
for types in foreach_types:
    types.append(RaggedTensor)  # as torch does for DTensor

__all__ = ["RaggedShard", "RaggedTensor", "distribute_rows"]
