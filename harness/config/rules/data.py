"""Rules of data: it exists, is long enough, and fits the vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from harness.config.data_source import SourceFacts, describe, inspect
from harness.config.errors import Violation
from harness.config.own import described
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import Config, DataConfig, DataKind, TokenDtype

_READS = ("data.seq_len", "data.header_bytes", "data.num_sequences")


@functools.lru_cache(maxsize=64)
def _inspected(
    kind: DataKind, path: str | None, seq_len: int, width: TokenDtype, header: int, count: int
) -> SourceFacts:
    return inspect(
        DataConfig(kind, path=path, seq_len=seq_len, token_dtype=width, header_bytes=header, num_sequences=count)
    )


def _facts(config: Config) -> SourceFacts | str | None:
    data = config.data
    if data.kind is DataKind.ext:
        found = described("data", config)
        if found is None:
            return None
        count = int(found.told["num_sequences"])
        return SourceFacts(count * (data.seq_len + 1), count, int(found.told["max_token"]))
    try:
        return _inspected(data.kind, data.path, data.seq_len, data.token_dtype, data.header_bytes, data.num_sequences)
    except (ValueError, OSError) as error:
        return str(error)


@rule(*_READS)
def source_is_readable(request: Request) -> Iterator[Violation]:
    facts = _facts(request.config)
    if isinstance(facts, str):
        data = request.config.data
        choices = "" if data.path else "stdlib, text, tokens, synthetic, ext"
        yield Violation(describe(data), facts, choices, "data=stdlib needs no file")


@rule(*_READS, "train.global_batch_size")
def source_fills_a_batch(request: Request) -> Iterator[Violation]:
    facts, batch = _facts(request.config), request.config.train.global_batch_size
    if isinstance(facts, SourceFacts) and facts.num_sequences < batch:
        yield Violation(
            describe(request.config.data),
            f"has {facts.num_sequences:,} sequences of data.seq_len={request.config.data.seq_len}, "
            f"fewer than one global batch, train.global_batch_size={batch}",
            fix="more data, a shorter data.seq_len or a smaller train.global_batch_size",
        )


@rule(*_READS, "model.vocab_size")
def ids_fit_the_vocabulary(request: Request) -> Iterator[Violation]:
    facts, vocab = _facts(request.config), request.config.model.vocab_size
    if isinstance(facts, SourceFacts) and facts.max_token is not None and facts.max_token >= vocab:
        yield Violation(
            request.show("model.vocab_size"),
            f"{describe(request.config.data)} has token ids up to {facts.max_token} or more",
            f"{facts.max_token + 1} or more",
            f"model.vocab_size={facts.max_token + 1}, or check data.token_dtype and data.header_bytes",
        )


RULES: tuple[Rule, ...] = (source_is_readable, source_fills_a_batch, ids_fit_the_vocabulary)
