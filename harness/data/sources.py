"""Sources of sequences: `source[i]` is sequence i, seq_len + 1 tokens, int64."""

from __future__ import annotations

from functools import lru_cache
from pkgutil import resolve_name
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from harness.config.data_source import Piece, count_sequences, pieces
from harness.config.schema import Config, DataConfig, DataKind

Tokens = NDArray[np.int64]
RawTokens = NDArray[np.unsignedinteger]

MAX_MAPPED_FILES = 64
"""Files kept mapped at a time; each costs a file descriptor."""


class Source(Protocol):
    num_sequences: int

    def __getitem__(self, index: int) -> Tokens:
        """Sequence `index` in [0, num_sequences): int64, shape [seq_len + 1]."""


class FileSource:
    """Files read as one stream of tokens; sequence i is tokens [i * seq_len, (i + 1) * seq_len], sharing its last
    token.

    Files are memory-mapped at first use.
    """

    def __init__(self, found: list[Piece], seq_len: int) -> None:
        self.seq_len = seq_len
        self.pieces = found
        self.ends = np.cumsum([piece.num_tokens for piece in found])
        self.num_sequences = (int(self.ends[-1]) - 1) // seq_len
        self._map = lru_cache(maxsize=MAX_MAPPED_FILES)(_map)

    def __getitem__(self, index: int) -> Tokens:
        start = index * self.seq_len
        stop = start + self.seq_len + 1
        first = int(np.searchsorted(self.ends, start, side="right"))
        parts = []
        while start < stop:
            piece_start = int(self.ends[first]) - self.pieces[first].num_tokens
            until = min(stop, int(self.ends[first]))
            parts.append(self._map(self.pieces[first])[start - piece_start : until - piece_start].astype(np.int64))
            start, first = until, first + 1
        return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _map(piece: Piece) -> RawTokens:
    return np.memmap(piece.path, f"<u{piece.token_bytes}", "r", offset=piece.offset, shape=(piece.num_tokens,))


class SyntheticSource:
    """Tokens hashed from (seed, sequence, position), small ids more likely than large ones, so that a loss can fall."""

    def __init__(self, num_sequences: int, seq_len: int, vocab_size: int, seed: int) -> None:
        self.num_sequences = num_sequences
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.key = mix64(np.full(1, seed, dtype=np.uint64))

    def __getitem__(self, index: int) -> Tokens:
        length = self.seq_len + 1
        counter = np.arange(index * length, (index + 1) * length, dtype=np.uint64)
        hashed = mix64(counter ^ self.key)
        smaller_half = np.minimum(hashed >> np.uint64(32), hashed & np.uint64(0xFFFFFFFF))
        tokens: Tokens = ((smaller_half * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int64)
        return tokens


def mix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`order.mix64` on an array of at least one dimension: scalars would warn on overflow."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def own_source(data: DataConfig) -> Source:
    source: Source = resolve_name(str(data.target))(data)
    return source


def open_source(config: Config) -> Source:
    """Raises `ValueError`, as `data_source.count_sequences`."""
    data = config.data
    if data.kind is DataKind.ext:
        return own_source(data)
    count = count_sequences(data)
    if data.kind is DataKind.synthetic:
        return SyntheticSource(count, data.seq_len, config.model.vocab_size, data.order_seed)
    return FileSource(pieces(data), data.seq_len)
