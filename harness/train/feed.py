"""What `forward_backward` is given, held against what the data source holds.

The loader that feeds a run does not speak for itself: microbatches are copied as a step begins and hashed after it;
what they should have been is read from the source a second time, by the order of sequences alone. Neither counts for a
step's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from harness.config.schema import Config
from harness.data.loader import positions, sequence_digest
from harness.data.order import MASK64, sequence_at
from harness.data.sources import Tokens, open_source
from harness.engines.protocol import Microbatch


class FeedDigests(NamedTuple):
    """Hashes of one rank's tokens and targets of one step, unsigned 64-bit; equal where it was fed right."""

    held: int
    """Hash of what the data source holds."""
    fed: int


class Feed:
    """Reads what one rank should be fed. data_rank: as `Loader` takes it.

    Raises:
        ValueError: the source is missing, empty or malformed.
    """

    def __init__(self, config: Config, data_rank: int) -> None:
        self._config, self._data_rank = config, data_rank
        self._source = open_source(config)  # not the loader's

    def digests(self, step: int, given: Microbatch) -> FeedDigests:
        """Digests of a step and of what was given in it; waits for the device."""
        wanted = positions(self._config, self._data_rank, step)
        order = (sequence_at(each, self._source.num_sequences, self._config.data.order_seed) for each in wanted)
        right = np.stack([self._source[index] for index in order])
        held, fed = _digest(wanted.start, right), _sequences(given)
        return FeedDigests(held, held if np.array_equal(fed, right) else _digest(wanted.start, fed))


def joined(microbatches: Sequence[Microbatch]) -> Microbatch:
    """A copy of all of a step's microbatches as one, on their device."""
    tokens, targets = (torch.cat(rows) for rows in zip(*microbatches, strict=True))
    return Microbatch(tokens, targets)


def _sequences(given: Microbatch) -> Tokens:
    """The sequences that tokens and targets are cut from, [sequences, seq_len + 1]; where a target is not the token
    that follows, all tokens and all targets of each."""
    tokens, targets = (rows.cpu().numpy() for rows in given)
    shifted = np.array_equal(tokens[:, 1:], targets[:, :-1])
    return np.concatenate([tokens, targets[:, -1:] if shifted else targets], axis=1)


def _digest(first: int, rows: Tokens) -> int:
    """Sum of the hashes of sequences from a position on, modulo 2**64."""
    return sum(sequence_digest(position, row) for position, row in enumerate(rows, start=first)) & MASK64
