"""Weights of a model that are multiplied in 8 bits under `dtype.fp8`, and their sizes.

The projections of attention and feed-forward, an expert's too, as in TransformerEngine and torchtitan. Embedding, head,
norms and routers stay in the compute dtype: a lookup has no product, logits and routes are sensitive, and vectors are
small.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.config.schema import Fp8, ModelConfig, ModelFamily

NAMES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")

FAMILIES = (ModelFamily.llama, ModelFamily.moe)


class Projection(NamedTuple):
    """`count` weights of one kind, each [rows, columns], and the settings that determine these sizes."""

    name: str
    rows: int
    columns: int
    how_many: int
    settings: tuple[str, ...]


def projections(m: ModelConfig) -> list[Projection]:
    if m.family not in FAMILIES:
        return []
    kv_dim = m.dim // max(1, m.num_heads) * m.num_kv_heads
    experts = m.num_experts if m.family is ModelFamily.moe else 1
    dim, kv, ffn = (
        ("model.dim",),
        ("model.dim", "model.num_heads", "model.num_kv_heads"),
        ("model.dim", "model.ffn_dim"),
    )
    of_all = [
        *((name, m.dim, m.dim, 1, dim) for name in ("wq", "wo")),
        *((name, kv_dim, m.dim, 1, kv) for name in ("wk", "wv")),
        *((name, m.ffn_dim, m.dim, experts, ffn) for name in ("w_gate", "w_up")),
        ("w_down", m.dim, m.ffn_dim, experts, ffn),
    ]
    return [Projection(name, rows, cols, m.num_layers * n, paths) for name, rows, cols, n, paths in of_all]


def tp_shard(of: Projection, tp: int) -> tuple[int, int]:
    """Rows and columns on each of `tp` ranks.

    Matrices into heads and hidden units are cut by rows, matrices out of them by columns; see
    `harness.models.llama_plan`.
    """
    return (of.rows, of.columns // tp) if of.name in ("wo", "w_down") else (of.rows // tp, of.columns)


def fitting(m: ModelConfig, tp: int = 1) -> list[Fp8]:
    sizes = [size for each in projections(m) for size in tp_shard(each, tp)]
    return [recipe for recipe in Fp8 if sizes and not any(size % recipe.multiple for size in sizes)]
