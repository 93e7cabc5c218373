"""Rules of a model's sizes, by family."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.errors import Violation
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import ModelFamily

DECODERS = (ModelFamily.llama, ModelFamily.moe)


@rule("model.dim", "model.num_heads")
def heads_divide_the_width(request: Request) -> Iterator[Violation]:
    """Heads have equal, even widths, because rotary embeddings rotate pairs."""
    m = request.config.model
    if m.family in DECODERS and m.dim % (2 * m.num_heads):
        lower = max(m.dim // (2 * m.num_heads), 1) * 2 * m.num_heads
        yield Violation(
            request.show("model.dim"),
            f"is not an even multiple of model.num_heads={m.num_heads}: rotary embeddings need even heads",
            f"multiples of {2 * m.num_heads}",
            f"model.dim={lower}",
        )


@rule("model.num_heads", "model.num_kv_heads")
def groups_divide_the_heads(request: Request) -> Iterator[Violation]:
    m = request.config.model
    if m.family in DECODERS and m.num_heads % m.num_kv_heads:
        valid = [d for d in range(1, m.num_heads + 1) if m.num_heads % d == 0]
        best = max(d for d in valid if d <= max(m.num_kv_heads, 1))
        yield Violation(
            request.show("model.num_kv_heads"),
            f"does not divide model.num_heads={m.num_heads}",
            ", ".join(map(str, valid)),
            f"model.num_kv_heads={best}",
        )


@rule("model.num_experts", "model.experts_per_token")
def a_token_has_no_more_experts_than_there_are(request: Request) -> Iterator[Violation]:
    m = request.config.model
    if m.family is ModelFamily.moe and m.experts_per_token > m.num_experts:
        yield Violation(
            request.show("model.experts_per_token"),
            f"is more than model.num_experts={m.num_experts}: a token goes to distinct experts",
            f"1 to {m.num_experts}",
            f"model.experts_per_token={m.num_experts}, or model.num_experts={m.experts_per_token}",
        )


@rule("data.seq_len", "model.max_seq_len")
def sequence_fits_the_positions(request: Request) -> Iterator[Violation]:
    seq_len, longest = request.config.data.seq_len, request.config.model.max_seq_len
    if seq_len > longest:
        yield Violation(
            request.show("data.seq_len"),
            f"is longer than model.max_seq_len={longest}",
            f"1 to {longest}",
            f"data.seq_len={longest}, or model.max_seq_len={seq_len}",
        )


RULES: tuple[Rule, ...] = (
    heads_divide_the_width,
    groups_divide_the_heads,
    a_token_has_no_more_experts_than_there_are,
    sequence_fits_the_positions,
)
