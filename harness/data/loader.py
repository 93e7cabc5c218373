"""This rank's share of every step's global batch, and the digest of sequences.

The global batch of step s (counted from 1) is positions [(s - 1) * G, s * G) of the global order, G =
train.global_batch_size, cut into M microbatches of b. Rank r of the N with data of their own takes global microbatches
[r * k, (r + 1) * k), k = M / N. So the batch is the same set of sequences in the same order for any N and k; only
tensor-parallel ranks share sequences.
"""

from __future__ import annotations

import hashlib

import numpy as np

from harness.config.data_source import describe
from harness.config.derived import microbatches_per_rank
from harness.config.schema import Config
from harness.data.order import MASK64, sequence_at
from harness.data.sources import Tokens, open_source


class Loader:
    def __init__(self, config: Config, rank: int) -> None:
        """rank: index among ranks with data of their own (`Ranks.data_rank`).

        Raises `ValueError`: the source is missing, empty or malformed.
        """
        self.config = config
        self.rank = rank
        self.num_microbatches = microbatches_per_rank(config)
        self.source = open_source(config)

    def batch(self, step: int) -> list[tuple[Tokens, Tokens]]:
        """This rank's microbatches of step `step` >= 1: tokens and targets, which are the tokens one position later,
        both int64 of shape [microbatch_size, seq_len].

        Raises `ValueError`: a token exceeds model.vocab_size.
        """
        sequences = [self._sequence(position) for position in positions(self.config, self.rank, step)]
        stacked = np.stack(sequences).reshape(self.num_microbatches, self.config.train.microbatch_size, -1)
        return [(rows[:, :-1], rows[:, 1:]) for rows in stacked]

    def _sequence(self, position: int) -> Tokens:
        index = sequence_at(position, self.source.num_sequences, self.config.data.order_seed)
        tokens = self.source[index]
        largest, vocab_size = int(tokens.max()), self.config.model.vocab_size
        if largest >= vocab_size:
            raise ValueError(
                f"{describe(self.config.data)} holds token {largest} in sequence {index}, but model.vocab_size="
                f"{vocab_size}: take a model with more token ids, or check data.token_dtype and data.header_bytes"
            )
        return tokens


def positions(config: Config, data_rank: int, step: int) -> range:
    own = microbatches_per_rank(config) * config.train.microbatch_size
    first = (step - 1) * config.train.global_batch_size + data_rank * own
    return range(first, first + own)


def sequence_digest(position: int, tokens: Tokens) -> int:
    """64-bit hash of a sequence's tokens (seq_len + 1, as little-endian int64) at a position of the global order."""
    hashed = hashlib.blake2b(position.to_bytes(8, "little"), digest_size=8)
    hashed.update(np.ascontiguousarray(tokens, dtype="<i8").data)
    return int.from_bytes(hashed.digest(), "little")


def global_digest(parts: list[int]) -> str:
    """Combined digest of all ranks in one step, in hex, independent of the number of ranks and microbatches."""
    return f"{sum(parts) & MASK64:016x}"
