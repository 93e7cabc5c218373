"""The group `model`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from harness.config.number import COUNT, number


class ModelFamily(Enum):
    llama = "llama"
    moe = "moe"
    odd = "odd"
    ext = "ext"


@dataclass
class ModelConfig:
    """The model that is trained: a family of modules and its sizes."""

    name: str = "tiny"
    """Label used in run names and reports."""
    family: ModelFamily = ModelFamily.llama
    """Family of the model: llama is a Llama-style decoder, moe the same with routed experts, odd a set of
    awkward cases, and ext your own class."""
    target: str | None = None
    """Your own model, as package.module:Class (ext)."""
    parameters: int | None = number(None, 0, 2**50, "weights")
    """Number of weights of your own model (ext). It is counted before ranks start and cannot be set."""
    vocab_size: int = number(256, 2, COUNT, "token ids")
    """Number of token ids; 256 for bytes."""
    dim: int = number(64, 1, 2**20, "features")
    """Width of the residual stream."""
    num_layers: int = number(4, 1, 10_000, "blocks")
    """Number of transformer blocks."""
    num_heads: int = number(4, 1, 2**16, "heads")
    """Number of query heads; it must divide `dim`."""
    num_kv_heads: int = number(2, 1, 2**16, "heads")
    """Number of key and value heads (grouped-query attention); it must divide `num_heads`."""
    ffn_dim: int = number(176, 1, 2**22, "features")
    """Hidden width of the SwiGLU feed-forward."""
    max_seq_len: int = number(2048, 1, 2**24, "tokens")
    """Longest sequence that the rotary table covers."""
    rope_theta: float = number(10000.0, 0, 10**12, above=True)
    """Base of the rotary frequencies."""
    norm_eps: float = number(1.0e-5, 0, 1, above=True)
    """Epsilon inside RMSNorm."""
    tie_embeddings: bool = False
    """Tie the output projection to the embedding matrix."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in the backward."""
    num_experts: int = number(4, 1, 2**16, "experts")
    """Number of experts (feed-forwards) in every block (moe)."""
    experts_per_token: int = number(2, 1, 2**16, "experts")
    """Number of experts to which each token is routed (moe)."""
    skip_idle: bool = True
    """Skip a part that no token of a microbatch uses (an expert, a side branch), so that its parameters get no gradient
    there (moe, odd). false: it runs on zero tokens, and its gradients are zeros. For ext: parts may be skipped."""
    repeat_unit: bool = False
    """Run the first block a second time, after the last one (odd)."""
    init_std: float = number(0.02, 0, 1_000)
    """Standard deviation of initial weights. For residual projections it is divided by sqrt(2 * num_layers)."""
