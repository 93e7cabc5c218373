"""Cells that plans are held against: strategies, dtypes, hybrids, tensor parallelism, microbatches and options."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from tests.support.covering import covering

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
DTYPES = ("fp32", "bf16", "bf16_comm", "bf16_pure")
SIZES = (
    *("model=tiny", "model.num_layers=3", "data=synthetic", "data.seq_len=64", "train.microbatch_size=2"),
    "launch.dry_run=true",
)


class Cell(NamedTuple):
    ranks: int
    k: int
    words: tuple[str, ...]
    tp: int = 1

    @property
    def overrides(self) -> tuple[str, ...]:
        batch = 2 * self.k * self.ranks // self.tp
        own = (f"mesh.world_size={self.ranks}", f"mesh.tp={self.tp}", f"train.global_batch_size={batch}")
        given = {word.partition("=")[0] for word in self.words}
        return (*(word for word in SIZES if word.partition("=")[0] not in given), *own, *self.words)

    def __str__(self) -> str:
        return "-".join([f"{self.ranks}x{self.k}", *(["tp"] if self.tp > 1 else []), *self.words])


def _few(*factors: tuple[object, ...]) -> list[tuple[object, ...]]:
    points = list(itertools.product(*factors))
    return [points[place] for place in covering(points)]


ALONE = [Cell(2, k, (f"sharding={s}", f"dtype={d}")) for s, d, k in _few(STRATEGIES, DTYPES, (1, 3))]
HYBRID = [
    Cell(4, 2, (f"sharding={s}", f"dtype={d}", f"sharding.outer={outer}", f"mesh.dp_outer={size}"))
    for s, d, outer, size in _few(STRATEGIES, DTYPES[:3], ("no_shard", "optim"), (2, 4))
]
TENSOR = [
    Cell(4, 1, (f"sharding={s}", f"dtype={d}", f"mesh.sequence_parallel={sp}"), tp=2)
    for s, d, sp in _few(STRATEGIES, DTYPES[:2], ("false", "true"))
]
FP8 = [
    Cell(2, 1, ("model.dim=128", "model.ffn_dim=192", f"dtype={dtype}", f"sharding={strategy}"))
    for dtype, others in (("fp8_current", "optim"), ("mxfp8", "no_shard"))
    for strategy in ("optim_grads_params", others)
]
OTHERS = [
    Cell(ranks, k, tuple(text.split()))
    for ranks, k, text in (
        (2, 2, "numerics=exact"),
        (2, 1, "numerics=ordered sharding=no_shard"),
        (3, 2, "dtype=bf16_comm sharding=no_shard"),
        (3, 1, "dtype=bf16_comm engine.transport=backend"),
        (2, 1, "engine.transport=backend sharding=optim_grads"),
        (2, 1, "model.activation_checkpointing=true dtype=bf16"),
        (2, 2, "engine.offload_optimizer=true"),
        (2, 1, "engine.prefetch=3 data.seq_len=16"),
        (2, 3, "engine.prefetch=4 dtype=bf16 model.dim=96 model.ffn_dim=256"),
        (2, 1, "model.tie_embeddings=true"),
        (2, 1, "optimizer=sgd optimizer.momentum=0.9"),
        (2, 1, "model=moe dtype=bf16 sharding=optim"),
    )
]
FIXED = [
    Cell(2, k, (f"sharding={s}", f"dtype={d}", "engine.double_buffer=true", "model.num_layers=8", "data.seq_len=8"))
    for s, d, k in (("optim_grads_params", "bf16_comm", 2), ("optim_grads", "fp32", 1), ("no_shard", "bf16", 1))
]
PEERS = [
    Cell(ranks, k, tuple(f"engine={text}".split()), tp)
    for ranks, k, tp, text in (
        (2, 2, 1, "fsdp2 sharding=optim_grads dtype=bf16_comm"),
        (3, 1, 1, "fsdp2 sharding=optim_grads_params dtype=bf16"),
        (4, 2, 1, "fsdp2 sharding=optim_grads_params mesh.dp_outer=2 model.tie_embeddings=true"),
        (4, 2, 1, "fsdp2 sharding=optim_grads mesh.dp_outer=4 optimizer=sgd optimizer.momentum=0.9"),
        (4, 2, 2, "fsdp2 dtype=bf16 mesh.sequence_parallel=true"),
        (4, 1, 2, "fsdp2 dtype=fp32 mesh.sequence_parallel=true"),
        (2, 1, 1, "fsdp2 dtype=fp8_current model.dim=128 model.ffn_dim=192"),
        (2, 2, 1, "fsdp1 sharding=optim_grads dtype=bf16_comm"),
        (3, 1, 1, "fsdp1 sharding=optim_grads_params dtype=bf16 model.dim=56 model.ffn_dim=51"),
        (3, 2, 1, "fsdp1 sharding=no_shard model.dim=56 model.ffn_dim=51"),
        (4, 2, 1, "fsdp1 sharding=optim_grads_params mesh.dp_outer=2 model.tie_embeddings=true"),
        (2, 2, 1, "ddp sharding=no_shard dtype=bf16_comm"),
        (3, 1, 1, "ddp numerics=deterministic dtype=bf16 model=moe"),
        (2, 1, 1, "ddp dtype=fp8_current model.dim=128 model.ffn_dim=192"),
        (2, 1, 1, "ddp model.dim=512 model.ffn_dim=1400"),
        (2, 3, 1, "megatron_fsdp sharding=optim_grads_params dtype=bf16 model=moe model.skip_idle=false"),
        (2, 2, 1, "megatron_fsdp sharding=no_shard dtype=bf16"),
        (2, 2, 1, "megatron_fsdp sharding=optim dtype=bf16_comm"),
        (3, 2, 1, "megatron_fsdp sharding=optim_grads dtype=bf16"),
        (3, 2, 1, "megatron_fsdp sharding=optim_grads_params"),
        (2, 1, 1, "megatron_fsdp dtype=bf16_comm model.tie_embeddings=true model.activation_checkpointing=true"),
        (4, 2, 1, "megatron_fsdp sharding.outer=no_shard mesh.dp_outer=2 dtype=bf16_comm"),
        (4, 2, 1, "megatron_fsdp sharding.outer=optim mesh.dp_outer=2 dtype=bf16"),
        (2, 3, 1, "megatron_fsdp sharding=optim dtype=bf16 model.tie_embeddings=true"),
        (4, 2, 1, "megatron_fsdp sharding=optim sharding.outer=no_shard mesh.dp_outer=2 dtype=bf16_comm"),
        (4, 2, 1, "megatron_fsdp sharding=optim_grads sharding.outer=no_shard mesh.dp_outer=2"),
        (2, 2, 1, "deepspeed sharding=optim_grads_params dtype=bf16_comm"),
        (3, 2, 1, "deepspeed sharding=optim dtype=bf16_comm"),
        (2, 2, 1, "deepspeed sharding=optim"),
        (3, 2, 1, "deepspeed sharding=optim_grads dtype=bf16"),
        (3, 2, 1, "deepspeed sharding=optim_grads_params model.tie_embeddings=true"),
    )
]
CONVOLUTIONS = ("model=ext", "model.target=tests.plan.own:ConvolutionWorkload", "model.vocab_size=64")
OWN = [Cell(2, 2, (*CONVOLUTIONS, "model.dim=32", "dtype=bf16")), Cell(2, 2, (*CONVOLUTIONS, "model.dim=128"))]
OURS = [*ALONE, *HYBRID, *TENSOR, *FP8, *FIXED, *OTHERS]
CELLS = [*OURS, *PEERS, *OWN]
