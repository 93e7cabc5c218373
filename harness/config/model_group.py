"""The group `model`: what is trained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from harness.config.number import COUNT, number


class ModelFamily(Enum):
    """Which module is built: a Llama-style decoder, the same with routed experts, a collection of awkward cases, or a
    class of one's own."""

    llama = "llama"
    moe = "moe"
    odd = "odd"
    ext = "ext"


@dataclass
class ModelConfig:
    """What is trained: a module of one family and its sizes."""

    name: str = "tiny"
    """Label used in run names and reports."""
    family: ModelFamily = ModelFamily.llama
    """Which module is built."""
    target: str | None = None
    """A model of one's own, as package.module:Class (ext)."""
    parameters: int | None = number(None, 0, 2**50, "weights")
    """Weights of a model of one's own, counted before ranks start; never typed (ext)."""
    vocab_size: int = number(256, 2, COUNT, "token ids")
    """Number of token ids; 256 for bytes."""
    dim: int = number(64, 1, 2**20, "features")
    """Width of the residual stream."""
    num_layers: int = number(4, 1, 10_000, "blocks")
    """Number of transformer blocks."""
    num_heads: int = number(4, 1, 2**16, "heads")
    """Query heads; `dim` is divisible by it."""
    num_kv_heads: int = number(2, 1, 2**16, "heads")
    """Key and value heads (grouped-query attention); `num_heads` is divisible by it."""
    ffn_dim: int = number(176, 1, 2**22, "features")
    """Hidden width of the SwiGLU feed-forward."""
    max_seq_len: int = number(2048, 1, 2**24, "tokens")
    """Longest sequence the rotary table covers, in tokens."""
    rope_theta: float = number(10000.0, 0, 10**12, above=True)
    """Base of the rotary frequencies."""
    norm_eps: float = number(1.0e-5, 0, 1, above=True)
    """Epsilon inside RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output projection is the embedding matrix."""
    activation_checkpointing: bool = False
    """Whether each block recomputes its activations in the backward."""
    num_experts: int = number(4, 1, 2**16, "experts")
    """Feed-forwards a token can be routed to, in every block (moe)."""
    experts_per_token: int = number(2, 1, 2**16, "experts")
    """Feed-forwards a token is routed to (moe)."""
    skip_idle: bool = True
    """Whether what no token of a microbatch needs (an expert, a side branch) is skipped, so that its parameters get no
    gradient there; false runs it on zero tokens, which gives zeros (moe, odd). Of ext: whether that may happen."""
    repeat_unit: bool = False
    """Whether the first block runs a second time, after the last one (odd)."""
    init_std: float = number(0.02, 0, 1_000)
    """Standard deviation of initial weights; residual projections get it divided by sqrt(2 * num_layers)."""
