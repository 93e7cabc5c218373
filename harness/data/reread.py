"""A rank's sequences once more, from positions and files alone: what fed a run is not asked what it should have fed.

Neither loader nor sources take part, so a fault of theirs is not repeated here. A user's own source is asked through an
object of its own, and is trusted to be the same function twice.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np

from harness.config.data_source import pieces
from harness.config.derived import microbatches_per_rank
from harness.config.schema import Config, DataKind
from harness.data.order import sequence_at
from harness.data.sources import Source, Tokens, mix64, own_source


class Reread:
    """Reader of one rank's sequences. data_rank: as in `Loader`.

    Raises `ValueError`: the source is missing, empty or malformed.
    """

    def __init__(self, config: Config, data_rank: int) -> None:
        self._config, self._data_rank = config, data_rank
        self._own = microbatches_per_rank(config) * config.train.microbatch_size
        self._source: Source
        match config.data.kind:
            case DataKind.ext:
                self._source = own_source(config.data)
            case DataKind.synthetic:
                self._source = _Hashed(config)
            case _:
                self._source = _Files(config)

    def first(self, step: int) -> int:
        """First position of this rank in a step, which is counted from 1."""
        return (step - 1) * self._config.train.global_batch_size + self._data_rank * self._own

    def sequences(self, step: int) -> Tokens:
        """[sequences, seq_len + 1], in the order of positions."""
        first, seed = self.first(step), self._config.data.order_seed
        order = (sequence_at(each, self._source.num_sequences, seed) for each in range(first, first + self._own))
        return np.stack([self._source[index] for index in order])


class _Hashed:
    """Tokens of data=synthetic, by their formula."""

    def __init__(self, config: Config) -> None:
        self.num_sequences, self._length = config.data.num_sequences, config.data.seq_len + 1
        self._key, self._vocab_size = mix64(np.array([config.data.order_seed], np.uint64)), config.model.vocab_size

    def __getitem__(self, index: int) -> Tokens:
        places = np.arange(self._length, dtype=np.uint64) + np.uint64(index * self._length)
        high, low = np.divmod(mix64(places ^ self._key), np.uint64(2**32))
        tokens: Tokens = (np.minimum(high, low) * np.uint64(self._vocab_size) >> np.uint64(32)).astype(np.int64)
        return tokens


class _Files:
    """Tokens of files, each read from where it starts in its file."""

    def __init__(self, config: Config) -> None:
        self._pieces, self._seq_len = pieces(config.data), config.data.seq_len
        *self._begins, end = accumulate((piece.num_tokens for piece in self._pieces), initial=0)
        self.num_sequences = (end - 1) // self._seq_len

    def __getitem__(self, index: int) -> Tokens:
        at, missing = index * self._seq_len, self._seq_len + 1
        number, parts = bisect_right(self._begins, at) - 1, []
        while missing:
            piece, skipped = self._pieces[number], at - self._begins[number]
            count = min(missing, piece.num_tokens - skipped)
            begin = piece.offset + skipped * piece.token_bytes
            parts.append(np.fromfile(piece.path, f"<u{piece.token_bytes}", count, offset=begin))
            at, missing, number = at + count, missing - count, number + 1
        return np.concatenate(parts).astype(np.int64)
