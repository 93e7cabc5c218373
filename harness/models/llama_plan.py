"""Tensor-parallel plan of `harness.models.llama`, in torch's own styles.

Matrices into heads and hidden units are cut by rows, matrices out of them by columns, with products summed over ranks.
Embedding and output projection are cut by tokens. Norms are replicated and see all positions; with sequence parallelism
each rank's share, so that an all-reduce becomes a reduce-scatter and an all-gather: as many bytes, and less memory
between.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from harness.models.llama import Llama

Plan = dict[str, ParallelStyle]


def cut(model: Llama, axis: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut a decoder in place over the ranks of a one-dimensional mesh. Collective over it.

    Args: sequence_parallel: cut activations between matrices by positions.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    for block in model.blocks:
        parallelize_module(block, axis, _of_block(between))
    parallelize_module(model, axis, _of_ends(between, is_tied=model.tied_output is not None))


def _of_block(between: Placement) -> Plan:
    plan: Plan = {
        "attention": PrepareModuleInput(
            input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
        "ffn": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "ffn.w_gate": ColwiseParallel(),
        "ffn.w_up": ColwiseParallel(),
        "ffn.w_down": RowwiseParallel(output_layouts=between),
    }
    if between.is_shard():
        plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    return plan


def _of_ends(between: Placement, *, is_tied: bool) -> Plan:
    plan: Plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
    if between.is_shard():
        plan["head.norm"] = SequenceParallel()
    if is_tied:
        plan["tied_output"] = PrepareModuleInputOutput(
            input_layouts=(between, None),
            desired_input_layouts=(Replicate(), None),
            use_local_input=False,
            output_layouts=Shard(-1),
            desired_output_layouts=Replicate(),
        )
    else:
        plan["head.output"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    return plan
