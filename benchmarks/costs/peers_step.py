"""The arms of engine_versions.py: our engine, DDP and FSDP2 as a user shards with them, at three shapes.

Every optimizer is AdamW, `fused=True` or, where an arm says `defaults`, made without `fused` and `foreach`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.bench.stats import Interval
from harness.config.schema import Strategy
from harness.fsdp import fully_shard_model, fully_shard_optimizer
from harness.models.llama import Block, Embedding, Head, Llama
from tests.support.factory import small_config

LAYERS = 4
SHAPES = {"comm": (512, 1344, 8), "between": (512, 1344, 128), "compute": (256, 704, 384)}
"""Width, width of the feed-forward layer, and tokens a rank and step; 12.7 M weights twice, then 3.1 M."""
UNITS = (Embedding, Block, Head)
DDP, DDP_DEFAULTS, FSDP2, DEFAULTS = "ddp", "ddp, defaults", "fsdp2", ", defaults"
OURS = tuple(strategy.value for strategy in Strategy)
ARMS = (DDP, FSDP2, *OURS, DDP_DEFAULTS, *(f"{name}{DEFAULTS}" for name in (OURS[0], OURS[-1])))


def decoder(dim: int, ffn_dim: int, tokens: int) -> nn.Module:
    """The harness' decoder, with weights that are the same on every rank."""
    model = small_config().model
    model.dim, model.ffn_dim, model.num_layers, model.vocab_size = dim, ffn_dim, LAYERS, 256
    model.num_heads, model.num_kv_heads, model.max_seq_len = dim // 64, dim // 64, tokens
    made = Llama(model, "cpu", torch.float32)
    torch.manual_seed(0)
    for param in made.parameters():
        nn.init.normal_(param, 1.0 if param.dim() == 1 else 0.0, 0.02)
    return made


def prepare(arm: str, module: nn.Module) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    kernel: dict[str, Any] = {} if arm.endswith(DEFAULTS) else {"fused": True}
    name = arm.removesuffix(DEFAULTS)
    if name == DDP:
        model = DistributedDataParallel(module)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **kernel)
    if name == FSDP2:
        for unit in module.modules():
            if isinstance(unit, UNITS):
                torch_fsdp.fully_shard(unit)
        torch_fsdp.fully_shard(module)
        return module, torch.optim.AdamW(module.parameters(), lr=1e-4, **kernel)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, **kernel)
    model = fully_shard_model(module, fsdp_unit_modules=[*UNITS], zero_dp_strategy=name)
    return model, fully_shard_optimizer(model, optimizer)


def in_order(turn: int, names: tuple[str, ...]) -> Iterator[str]:
    """These arms, begun with another one each turn, every second turn backwards."""
    first = turn % len(names)
    order = names[first:] + names[:first]
    return iter(order if turn % 2 == 0 else order[::-1])


def told(ratio: Interval | None) -> dict[str, float]:
    assert ratio is not None
    return {key: round(getattr(ratio, key), 3) for key in ("value", "low", "high")}
