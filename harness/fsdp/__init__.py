"""An FSDP engine: ZeRO 0-3 over flat, row-preserving shards, on gloo and NCCL.

It imports torch, `harness.fp8` and `harness.watchdog`.

Everything a user needs is a name of this package. Names are imported on first use, so that `Placements` and the
module `options` can be imported where torch is not.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.fp8.linear import Fp8Linear as Fp8Linear
    from harness.fsdp.api import ShardedModel as ShardedModel, fully_shard as fully_shard
    from harness.fsdp.comm.events import Observer as Observer
    from harness.fsdp.comm.mesh import Groups as Groups, axis_groups as axis_groups, with_sharp as with_sharp
    from harness.fsdp.comm.reduction import FixedPoint as FixedPoint
    from harness.fsdp.guards import (
        CollectiveError as CollectiveError,
        CopiesPart as CopiesPart,
        RanksDisagree as RanksDisagree,
        ReplicaDrift as ReplicaDrift,
    )
    from harness.fsdp.megatron import (
        MegatronModel as MegatronModel,
        fully_shard_model as fully_shard_model,
        fully_shard_optimizer as fully_shard_optimizer,
    )
    from harness.fsdp.module import FSDPModule as FSDPModule
    from harness.fsdp.options import (
        OPTIONS as OPTIONS,
        Fp8 as Fp8,
        GradBuffer as GradBuffer,
        Numerics as Numerics,
        Options as Options,
        OuterStrategy as OuterStrategy,
        Registration as Registration,
        SharpAxis as SharpAxis,
        Strategy as Strategy,
        Transport as Transport,
    )
    from harness.fsdp.policy import Dtypes as Dtypes, MixedPrecisionPolicy as MixedPrecisionPolicy
    from harness.fsdp.ragged.tensor import RaggedTensor as RaggedTensor
    from harness.fsdp.runtime.step import StepError as StepError
    from harness.fsdp.storage.placement import Placements as Placements
    from harness.fsdp.tensor_parallel import TpShard as TpShard, UnknownPlan as UnknownPlan
    from harness.fsdp.update.norms import sum_of_squares as sum_of_squares
    from harness.fsdp.update.rules import create_state as create_state

_MODULE_OF = {  # module of each name, which type checkers read above, and which is imported on first use
    each.name: str(node.module)
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and str(node.module).startswith("harness.")
    for each in node.names
}
__all__ = sorted(_MODULE_OF)

_FORMER = {  # names of the versions before, and their present ones (docs/renamed.md)
    "FlatPieceError": "raised no more: states are DTensors",
    "GradientAccessError": "raised no more: gradients between passes are DTensors",
    "LossScale": "torch.amp.GradScaler",
    "OptionKeywords": "harness.fsdp.Options",
    "Portion": "harness.fsdp.TpShard",
    "ReleasedWeightError": "raised no more: parameters between passes are DTensors",
    "RowShard": "harness.fsdp.RaggedTensor",
    "ShardedState": "the dictionary that model.sharded_state() returns",
    "StateMismatch": "RuntimeError, as torch's load_state_dict raises it",
    "ThreadBlocks": "torch.distributed.ProcessGroupNCCL.Options().config",
    "SharpOwnership": "harness.fsdp.axis_groups, and harness.fsdp.with_sharp",
    "ShardedOptimizer": "the optimizer that fully_shard(module, optimizer) returns",
    "communicator_options": "torch.distributed.ProcessGroupNCCL.Options()",
    "convert_linears": "harness.fsdp.Fp8Linear.convert",
    "watched": "harness.watchdog.Watchdog",
}


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        raise AttributeError(f"{__name__}.{name} is now {_FORMER[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
