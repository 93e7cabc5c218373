"""A Llama-style decoder in one file: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes are suffixes of tensor names: `x_BSD` is [B, S, D].

    B  sequences of the microbatch        H  query heads
    S  positions of a sequence            K  key and value heads (H is a multiple of K)
    D  width of the residual stream       E  width of a head, D / H
    F  width of the feed-forward          V  token ids

Nothing here knows of ranks. Parameters are created uninitialised in the dtype asked for (also on the meta device) and
filled by name from outside, so that every engine starts from the same values. The rotary tables are fp32, or fp64 in an
fp64 model, and stay so whatever the compute dtype.

The tensor-parallel plan is in torch's own styles. Matrices into heads and hidden units are cut by rows, matrices out of
them by columns, with products summed over ranks. Embedding and output projection are cut by tokens. Norms are
replicated and see all positions; with sequence parallelism each rank's share, so that an all-reduce becomes a
reduce-scatter and an all-gather: as many bytes, and less memory between.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
from torch.utils.checkpoint import checkpoint

from harness.config.schema import ModelConfig


def rotary_tables(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each [max_seq_len, E / 2], in `dtype`.

    Angles are computed in fp64 on the CPU, equal on every device.
    """
    head_dim = config.dim // config.num_heads
    inverse_E = config.rope_theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angle_SE = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float64, device="cpu"), inverse_E)
    return angle_SE.cos().to(device, dtype), angle_SE.sin().to(device, dtype)


def rotate(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate each pair (i, i + E/2) of a head by its position's angle; computed in the tables' dtype."""
    cos_S1E, sin_S1E = cos_SE.unsqueeze(1), sin_SE.unsqueeze(1)
    low, high = x_BSHE.to(cos_SE.dtype).chunk(2, dim=-1)
    turned = torch.cat((low * cos_S1E - high * sin_S1E, high * cos_S1E + low * sin_S1E), dim=-1)
    return turned.to(x_BSHE.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean of squares is taken in fp32, or fp64 for an fp64 model."""

    def __init__(self, dim: int, eps: float, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))

    def forward(self, x_BSD: Tensor) -> Tensor:
        wide_BSD = x_BSD.to(wide(x_BSD.dtype))
        scale_BS1 = torch.rsqrt(wide_BSD.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide_BSD * scale_BS1).to(x_BSD.dtype) * self.weight


class Unfilled:
    """Part of a layer that leaves its weights uninitialised: they are filled by name from outside."""

    def reset_parameters(self) -> None:
        """Nothing."""


class Linear(Unfilled, nn.Linear):
    """A projection; weight [num_out, num_in]."""

    def __init__(
        self, num_in: int, num_out: int, device: torch.device | str, dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        super().__init__(num_in, num_out, bias=bias, device=device, dtype=dtype)


class Attention(nn.Module):
    """Causal self-attention in which H / K query heads share a key and value head."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.wq = Linear(config.dim, config.dim, device, dtype)
        self.wk = Linear(config.dim, kv_dim, device, dtype)
        self.wv = Linear(config.dim, kv_dim, device, dtype)
        self.wo = Linear(config.dim, config.dim, device, dtype)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        q_BSHE = rotate(self.wq(x_BSD).unflatten(-1, (-1, self.head_dim)), cos_SE, sin_SE)
        k_BSKE = rotate(self.wk(x_BSD).unflatten(-1, (-1, self.head_dim)), cos_SE, sin_SE)
        v_BSKE = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        mixed_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BSKE.transpose(1, 2),
            v_BSKE.transpose(1, 2),
            is_causal=True,
            enable_gqa=q_BSHE.shape[2] != k_BSKE.shape[2],
        )
        out_BSD: Tensor = self.wo(mixed_BHSE.transpose(1, 2).flatten(2))
        return out_BSD


class FeedForward(nn.Module):
    """SwiGLU: w_down(silu(w_gate x) * w_up x)."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.w_gate = Linear(config.dim, config.ffn_dim, device, dtype)
        self.w_up = Linear(config.dim, config.ffn_dim, device, dtype)
        self.w_down = Linear(config.ffn_dim, config.dim, device, dtype)

    def forward(self, x_BSD: Tensor) -> Tensor:
        hidden_BSF = F.silu(self.w_gate(x_BSD)) * self.w_up(x_BSD)
        out_BSD: Tensor = self.w_down(hidden_BSF)
        return out_BSD


class Block(nn.Module):
    """One pre-norm transformer layer.

    Recomputation wraps the body *inside* `forward`, so that an engine's hooks run outside: weights are gathered once
    for the backward, before recomputation.
    """

    feed_forward_class: ClassVar[type[nn.Module]] = FeedForward

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.recompute = config.activation_checkpointing
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, device, dtype)
        self.attention = Attention(config, device, dtype)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps, device, dtype)
        self.ffn = self.feed_forward_class(config, device, dtype)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            # Nothing in the body draws random numbers, so their state need not be kept.
            out_BSD: Tensor = checkpoint(
                self._body, x_BSD, cos_SE, sin_SE, use_reentrant=False, preserve_rng_state=False
            )
            return out_BSD
        return self._body(x_BSD, cos_SE, sin_SE)

    def _body(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SE, sin_SE)
        out_BSD: Tensor = x_BSD + self.ffn(self.ffn_norm(x_BSD))
        return out_BSD


class Embedding(Unfilled, nn.Embedding):
    """Token embedding [V, D]; a class of its own, to be a unit."""


class Head(nn.Module):
    """Last norm and output projection; with tied embeddings the norm alone."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps, device, dtype)
        self.output = None if config.tie_embeddings else Linear(config.dim, config.vocab_size, device, dtype)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Logits [B, S, V], or the normed stream [B, S, D] where the projection is tied."""
        x_BSD = self.norm(x_BSD)
        return x_BSD if self.output is None else self.output(x_BSD)


class TiedOutput(nn.Module):
    def forward(self, x_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        return F.linear(x_BSD, weight_VD)


class Llama(nn.Module):
    """Tokens to logits.

    With tied embeddings there is one parameter, `embedding.weight`, with both uses in this `forward`: no alias that
    `to_empty` or wrapping could untie.
    """

    block_class: ClassVar[type[Block]] = Block

    cos_SE: Tensor
    sin_SE: Tensor

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.dim, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(self.block_class(config, device, dtype) for _ in range(config.num_layers))
        self.head = Head(config, device, dtype)
        self.tied_output = TiedOutput() if config.tie_embeddings else None
        cos_SE, sin_SE = rotary_tables(config, wide(dtype), device)
        self.register_buffer("cos_SE", cos_SE, persistent=False)
        self.register_buffer("sin_SE", sin_SE, persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits [B, S, V] in the compute dtype of tokens [B, S] (int64), S at most max_seq_len."""
        seq_len = tokens_BS.shape[1]
        cos_SE, sin_SE = self.cos_SE[:seq_len], self.sin_SE[:seq_len]
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_SE, sin_SE)
        out: Tensor = self.head(x_BSD)
        return out if self.tied_output is None else self.tied_output(out, self.embedding.weight)


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
